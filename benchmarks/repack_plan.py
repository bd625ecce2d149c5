"""How long one repack plan takes: 100 to 10,000 replicas of one version, all in ramp-down, loads random.

Prints one JSON line. The literal algorithm searches all destinations for each source, with sums kept as it goes; both
plans are compared. Run it with nothing else on the machine:

    python benchmarks/repack_plan.py
"""

import json
import platform
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from os import cpu_count, getloadavg
from time import process_time

from laminar.scheduling.repack import RepackCandidate, RepackPlan, RepackRules, plan_repack

SIZES = (100, 1_000, 10_000)
KV_CAPACITY_TOKENS = 772_000
"""KV pool of a replica of the 32B model over four 80 GB accelerators."""

RULES = RepackRules(max_running=295)


def random_fleet(size: int) -> list[RepackCandidate]:
    """Any KV use below C_max, any number of trajectories below B, independently: much skipping, few easy fits."""
    rng = random.Random(size)
    return [
        RepackCandidate(
            replica_id=f"replica-{number}",
            version=1,
            lease_id=f"replica-{number}/1/1",
            kv_used_tokens=rng.randrange(int(RULES.max_kv_fill * KV_CAPACITY_TOKENS)),
            kv_capacity_tokens=KV_CAPACITY_TOKENS,
            num_trajectories=rng.randrange(1, RULES.max_running),
        )
        for number in range(size)
    ]


def plan_literally(fleet: list[RepackCandidate], rules: RepackRules) -> list[tuple[str, str]]:
    """Algorithm 1 with the guard: quadratic in the number of replicas."""
    group = sorted(fleet, key=lambda replica: (replica.kv_used_tokens, replica.replica_id))
    tokens = [replica.kv_used_tokens for replica in group]
    counts = [replica.num_trajectories for replica in group]
    most_tokens = int(rules.max_kv_fill * KV_CAPACITY_TOKENS)
    emptied, taking = [False] * len(group), [False] * len(group)
    moves = []
    for number, source in enumerate(group):
        if taking[number]:
            continue
        best = -1
        for other in range(len(group)):
            if other == number or emptied[other]:
                continue
            if (
                tokens[other] + source.kv_used_tokens <= most_tokens
                and counts[other] + source.num_trajectories <= rules.max_running
                and (best < 0 or tokens[other] > tokens[best])
            ):
                best = other
        if best >= 0:
            emptied[number] = taking[best] = True
            tokens[best] += source.kv_used_tokens
            counts[best] += source.num_trajectories
            moves.append((source.replica_id, group[best].replica_id))
    return moves


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Median of CPU time, which busy neighbours lengthen less than wall time; the work is one thread without I/O."""
    times = []
    for _ in range(repeats):
        began = process_time()
        work()
        times.append((process_time() - began) * 1e3)
    return statistics.median(times)


def main() -> int:
    results = []
    for size in SIZES:
        fleet = random_fleet(size)
        plan: RepackPlan = plan_repack(fleet, RULES)
        row: dict[str, float] = {"replicas": size, "moves": len(plan.moves)}
        row["plan_ms"] = round(median_ms(partial(plan_repack, fleet, RULES), 15), 3)
        if plan_literally(fleet, RULES) != [(move.source, move.destination) for move in plan.moves]:
            print(f"the plans for {size} replicas differ", file=sys.stderr)
            return 1
        repeats = 3 if size <= 1_000 else 1
        row["literal_ms"] = round(median_ms(partial(plan_literally, fleet, RULES), repeats), 1)
        row["ratio"] = round(row["literal_ms"] / row["plan_ms"], 1)
        results.append(row)
    print(
        json.dumps(
            {
                "benchmark": "repack_plan",
                "machine": {
                    "processor": platform.processor() or platform.machine(),
                    "cpus": cpu_count(),
                    "load_average": round(getloadavg()[0], 2),
                    "python": platform.python_version(),
                },
                "setting": {"max_running": RULES.max_running, "max_kv_fill": RULES.max_kv_fill, "versions": 1},
                "results": results,
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
