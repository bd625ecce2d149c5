"""What to ask, how good an answer is, what an environment replies.

Invariant: a task speaks text and plain values; it never sees versions, replicas or Ray, and imports no torch.
"""
