"""Show a live or finished run from its telemetry; cannot command anything."""
