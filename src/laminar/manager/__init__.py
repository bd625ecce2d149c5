"""Watch the fleet, ask scheduling, carry out what it says.

Invariant: the manager decides nothing itself and holds no state that heartbeats and leases could not rebuild.
"""
