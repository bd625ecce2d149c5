"""How fast the simulator is, and how its cost grows with the cluster.

    python benchmarks/simulator.py            7B at 16 to 256 GPUs, 15 iterations of 8,192 trajectories
    python benchmarks/simulator.py --large    up to 10,240 GPUs, 5 iterations; the step grows with the cluster

One JSON line per size: wall and CPU seconds, events per second, CPU seconds per 1,000 trajectories, peak memory; and a
last one with `growth`, the power of the number of GPUs with which CPU seconds grow from the smallest size to the
largest (1: proportional).

There is no peer: no published simulator runs the scheduler that it simulates. The limit to compare with is the event
loop itself: `loop_events_per_s` is what the same machine does with timers and tasks that do nothing. Rates are per
second of CPU, so that they hold on a machine that does something else, too.
"""

import argparse
import asyncio
import json
import math
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
    rows = []
    for gpus in sizes:
        config = large_cluster(gpus) if arguments.large else paper.throughput("7B", gpus, "laminar")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # peak memory is one run's
            rows.append(row := pool.submit(measure, config).result())
        load = {"load": round(os.getloadavg()[0], 1)}
        print(json.dumps({"benchmark": "simulator", **machine, **load, "gpus": gpus, **row}), flush=True)
    if len(rows) > 1:
        growth = math.log(rows[-1]["cpu_s"] / rows[0]["cpu_s"]) / math.log(sizes[-1] / sizes[0])
        ends = {"from_gpus": sizes[0], "to_gpus": sizes[-1]}
        print(json.dumps({"benchmark": "simulator", **machine, **ends, "growth": round(growth, 2)}))


def measure(config: SimulationConfig) -> dict[str, Any]:
    """One run, and what it cost."""
    run = simulate(config)
    num_trajectories = sum(event["kind"] == "trajectory" for event in run.recorder.events)
    return {
        "replicas": config.num_replicas,
        "steps": config.work.num_steps,
        "trajectories": num_trajectories,
        "wall_s": round(run.wall_s, 1),
        "cpu_s": round(run.cpu_s, 1),
        "peak_mib": run.peak_bytes >> 20,
        "simulated_s": round(run.measures.simulated_s),
        "events_per_s": round(run.recorder.num_emitted / run.cpu_s),
        "cpu_s_per_1000_trajectories": round(1000 * run.cpu_s / num_trajectories, 3),
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

    began_s = time.process_time()
    clock.run(sleepers())
    return IDLE_EVENTS / (time.process_time() - began_s)


if __name__ == "__main__":
    main()
