"""What this machine can do, and how far the torch engine is from it: the simulator's preset "this machine".

All times are wall times, the best of several; on a CPU with one thread, as a replica has.
"""

import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from msgspec import Struct

from laminar.engines.calibration import calibration
from laminar.engines.decoder_shape import DecoderShape, read_shape
from laminar.engines.emulated_pace import ModelShape, roofline_pace
from laminar.engines.projection import Projection
from laminar.engines.protocol import Request
from laminar.engines.rules import TorchEngineRules
from laminar.engines.torch_runner import DTYPES, TorchRunner
from laminar.scheduling.roofline import Hardware
from laminar.schema.trajectories import Sampling

Dtype = Literal["float32", "bfloat16"]
Timer = Callable[[Callable[[], object]], float]

PROMPT_TOKENS = 64
REPEATS = 5

LARGE: dict[str, tuple[int, int]] = {"cpu": (256 << 20, 1_024), "cuda": (4 << 30, 8_192)}
"""By device: bytes to read, far more than caches hold, and rows of a square matrix that keeps all units busy."""

DEFAULT_MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
"""Fifty million weights: more than caches hold, so that a step of one sequence reads memory."""


class DecodeStep(Struct, frozen=True, kw_only=True):
    """One decode step of so many sequences: measured, and by the emulation's formula."""

    batch: int
    measured_s: float
    formula_s: float

    @property
    def factor(self) -> float:
        """How many times as long as the formula says."""
        return self.measured_s / self.formula_s


class MachineReport(Struct, frozen=True, kw_only=True):
    """This machine as the simulator's accelerator. `latency_factor` is the median over the steps."""

    described: str
    hardware: Hardware
    steps: tuple[DecodeStep, ...]

    @property
    def latency_factor(self) -> float:
        """`emulation.latency_factor` with which the emulated engine is as fast as the measured one."""
        return median(step.factor for step in self.steps)


def measure_machine(
    model: Path | None = None, *, device: str = "cpu", dtype: Dtype = "float32", batches: Sequence[int] = (1, 8, 32)
) -> MachineReport:
    """Measure memory, products and decode steps. `model` is a folder with a config.json (weights are random)."""
    where, num_threads = torch.device(device), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        bandwidth, flops = machine_limits(where, DTYPES[dtype], wall_s)
        hardware = Hardware(flops_per_s=flops, bandwidth_bytes_per_s=bandwidth, memory_bytes=_memory_bytes(where))
        steps = _decode_steps(model, hardware, device, dtype, batches)
    finally:
        torch.set_num_threads(num_threads)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else platform.processor() or platform.machine()
    threads = f"one thread of {os.cpu_count()} cores, " if where.type == "cpu" else ""
    return MachineReport(
        described=f"{name}, {threads}torch {torch.__version__}, {dtype}", hardware=hardware, steps=steps
    )


def _decode_steps(
    model: Path | None, hardware: Hardware, device: str, dtype: Dtype, batches: Sequence[int]
) -> tuple[DecodeStep, ...]:
    with tempfile.TemporaryDirectory() as scratch:
        if model is None:
            model = Path(scratch)
            (model / "config.json").write_text(json.dumps(DEFAULT_MODEL))
        rules = TorchEngineRules(
            max_running=max(batches),
            kv_capacity_tokens=max(batches) * 2 * PROMPT_TOKENS,
            prefill_chunk_tokens=512,
            quantum_s=0.0,
            device=device,
            dtype=dtype,
        )
        runner = TorchRunner(model, rules)
        shape = _model_shape(read_shape(model), DTYPES[dtype].itemsize)
    runner.load_weights(1, {name: 0.02 * torch.randn(size) for name, size in runner.weight_shapes().items()})
    return tuple(_decode_step(runner, shape, hardware, batch) for batch in batches)


def has_cuda(device: str) -> bool:
    """Whether this GPU is there."""
    return torch.cuda.is_available() and (torch.device(device).index or 0) < torch.cuda.device_count()


def wall_s(work: Callable[[], object]) -> float:
    """Seconds of a call, on the GPU too if there is one."""
    began_s = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began_s


def machine_limits(device: torch.device, dtype: torch.dtype, seconds: Timer) -> tuple[float, float]:
    """Bytes per second of reading memory, and FLOP/s of a large product in the faster of torch's libraries."""
    num_bytes, rows = LARGE[device.type]
    large = torch.ones(num_bytes // dtype.itemsize, dtype=dtype, device=device)
    square = torch.randn(rows, rows, device=device).to(dtype)
    projection = Projection(rows, [rows], bias=False, dtype=dtype, device=device)
    projection.load_weights([square])
    read_s = _best(large.sum, seconds)
    product_s = min(_best(lambda: square @ square, seconds), _best(lambda: projection(square), seconds))
    return large.nbytes / read_s, 2 * rows**3 / product_s


@torch.inference_mode()
def _best(work: Callable[[], object], seconds: Timer) -> float:
    work()
    return min(seconds(work) for _ in range(REPEATS))


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _model_shape(shape: DecoderShape, bytes_per_weight: int) -> ModelShape:
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    matrices = shape.num_layers * shape.hidden * (2 * heads + 2 * kv_heads + 3 * shape.mlp)
    num_weights = matrices + shape.hidden * shape.vocab
    return ModelShape(
        num_parameters=float(num_weights),
        num_layers=shape.num_layers,
        weight_bytes=float(num_weights * bytes_per_weight),
        kv_bytes_per_token=float(shape.num_layers * 2 * kv_heads * bytes_per_weight),
    )


def _decode_step(runner: TorchRunner, shape: ModelShape, hardware: Hardware, batch: int) -> DecodeStep:
    """The best step in which the whole batch decodes."""
    runner.enqueue([_request(number) for number in range(batch)])
    best_s = math.inf
    while not runner.is_idle:
        before = len(runner.rows)
        step_s = wall_s(runner.run)
        runner.collect()
        if before == len(runner.rows) == batch:
            best_s = min(best_s, step_s)
    pace = roofline_pace(shape, hardware, calibration().decode, tensor_parallel=1, sequence_s=0.0)
    return DecodeStep(batch=batch, measured_s=best_s, formula_s=pace.step_s(batch, batch * PROMPT_TOKENS))


def _request(number: int) -> Request:
    return Request(
        request_id=str(number),
        group_id=str(number),
        token_ids=(1,) * PROMPT_TOKENS,
        num_shared=0,
        num_answered=0,
        max_new_tokens=REPEATS + 2,
        stop_token_ids=(),
        sampling=Sampling(),
        seed=number,
    )
