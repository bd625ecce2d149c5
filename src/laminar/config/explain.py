"""What follows from a configuration before anything runs: `laminar train RECIPE --explain`.

Invariant: every number is computed from the configuration and the model's files; bounds are bounds, and what cannot be
bounded is said to be unbounded.
"""

import json
import math
import struct
import textwrap
from pathlib import Path
from typing import Any

from msgspec import Struct

from laminar.config.run_config import RunConfig
from laminar.schema.errors import UserError

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "float32": 4, "bfloat16": 2,
}  # fmt: skip
"""Bytes of one number, by the names of safetensors and by ours."""

MAX_HEADER_BYTES = 100 << 20
"""The safetensors format allows no longer header."""

WHY_WIDTH = 74
"""With name and value before it, a line has 120 characters."""

LEARNER_BYTES = 16
"""Per parameter, all in float32: the weight, its gradient, and AdamW's two moments."""


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What the files of a model say about its size; `dtype` is that of most of its numbers, as safetensors names it."""

    num_parameters: int
    weight_bytes: int
    dtype: str
    num_layers: int
    kv_numbers_per_token: int
    num_positions: int | None

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Keys and values of one token in all layers."""
        return self.kv_numbers_per_token * DTYPE_BYTES[dtype]


def model_facts(model_path: Path) -> ModelFacts:
    """Read config.json and the headers of the weight files; raises `UserError` if they are not there or not whole."""
    config = _read_config(model_path)
    files = sorted(model_path.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"model folder {model_path} holds no weights; expected config.json, *.safetensors and tokenizer.json "
            "(a model in Hugging Face format)"
        )
    sizes: dict[str, int] = {}
    for file in files:
        for dtype, num in _numbers_in(file):
            sizes[dtype] = sizes.get(dtype, 0) + num
    if not sizes:
        raise UserError(f"model folder {model_path} holds no weights; its *.safetensors files are empty")
    heads = _positive(config, "num_attention_heads", model_path)
    layers = _positive(config, "num_hidden_layers", model_path)
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or _positive(config, "hidden_size", model_path) // heads
    return ModelFacts(
        num_parameters=sum(sizes.values()),
        weight_bytes=sum(num * DTYPE_BYTES[dtype] for dtype, num in sizes.items()),
        dtype=max(sizes, key=lambda dtype: sizes[dtype]),
        num_layers=layers,
        kv_numbers_per_token=2 * layers * kv_heads * head_size,
        num_positions=config.get("max_position_embeddings"),
    )


def explain(config: RunConfig, model: ModelFacts) -> str:
    """The derived numbers, by topic, with the arithmetic beside each."""
    topics = {
        "model": _model(config, model),
        "work": _work(config),
        "staleness": _staleness(config),
        "memory": _memory(config, model),
        "evaluation": _evaluation(config),
        "processes": _processes(config),
    }
    lines: list[str] = []
    for topic, rows in topics.items():
        lines += ["", topic] if lines else [topic]
        lines += [line for row in rows for line in _lines(*row)]
    return "\n".join(lines)


Row = tuple[str, str, str]
"""Name, value, and how the value comes about."""


def _lines(name: str, value: str, why: str) -> list[str]:
    first, *rest = textwrap.wrap(why, WHY_WIDTH)
    return [f"  {name:<28}{value:>14}  {first}", *(" " * 46 + more for more in rest)]


def _model(config: RunConfig, model: ModelFacts) -> list[Row]:
    prompt, answer = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    knows = "" if model.num_positions is None else f"; the model knows {model.num_positions} positions"
    return [
        ("parameters", _count(model.num_parameters), f"{model.dtype}, {model.num_layers} layers"),
        ("weights", _size(model.weight_bytes), "as stored"),
        ("longest sequence", f"<= {prompt + answer}", f"prompt {prompt} + answer {answer} tokens{knows}"),
    ]


def _work(config: RunConfig) -> list[Row]:
    rollout, per_group = config.rollout, config.data.group_size
    ahead, per_step = config.max_groups_ahead, config.trainer.groups_per_step * config.data.group_size
    batch = rollout.batch_trajectories // per_group * per_group
    return [
        ("trajectories per step", _count(per_step), f"{config.trainer.groups_per_step} groups x {per_group}"),
        ("batches per step", f"{per_step / batch:.2f}", f"a batch of a replica is {batch} trajectories"),
        (
            "answer tokens per step",
            f"<= {_count(per_step * rollout.max_new_tokens)}",
            f"{per_step} trajectories x {rollout.max_new_tokens} (rollout.max_new_tokens)",
        ),
        (
            "trajectories not trained yet",
            f"<= {_count(ahead * per_group)}",
            f"{ahead} groups ahead x {per_group}, in flight or waiting for the trainer; claims wait beyond that",
        ),
        ("weight versions", _count(config.trainer.num_steps), "one per step, besides version 0"),
    ]


def max_buffer_wait(max_groups_ahead: int, groups_per_step: int) -> int:
    """Versions published at most while a complete group waits, under `fifo` (proof: `scheduling/admission.py`)."""
    return (max_groups_ahead - 1) // groups_per_step + 1


