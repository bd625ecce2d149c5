"""YAML plus overrides into one frozen, validated RunConfig, or a sentence that says what is wrong.

Invariant: importing this package brings in no torch, no ray and no numpy.
"""
