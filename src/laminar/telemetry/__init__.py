"""Events, metrics, spans: append and read back.

Invariant: telemetry observes; nothing in the system waits for it or decides by it.
"""
