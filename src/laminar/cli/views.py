"""Choices of the command line; kept apart so that `--help` loads nothing else."""

import enum


class View(enum.StrEnum):
    """What to show."""

    AUDIT = "audit"
    PROMPT = "prompt"
    TRAJECTORY = "trajectory"
    DROPPED = "dropped"
