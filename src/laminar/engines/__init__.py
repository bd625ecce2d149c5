"""One file per engine behind one Protocol.

Invariant: an engine turns tokens into more tokens under one weight version at a time; it never sees text, tasks or Ray.
"""