def _staleness(config: RunConfig) -> list[Row]:
    ahead, per_step = config.max_groups_ahead, config.trainer.groups_per_step
    inherent = "the longest answer and the speed of the trainer decide; summary.json reports it"
    rows = [("while it is generated", "unbounded", inherent)]
    match config.data.sampler:
        case "fifo":
            proof = (
                f"({ahead} - 1) // {per_step} + 1: at most {ahead - 1} groups are complete before it, none overtakes "
                f"it, and every step in between takes {per_step}"
            )
            rows.append(("while it waits", f"<= {max_buffer_wait(ahead, per_step)} versions", proof))
        case "bounded_staleness":
            bound = f"<= {config.data.max_staleness} versions"
            rows.append(("when it is drawn", bound, "data.max_staleness: older groups are dropped then"))
        case sampler:
            rows.append(("while it waits", "unbounded", f"sampler {sampler} may let others overtake it"))
    return rows


def _memory(config: RunConfig, model: ModelFacts) -> list[Row]:
    rollout, keep = config.rollout, config.relay.keep_versions
    dtype = "float32" if config.relay.dtype == "keep" else config.relay.dtype
    version_bytes = model.num_parameters * DTYPE_BYTES[dtype]
    learner = LEARNER_BYTES * model.num_parameters
    learner_why = f"{LEARNER_BYTES} B per parameter: weights, gradients, AdamW, in float32"
    if config.trainer.algorithm.kl_coefficient:
        learner += 4 * model.num_parameters
        learner_why += "; 4 B for the reference model"
    if config.trainer.mini_batches > 1 and config.trainer.algorithm.proximal == "recomputed":
        learner += 4 * model.num_parameters
        learner_why += "; 4 B for the proximal policy"
    return [
        ("one weight version", _size(version_bytes), f"{_count(model.num_parameters)} parameters in {dtype}"),
        (
            "relay, kept versions",
            _size((keep + 1) * version_bytes),
            f"{keep} kept (relay.keep_versions) and one being written",
        ),
        (
            "relay, with those in use",
            f"<= {_size((keep + 1 + rollout.num_replicas) * version_bytes)}",
            f"each of {rollout.num_replicas} replicas may hold one older version",
        ),
        *_engine_memory(config, model),
        ("learner", _size(learner), f"{learner_why}; activations come on top"),
    ]


def _engine_memory(config: RunConfig, model: ModelFacts) -> list[Row]:
    engine = config.rollout.engine
    if engine.kind == "scripted":
        return [("KV cache per replica", "none", "the scripted engine only counts tokens")]
    dtype = engine.dtype if engine.kind == "torch" else "bfloat16"
    per_token = model.kv_bytes_per_token(dtype)
    why = f"{engine.kv_capacity_tokens} tokens x {_size(per_token)} in {dtype}"
    if engine.kind == "custom":
        return [("KV cache per replica", _size(engine.kv_capacity_tokens * per_token), f"{why}, if it uses that")]
    answers = engine.kv_capacity_tokens / config.rollout.max_new_tokens
    return [
        ("KV cache per replica", _size(engine.kv_capacity_tokens * per_token), why),
        ("longest answers that fit", f"{answers:.0f}", f"of rollout.max_new_tokens = {config.rollout.max_new_tokens}"),
        ("weights per replica", _size(model.num_parameters * DTYPE_BYTES[dtype]), f"in {dtype}"),
    ]


def _evaluation(config: RunConfig) -> list[Row]:
    evaluation, steps = config.evaluation, config.trainer.num_steps
    if not evaluation.num_prompts:
        return [("evaluations", "none", "evaluation.num_prompts is 0")]
    versions = {*range(0, steps + 1, evaluation.every_steps), steps}
    per_step = evaluation.num_prompts * len(versions) / steps
    trained = config.trainer.groups_per_step * config.data.group_size
    return [
        ("evaluations", _count(len(versions)), f"at version 0, every {evaluation.every_steps}, and after the last"),
        ("answers per step", f"{per_step:.1f}", f"{per_step / trained:.0%} on top of {trained} training answers"),
    ]


def _processes(config: RunConfig) -> list[Row]:
    replicas, graders = config.rollout.num_replicas, config.task.grade_workers
    num = 5 + replicas * (1 + graders)
    why = f"launcher, trainer, data, manager, relay; {replicas} replicas with {graders} reward workers each; plus Ray's"
    return [("processes", str(num), why)]


# ---- reading model files


def _read_config(model_path: Path) -> dict[str, Any]:
    try:
        config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"model folder {model_path} has no config.json; expected config.json, *.safetensors and tokenizer.json "
            "(a model in Hugging Face format)"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{model_path / 'config.json'} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{model_path / 'config.json'} is not a model configuration")
    return config


def _positive(config: dict[str, Any], key: str, model_path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise UserError(f"{model_path / 'config.json'} has no {key}; it describes no decoder that Laminar can run")
    return value


def _numbers_in(file: Path) -> list[tuple[str, int]]:
    """Number format and count of each tensor, from the header: 8 bytes of length, then JSON."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError("its header is too long")
            header = json.loads(opened.read(length))
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        stored_bytes = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        if file.stat().st_size < 8 + length + stored_bytes:
            raise ValueError("it is shorter than its header says; was the download cut off?")
        numbers = [(str(tensor["dtype"]), math.prod(tensor["shape"])) for tensor in tensors.values()]
        if unknown := {dtype for dtype, _ in numbers} - DTYPE_BYTES.keys():
            raise ValueError(f"unknown number format {', '.join(sorted(unknown))}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UserError(f"{file} is not a whole safetensors file: {error}") from None
    return numbers


# ---- numbers for people


def _count(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            scaled = number / (1e3 if unit == "k" else size)
            return f"{scaled:.3g}{unit}" if scaled < 1_000 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1_024:
            return f"{num_bytes:.4g} {unit}" if num_bytes < 1_000 else f"{num_bytes:.0f} {unit}"
        num_bytes /= 1_024
    return f"{num_bytes:.4g} TiB"
