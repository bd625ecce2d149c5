"""How fast the simulator is, and how its cost grows with the cluster.

    python benchmarks/simulator.py            7B at 16 to 256 GPUs, 15 iterations of 8,192 trajectories
    python benchmarks/simulator.py --large    up to 10,240 GPUs, 5 iterations; the step grows with the cluster

One JSON line per size: events per second, seconds per 1,000 trajectories, peak memory. There is no peer: no published
simulator runs the scheduler that it simulates. The limit to compare with is the event loop itself: `loop_events_per_s`
is what the same machine does with timers and tasks that do nothing.
"""

import argparse
import asyncio
import json
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from laminar.config.simulation import SimulationConfig
from laminar.simulator import clock, paper
from laminar.simulator.beyond import LARGE_GPUS, large_cluster
from laminar.simulator.running import simulate

IDLE_EVENTS = 200_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="clusters beyond the published ones")
    parser.add_argument("--gpus", type=int, nargs="*", help="only these sizes")
    arguments = parser.parse_args()
    sizes = arguments.gpus or (LARGE_GPUS if arguments.large else paper.SCALES["7B"])
    machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    for gpus in sizes:
        config = large_cluster(gpus) if arguments.large else paper.throughput("7B", gpus, "laminar")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # peak memory is one run's
            row = pool.submit(measure, config).result()
        print(json.dumps({"benchmark": "simulator", **machine, "gpus": gpus, **row}), flush=True)


def measure(config: SimulationConfig) -> dict[str, Any]:
    """One run, and what it cost."""
    run = simulate(config)
    num_trajectories = sum(event["kind"] == "trajectory" for event in run.recorder.events)
    return {
        "replicas": config.num_replicas,
        "steps": config.work.num_steps,
        "trajectories": num_trajectories,
        "wall_s": round(run.wall_s, 1),
        "peak_mib": run.peak_bytes >> 20,
        "simulated_s": round(run.measures.simulated_s),
        "events_per_s": round(run.recorder.num_emitted / run.wall_s),
        "wall_s_per_1000_trajectories": round(1000 * run.wall_s / num_trajectories, 3),
        "loop_events_per_s": round(idle_loop_events_per_s()),
        "tokens_per_s": round(run.measures.tokens_per_s),
        "staleness_mean": round(run.measures.staleness_mean, 2),
        "staleness_max": run.measures.staleness_max,
        "trainer_wait_fraction": round(run.measures.trainer_wait_fraction, 3),
    }


def idle_loop_events_per_s() -> float:
    """Wake-ups per second of a virtual loop in which a hundred tasks do nothing but sleep."""

    async def sleep_often() -> None:
        for _ in range(IDLE_EVENTS // 100):
            await asyncio.sleep(1.0)

    async def sleepers() -> None:
        await asyncio.gather(*(sleep_often() for _ in range(100)))

    began_s = time.perf_counter()
    clock.run(sleepers())
    return IDLE_EVENTS / (time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
