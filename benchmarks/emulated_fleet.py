"""A real run of sixteen emulated replicas on this machine, and the same run simulated: do their ratios agree?

    python benchmarks/emulated_fleet.py                 a quarter of an hour
    python benchmarks/emulated_fleet.py --scale 1       twice as long, for a machine that is slow or busy

Runs `laminar train` with the emulated engine, time passing `--scale` times as fast, three times: Laminar, Laminar
without repack, and the synchronous schedule; and simulates the same. Real processes, calls, relay and journal, but a
learner that has nothing to learn (all rewards are equal), so generation is what is compared: one JSON line with tokens
of finished answers per emulated second, and the two ratios. They are to agree within 15 %.

A real run is measured from the second step after its last replica has begun to work (processes start one after the
other, on few cores for a minute) over as many steps as the simulated one, and then stopped.

Emulated engines take no time of their own, so the comparison holds as long as the real processes keep up. Whether they
do is measured: `heartbeat_late_s` is how much later than asked for replicas report, in real seconds; a machine that is
too slow shows there first, and needs a smaller `--scale`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from laminar.config.run_config import ManagerConfig, RepackConfig
from laminar.config.simulation import ClusterConfig, EmulationConfig, LogNormalLengths, SimulationConfig, WorkConfig
from laminar.engines.workloads import LogNormal, mean
from laminar.simulator.running import simulate
from laminar.telemetry.files import EVENTS
from laminar.telemetry.reading import Event, Tail

RECIPE = Path(__file__).parents[1] / "recipes" / "gcd.yaml"

REPLICAS = 16
GROUP, GROUPS_PER_STEP, AHEAD, STEPS, WARMUP = 8, 64, 4, 6, 2
BATCH = 48
TOKENS_PER_ID = 34
MEDIAN_TOKENS, TAIL, MOST_TOKENS = 800.0, 8.0, 6_800
KV_TOKENS = 60_000
REPACK_EVERY_S, HEARTBEAT_S, REPORT_EVERY_S = 2.0, 1.0, 10.0
"""Emulated seconds; no more often than decisions need, since each costs real CPU in seventeen processes."""

REAL_CLAIM_WAIT_S = 0.5
"""What a real replica waits for a batch before it looks for newer weights."""

LONGEST_S = 1800.0
"""A real run that is not measured by then has failed."""

VARIANTS = {"laminar": ("laminar", True), "no_repack": ("laminar", False), "sync": ("sync", False)}


class Measured(dict[str, Any]):
    """Numbers of one run: `generated_per_s`, `seconds`, and of a real one `learner_s`, `heartbeat_late_s`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=2.0, help="emulated seconds per real second")
    scale = parser.parse_args().scale
    real, simulated, load = {}, {}, {}
    for name, (schedule, repack) in VARIANTS.items():
        real[name] = real_run(schedule, repack, scale)
        load[name] = round(os.getloadavg()[0], 1)
        simulated[name] = simulated_run(schedule, repack, real[name]["learner_s"], scale)
        print(f"{name}: real {real[name]}, simulated {simulated[name]}", file=sys.stderr, flush=True)
    row: dict[str, Any] = {"benchmark": "emulated_fleet", "cores": os.cpu_count(), "load_after_each_run": load}
    row |= {"replicas": REPLICAS, "time_scale": scale, "mean_tokens": round(mean(lengths()))}
    for key in ("learner_s", "heartbeat_late_s"):
        row[key] = {name: round(measured[key], 3) for name, measured in real.items()}
    for what, runs in (("real", real), ("simulated", simulated)):
        speed = {name: measured["generated_per_s"] for name, measured in runs.items()}
        row[f"{what}_generated_per_s"] = {name: round(value) for name, value in speed.items()}
        row[f"{what}_repack_gain"] = round(speed["laminar"] / speed["no_repack"], 3)
        row[f"{what}_over_sync"] = round(speed["laminar"] / speed["sync"], 3)
    for ratio in ("repack_gain", "over_sync"):
        row[f"{ratio}_deviation"] = round(row[f"real_{ratio}"] / row[f"simulated_{ratio}"] - 1, 3)
    print(json.dumps(row))


def lengths() -> LogNormal:
    """Answers of both runs."""
    return LogNormal(median=MEDIAN_TOKENS, p99_over_median=TAIL, most=float(MOST_TOKENS))


