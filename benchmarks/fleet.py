"""What a heartbeat costs the manager's state machine, by the number of replicas.

    python benchmarks/fleet.py

One JSON line: microseconds of CPU per heartbeat, and, to compare with, those of copying a table of so many entries,
which is what a heartbeat would cost if every state had a dictionary of its own.
"""

import json
import os
import platform
import time
from collections.abc import Callable

from laminar.scheduling.fleet import Beat, Fleet, FleetRules, Scaled, new_fleet, step
from laminar.schema.fleet import ReplicaLoad

SIZES = (16, 256, 2_560, 25_600)
REPEATS = 5
MOST_BEATS = 2_000

RULES = FleetRules(
    suspect_after_s=3.0,
    dead_after_s=5.0,
    start_timeout_s=100.0,
    max_restarts=3,
    backoff_s=1.0,
    min_replicas=1,
    redirect_wait_s=60.0,
)


def main() -> None:
    row: dict[str, object] = {
        "benchmark": "fleet",
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
    row["heartbeat_us"] = {size: round(1e6 * heartbeat_s(size), 1) for size in SIZES}
    row["copy_us"] = {size: round(1e6 * copy_s(size), 1) for size in SIZES}
    print(json.dumps(row))


def heartbeat_s(num_replicas: int) -> float:
    """A fleet in the middle of its work."""
    loads = [a_load(number) for number in range(min(num_replicas, MOST_BEATS))]
    fleet, _ = step(new_fleet(0.0), Scaled(num_replicas=num_replicas), 0.0, RULES)

    def beat_all() -> None:
        nonlocal fleet
        fleet = after(fleet, loads)

    beat_all()
    return best_s(beat_all) / len(loads)


def after(fleet: Fleet, loads: list[ReplicaLoad]) -> Fleet:
    for load in loads:
        fleet, _ = step(fleet, Beat(load=load), 1.0, RULES)
    return fleet


def copy_s(num_entries: int) -> float:
    table = {f"replica-{number}": number for number in range(num_entries)}
    return best_s(lambda: [dict(table) for _ in range(100)]) / 100


def best_s(work: Callable[[], object]) -> float:
    """CPU seconds, so that other programs on the machine disturb little."""
    times_s = []
    for _ in range(REPEATS):
        began_s = time.process_time()
        work()
        times_s.append(time.process_time() - began_s)
    return min(times_s)


def a_load(number: int) -> ReplicaLoad:
    return ReplicaLoad(
        replica_id=f"replica-{number}",
        incarnation=1,
        phase="generating",
        version=1,
        lease_id=f"replica-{number}/1/1",
        num_running=3,
        num_waiting=0,
        num_acting=0,
        kv_used_tokens=5,
        kv_capacity_tokens=100,
    )


if __name__ == "__main__":
    main()
