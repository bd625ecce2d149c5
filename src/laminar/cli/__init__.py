"""Parse the command line; start train, inspect, status, bench."""
