"""Hold weight versions in host memory, pass them down the chain, serve local pulls.

Invariant: a reader sees a version completely or not at all, and never while its memory is reused.
"""