def real_run(schedule: str, repack: bool, scale: float) -> Measured:
    """A run on Ray; seconds are emulated ones, but for `heartbeat_late_s`."""
    options = {
        "model": "7B",
        "hardware": "H800",
        "median_tokens": MEDIAN_TOKENS,
        "p99_over_median": TAIL,
        "max_new_tokens": MOST_TOKENS,
        "kv_capacity_tokens": KV_TOKENS,
        "tokens_per_id": TOKENS_PER_ID,
        "time_scale": scale,
        "report_every_s": REPORT_EVERY_S,
    }
    engine = {
        "kind": "custom",
        "path": "laminar.engines.emulated_engine:emulated_engine",
        "kv_capacity_tokens": KV_TOKENS,
        "options": options,
    }
    values = {
        "schedule": schedule,
        "rollout.engine": engine,
        "rollout.num_replicas": REPLICAS,
        "rollout.batch_trajectories": GROUPS_PER_STEP * GROUP // REPLICAS if schedule == "sync" else BATCH,
        "rollout.max_new_tokens": MOST_TOKENS // TOKENS_PER_ID,
        "rollout.stream_every_tokens": MOST_TOKENS,
        "rollout.stream_every_s": REPORT_EVERY_S / scale,
        "data.group_size": GROUP,
        "data.max_groups_ahead": AHEAD * GROUPS_PER_STEP,
        "manager.heartbeat_s": HEARTBEAT_S / scale,
        "manager.suspect_after_s": 30.0,
        "manager.dead_after_s": 60.0,
        "manager.repack.enabled": repack,
        "manager.repack.every_s": REPACK_EVERY_S / scale,
        "trainer.num_steps": 1_000,
        "trainer.groups_per_step": GROUPS_PER_STEP,
        "trainer.checkpoint.every_steps": 1_000,
        "evaluation.num_prompts": 0,
    }
    with tempfile.TemporaryDirectory() as scratch:
        overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        command = [sys.executable, "-m", "laminar.cli.main", "train", str(RECIPE), *overrides, "--plain"]
        events, first = run_until_measured(command, Path(scratch) / "run")
    steps = [event for event in events if event["kind"] == "step"][first : first + STEPS + 1]
    measured = generation(events, steps[0]["t"], steps[-1]["t"], scale)
    measured["learner_s"] = scale * fmean(step["train_s"] + step["publish_s"] for step in steps[1:])
    measured["heartbeat_late_s"] = heartbeat_late_s(events, steps[0]["t"], steps[-1]["t"], HEARTBEAT_S / scale)
    return measured


def run_until_measured(command: list[str], out: Path) -> tuple[list[Event], int]:
    """Events of the run until enough steps are over, and the number of the step with which its measurement begins."""
    events: list[Event] = []
    run = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL)
    tail, deadline_s = Tail(out / EVENTS), time.monotonic() + LONGEST_S
    try:
        while run.poll() is None and time.monotonic() < deadline_s:
            time.sleep(1.0)
            events += tail.read_new()
            begins: dict[str, float] = {}
            for event in events:
                if event["kind"] == "claimed":
                    begins.setdefault(event["lease_id"].partition("/")[0], event["t"])
            ends = [event["t"] for event in events if event["kind"] == "step"]
            if len(begins) == REPLICAS:
                first = sum(end < max(begins.values()) for end in ends) + WARMUP - 1
                if len(ends) > first + STEPS:
                    return events, first
    finally:
        tail.close()
        run.send_signal(signal.SIGTERM)
        run.wait(timeout=120)
    raise SystemExit(f"the real run was not measured: exit code {run.returncode}, {len(events)} events")


def heartbeat_late_s(events: list[Event], begin_s: float, end_s: float, every_s: float) -> float:
    """Mean over all reports of all replicas; the time of the call itself counts as lateness."""
    reports: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event["kind"] == "load" and begin_s < event["t"] <= end_s and event["phase"] == "generating":
            reports[event["replica_id"]].append(event["t"])
    gaps: Iterable[float] = (b - a for times in reports.values() for a, b in pairwise(times))
    return fmean(gap - every_s for gap in gaps if every_s <= gap < 3 * every_s + 3.0)


def simulated_run(schedule: str, repack: bool, learner_s: float, scale: float) -> Measured:
    """The same run on the virtual clock."""
    config = SimulationConfig.model_validate(
        {
            "schedule": schedule,
            "batch_trajectories": None if schedule == "sync" else BATCH,
            "max_groups_ahead": AHEAD * GROUPS_PER_STEP,
            "work": WorkConfig(
                lengths=LogNormalLengths(median_tokens=MEDIAN_TOKENS, p99_over_median=TAIL),
                max_new_tokens=MOST_TOKENS,
                prompt_tokens=8 * TOKENS_PER_ID,
                group_size=GROUP,
                groups_per_step=GROUPS_PER_STEP,
                mini_batches=1,
                num_steps=WARMUP + STEPS,
                warmup_steps=WARMUP,
            ),
            "cluster": ClusterConfig(train_gpus=8, rollout_gpus=REPLICAS, start_s=0.0),
            "emulation": EmulationConfig(
                kv_capacity_tokens=KV_TOKENS,
                tokens_per_id=TOKENS_PER_ID,
                learner_fixed_s=learner_s,
                learner_per_gpu_s=0.0,
                stream_every_s=REPORT_EVERY_S,
                claim_wait_s=REAL_CLAIM_WAIT_S * scale,
            ),
            "manager": ManagerConfig(
                heartbeat_s=HEARTBEAT_S,
                repack=RepackConfig(enabled=repack, every_s=REPACK_EVERY_S, max_running=128),
            ),
        }
    )
    events = simulate(config).recorder.events
    ends = [event["t"] for event in events if event["kind"] == "step"]
    return generation(events, ends[WARMUP - 1], ends[-1])


def generation(events: list[Event], begin_s: float, end_s: float, scale: float | None = None) -> Measured:
    """Tokens per second of answers that ended in between; events of a real run count ids, and real seconds."""
    tokens = sum(event["tokens"] for event in events if event["kind"] == "trajectory" and begin_s < event["t"] <= end_s)
    seconds = (end_s - begin_s) * (scale or 1.0)
    return Measured(generated_per_s=(TOKENS_PER_ID if scale else 1) * tokens / seconds, seconds=round(seconds, 1))


if __name__ == "__main__":
    main()
