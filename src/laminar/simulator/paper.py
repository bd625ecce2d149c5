"""The published evaluation as settings, and its figures as data (arXiv 2510.12633, §8).

Placement is Table 2 of the paper; lengths are those of Fig. 17; what else is set is in `engines/calibration.yaml`.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec

from laminar.config.run_config import ManagerConfig, RepackConfig
from laminar.config.simulation import (
    ClusterConfig,
    EmulationConfig,
    ModelName,
    PublishedLengths,
    SimulationConfig,
    WorkConfig,
)
from laminar.engines.calibration import calibration
from laminar.schema.schedule import ScheduleName

FIGURES = Path(__file__).with_name("paper_figures.json")

SYSTEMS: Final[dict[ScheduleName, str]] = {
    "sync": "verl",
    "one_step": "onestep",
    "stream": "stream",
    "partial": "areal",
    "laminar": "laminar",
}
"""Our schedules by the paper's names, slowest first."""

SCALES: Final[dict[ModelName, tuple[int, ...]]] = {
    "7B": (16, 32, 64, 128, 256),
    "32B": (32, 64, 128, 256, 512),
    "72B": (64, 128, 256, 512, 1024),
}

Placement = tuple[int, int]
"""GPUs of learner and replicas."""

_STREAM: Final[dict[ModelName, tuple[Placement, ...]]] = {
    "7B": ((8, 8), (8, 24), (16, 48), (32, 96), (40, 216)),
    "32B": ((16, 16), (32, 32), (48, 80), (64, 192), (80, 432)),
    "72B": ((32, 32), (64, 64), (96, 160), (192, 320), (256, 768)),
}
_PARTIAL: Final[dict[ModelName, tuple[Placement, ...]]] = {
    "7B": ((8, 8), (16, 16), (32, 32), (64, 64), (128, 128)),
    "32B": ((16, 16), (32, 32), (64, 64), (128, 128), (256, 256)),
    "72B": ((32, 32), (64, 64), (128, 128), (320, 192), (640, 384)),
}
_LAMINAR: Final[dict[ModelName, tuple[Placement, ...]]] = {
    "7B": ((8, 8), (24, 8), (40, 24), (80, 48), (192, 64)),
    "32B": ((16, 16), (32, 32), (64, 64), (128, 128), (256, 256)),
    "72B": ((32, 32), (64, 64), (128, 128), (320, 192), (768, 256)),
}

STEPS: Final[dict[ScheduleName, tuple[int, int]]] = {
    "laminar": (15, 10),
    "partial": (9, 5),
    "sync": (3, 1),
    "one_step": (5, 2),
    "stream": (5, 2),
}
"""Iterations, and how many of them are warm-up. The paper has 15 and 10; schedules that wait for whole steps repeat
themselves from the second one on."""

CONCURRENCY = 1024
"""Trajectories that a replica of AReaL or Laminar runs at most (paper, A.2)."""


def placement(model: ModelName, gpus: int, schedule: ScheduleName) -> Placement:
    """GPUs of learner and replicas; with `sync` both have all."""
    number = SCALES[model].index(gpus)
    match schedule:
        case "sync":
            return gpus, gpus
        case "one_step" | "stream":
            return _STREAM[model][number]
        case "partial":
            return _PARTIAL[model][number]
        case "laminar":
            return _LAMINAR[model][number]


def tensor_parallel(model: ModelName, schedule: ScheduleName) -> int:
    """GPUs per replica (paper, A.2)."""
    if model == "7B":
        return 1 if schedule in ("partial", "laminar") else 2
    return 4 if model == "32B" else 8


def throughput(
    model: ModelName,
    gpus: int,
    schedule: ScheduleName,
    *,
    floor: bool = True,
    repack: bool = True,
    tool: bool = False,
    batch_trajectories: int = 512,
    seed: int = 0,
) -> SimulationConfig:
    """One bar of Fig. 11, or with `tool` of Fig. 12; `floor`: with the unexplained step floor of the baselines."""
    train_gpus, rollout_gpus = placement(model, gpus, schedule)
    num_steps, warmup_steps = STEPS[schedule]
    whole_steps = schedule in ("sync", "one_step", "stream")
    name = "tool-7B" if tool else f"math-{model}"
    return SimulationConfig(
        seed=seed,
        schedule=schedule,
        batch_trajectories=None if whole_steps else CONCURRENCY if schedule == "partial" else batch_trajectories,
        work=WorkConfig(
            lengths=PublishedLengths.model_validate({"name": name}),
            tool=tool,
            num_steps=num_steps,
            warmup_steps=warmup_steps,
        ),
        cluster=ClusterConfig(
            model=model,
            train_gpus=train_gpus,
            rollout_gpus=rollout_gpus,
            tensor_parallel=tensor_parallel(model, schedule),
        ),
        emulation=_emulation(model, schedule, floor=floor),
        manager=ManagerConfig(heartbeat_s=2.0, repack=RepackConfig(enabled=repack)),
    )


def _emulation(model: ModelName, schedule: ScheduleName, *, floor: bool) -> EmulationConfig:
    baselines = calibration().baselines
    floor_s = baselines.step_floor_s[model] if floor and schedule in ("sync", "one_step", "stream") else 0.0
    learner = baselines.partial_learner[model] if schedule == "partial" else None
    return EmulationConfig(
        latency_factor=baselines.latency_factor[model],
        step_floor_s=floor_s,
        max_running=CONCURRENCY,
        learner_fixed_s=learner.fixed_s if learner else None,
        learner_per_gpu_s=learner.per_gpu_s if learner else None,
    )


def has_floor(schedule: ScheduleName) -> bool:
    """Whether the step floor makes a difference to this schedule's rows."""
    return schedule in ("sync", "one_step", "stream")


def is_fitted(model: ModelName, gpus: int, schedule: ScheduleName, *, floor: bool) -> bool:
    """Whether a constant was fitted to this very bar."""
    match schedule:
        case "laminar":
            return not (model == "7B" and gpus == 32)
        case "partial":
            return True
        case "sync":
            return False
        case _:
            return floor and gpus in SCALES[model][-2:]


@lru_cache(maxsize=1)
def figures() -> dict[str, Any]:
    """All published numbers that we compare with."""
    loaded: dict[str, Any] = msgspec.json.decode(FIGURES.read_bytes())
    return loaded


def paper_tokens_per_s(model: ModelName, gpus: int, schedule: ScheduleName, *, tool: bool = False) -> float | None:
    """The height of a bar of Fig. 11 or 12; None if there is none."""
    bars = figures()["fig11_12_tok_s"]["7B tool" if tool else f"{model} math"].get(SYSTEMS[schedule])
    return float(bars[SCALES[model].index(gpus)]) if bars else None
