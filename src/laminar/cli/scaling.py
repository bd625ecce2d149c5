"""`laminar scale RUN --replicas N`: more or fewer replicas while training goes on."""

import sys
from pathlib import Path


def scale(run: Path, num_replicas: int) -> None:
    """Ask the live run; returns when it has begun."""
    from laminar.cluster.control import Scale, ask

    ask(run, Scale(num_replicas=num_replicas))
    sys.stdout.write(f"{run} now has {num_replicas} replicas; see laminar status {run}\n")
