"""The constants of the emulation, from the one file that says where each comes from."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from laminar.engines.emulated_pace import DecodeConstants, ModelShape

CALIBRATION = Path(__file__).with_name("calibration.yaml")


class Constant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number, where it is from, and which published points it was fitted to (None: to none)."""

    value: float
    source: str
    fitted: str | None = None


class KvCacheConstants(Struct, frozen=True, kw_only=True):
    """How much of an accelerator's memory the KV cache gets."""

    memory_share: float
    reserved_bytes: float


class LinkConstants(Struct, frozen=True, kw_only=True):
    """Weights on their way: learner to master relay, relay to relay, relay to the engines of its machine.

    Passing a chunk on costs a start-up that grows with the size of the whole model.
    """

    learner_to_relay_bytes_per_s: float
    relay_to_engine_bytes_per_s: float
    chain_bytes_per_s: float
    chain_startup_s_per_byte: float


class LearnerConstants(Struct, frozen=True, kw_only=True):
    """Seconds of an iteration of the calibrated workload on n GPUs: `fixed_s` + `per_gpu_s` / n."""

    fixed_s: float
    per_gpu_s: float


class Baselines(Struct, frozen=True, kw_only=True):
    """By model: the least time of a decode step and the learner of the published baselines, the engine of all."""

    step_floor_s: dict[str, float]
    partial_learner: dict[str, LearnerConstants]
    latency_factor: dict[str, float]


class Calibration(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything in the file."""

    models: dict[str, ModelShape]
    decode: DecodeConstants
    kv_cache: KvCacheConstants
    links: LinkConstants
    learner: dict[str, LearnerConstants]
    baselines: Baselines


@lru_cache(maxsize=1)
def calibration() -> Calibration:
    """The file's values."""
    return msgspec.convert(_values(_file()), Calibration, strict=False)


@lru_cache(maxsize=1)
def sources() -> dict[str, Constant]:
    """Every constant by its dotted path."""
    return dict(_leaves(_file(), ""))


def _file() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(CALIBRATION.read_text(encoding="utf-8"))
    return loaded


def _leaves(node: dict[Any, Any], path: str) -> list[tuple[str, Constant]]:
    if "value" in node:
        return [(path, msgspec.convert(node, Constant, strict=False))]
    return [leaf for key, below in node.items() for leaf in _leaves(below, f"{path}.{key}" if path else str(key))]


def _values(node: dict[Any, Any]) -> Any:
    if "value" in node:
        return float(node["value"])
    return {key: _values(below) for key, below in node.items()}
