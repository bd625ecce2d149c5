"""Put services into Ray actors and onto machines; the only folder that imports ray."""
