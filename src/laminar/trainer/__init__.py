"""Turn experience into the next weight version and a checkpoint.

Invariant: a loss knows nothing of scheduling; versions and behaviour log-probs travel with the tokens.
"""
