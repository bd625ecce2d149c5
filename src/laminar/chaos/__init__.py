"""Break a running job on purpose, and say from its events how it got over it."""
