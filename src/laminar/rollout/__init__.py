"""Run trajectories on one replica: claim, generate, act, grade, emit; export and take in moved ones.

Invariant: all trajectories of a replica have the weight version that its engine holds; the version changes between
batches only.
"""
