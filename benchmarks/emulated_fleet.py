"""A real run of sixteen emulated replicas on this machine, and the same run simulated: do their ratios agree?

    python benchmarks/emulated_fleet.py

Runs `laminar train` with the emulated engine, time passing SCALE times as fast, three times: Laminar, Laminar without
repack, and the synchronous schedule; and simulates the same. Real processes, calls, relay and journal, but a learner
that has nothing to learn (all rewards are equal), so generation is what is compared: one JSON line with tokens of
finished answers per emulated second, and the two ratios. They are to agree within 15 %.

The machine must have enough cores for sixteen processes of which each needs a few percent; the line says how many there
are, and how busy they were before.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from laminar.config.run_config import ManagerConfig, RepackConfig
from laminar.config.simulation import ClusterConfig, EmulationConfig, LogNormalLengths, SimulationConfig, WorkConfig
from laminar.engines.workloads import LogNormal, mean
from laminar.simulator.running import simulate
from laminar.telemetry.files import EVENTS
from laminar.telemetry.reading import read_events

RECIPE = Path(__file__).parents[1] / "recipes" / "gcd.yaml"

SCALE = 3.0
REPLICAS = 16
GROUP, GROUPS_PER_STEP, AHEAD, STEPS, WARMUP = 8, 64, 4, 6, 2
BATCH = 48
TOKENS_PER_ID = 34
MEDIAN_TOKENS, TAIL, MOST_TOKENS = 800.0, 8.0, 6_800
KV_TOKENS = 60_000
REPACK_EVERY_S = 2.0

VARIANTS = {"laminar": ("laminar", True), "no_repack": ("laminar", False), "sync": ("sync", False)}


def main() -> None:
    busy = os.getloadavg()[0]
    real, simulated, learner_s = {}, {}, {}
    for name, (schedule, repack) in VARIANTS.items():
        real[name], learner_s[name] = real_run(schedule, repack)
        simulated[name] = simulated_run(schedule, repack, learner_s[name])
    row: dict[str, Any] = {"benchmark": "emulated_fleet", "cores": os.cpu_count(), "load_before": round(busy, 1)}
    row |= {"replicas": REPLICAS, "time_scale": SCALE, "mean_tokens": round(mean(lengths()))}
    row["learner_s"] = {name: round(seconds, 2) for name, seconds in learner_s.items()}
    for what, runs in (("real", real), ("simulated", simulated)):
        row[f"{what}_generated_per_s"] = {name: round(value) for name, value in runs.items()}
        row[f"{what}_repack_gain"] = round(runs["laminar"] / runs["no_repack"], 3)
        row[f"{what}_over_sync"] = round(runs["laminar"] / runs["sync"], 3)
    for ratio in ("repack_gain", "over_sync"):
        row[f"{ratio}_deviation"] = round(row[f"real_{ratio}"] / row[f"simulated_{ratio}"] - 1, 3)
    print(json.dumps(row))


def lengths() -> LogNormal:
    """Answers of both runs."""
    return LogNormal(median=MEDIAN_TOKENS, p99_over_median=TAIL, most=float(MOST_TOKENS))


def real_run(schedule: str, repack: bool) -> tuple[float, float]:
    """Of a run on Ray: tokens per emulated second, and emulated seconds that the learner took per step."""
    options = {
        "model": "7B",
        "hardware": "H800",
        "median_tokens": MEDIAN_TOKENS,
        "p99_over_median": TAIL,
        "max_new_tokens": MOST_TOKENS,
        "kv_capacity_tokens": KV_TOKENS,
        "tokens_per_id": TOKENS_PER_ID,
        "time_scale": SCALE,
    }
    engine = {
        "kind": "custom",
        "path": "laminar.engines.emulated_engine:emulated_engine",
        "kv_capacity_tokens": KV_TOKENS,
        "options": options,
    }
    batch = GROUPS_PER_STEP * GROUP // REPLICAS if schedule == "sync" else BATCH
    values = {
        "schedule": schedule,
        "rollout.engine": engine,
        "rollout.num_replicas": REPLICAS,
        "rollout.batch_trajectories": batch,
        "rollout.max_new_tokens": MOST_TOKENS // TOKENS_PER_ID,
        "data.group_size": GROUP,
        "data.max_groups_ahead": AHEAD * GROUPS_PER_STEP,
        "manager.repack.enabled": repack,
        "manager.repack.every_s": REPACK_EVERY_S / SCALE,
        "trainer.num_steps": STEPS + AHEAD,  # a run draws no more than it trains, and its end is not measured
        "trainer.groups_per_step": GROUPS_PER_STEP,
        "trainer.checkpoint.every_steps": STEPS + AHEAD,
        "evaluation.num_prompts": 0,
    }
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        command = [sys.executable, "-m", "laminar.cli.main", "train", str(RECIPE), *overrides, "--plain"]
        subprocess.run([*command, "--out", str(out)], check=True, stdout=subprocess.DEVNULL, timeout=900)
        events = read_events(out / EVENTS)
    steps = [event for event in events if event["kind"] == "step"][WARMUP:STEPS]
    learner_s = SCALE * fmean(step["train_s"] + step["publish_s"] for step in steps)
    return TOKENS_PER_ID * generated_per_s(events) / SCALE, learner_s


def simulated_run(schedule: str, repack: bool, learner_s: float) -> float:
    """Tokens per second of the same run on the virtual clock."""
    config = SimulationConfig(
        schedule=schedule,
        batch_trajectories=None if schedule == "sync" else BATCH,
        max_groups_ahead=AHEAD * GROUPS_PER_STEP,
        work=WorkConfig(
            lengths=LogNormalLengths(median_tokens=MEDIAN_TOKENS, p99_over_median=TAIL),
            max_new_tokens=MOST_TOKENS,
            prompt_tokens=8 * TOKENS_PER_ID,
            group_size=GROUP,
            groups_per_step=GROUPS_PER_STEP,
            mini_batches=1,
            num_steps=STEPS,
            warmup_steps=WARMUP,
        ),
        cluster=ClusterConfig(train_gpus=8, rollout_gpus=REPLICAS, start_s=0.0),
        emulation=EmulationConfig(
            kv_capacity_tokens=KV_TOKENS, tokens_per_id=TOKENS_PER_ID, learner_fixed_s=learner_s, learner_per_gpu_s=0.0
        ),
        manager=ManagerConfig(
            heartbeat_s=0.2 * SCALE, repack=RepackConfig(enabled=repack, every_s=REPACK_EVERY_S, max_running=128)
        ),
    )
    return generated_per_s(simulate(config).recorder.events)


def generated_per_s(events: list[dict[str, Any]]) -> float:
    """Tokens of answers that ended between the end of the warm-up and the last step, per second."""
    ends = [event["t"] for event in events if event["kind"] == "step"]
    begin_s, end_s = ends[WARMUP - 1], ends[STEPS - 1]
    tokens = [e["tokens"] for e in events if e["kind"] == "trajectory" and begin_s < e["t"] <= end_s]
    return sum(tokens) / (end_s - begin_s)


if __name__ == "__main__":
    main()
