"""Frozen values that cross a process boundary, and the error tree.

Invariant: nothing here acts. A value is built once, compared by content and never changed.
"""
