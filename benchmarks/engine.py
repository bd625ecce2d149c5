"""How fast the torch engine decodes: against Hugging Face `generate`, and against what this machine can do at best.

Prints one JSON line. All times are CPU seconds of this process with one thread, best of several alternating repeats, so
that other programs on the machine disturb the numbers as little as possible. Weights are random: speed does not depend
on them. Both sides draw with temperature 1 and are made to give each sequence the same number of tokens; Hugging Face
pads and goes on until the longest of its batch is done. Prompts come in groups, as in RL: our engine computes each
group's prompt once, Hugging Face computes every row's.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from laminar.engines.benchmark import machine_limits
from laminar.engines.decoder_shape import DecoderShape, read_shape
from laminar.engines.protocol import Request
from laminar.engines.rules import TorchEngineRules
from laminar.engines.torch_engine import TorchEngine
from laminar.engines.torch_runner import TorchRunner
from laminar.schema.trajectories import Sampling

DEMO = LlamaConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    pad_token_id=0,
    eos_token_id=None,
)
SMOL = LlamaConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    pad_token_id=0,
    eos_token_id=None,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison: `num_sequences` at once, groups of `group_size`, lengths between `shortest` and `longest`."""

    num_sequences: int
    group_size: int
    prompt_tokens: int
    shortest: int
    typical: int
    longest: int
    uniform: int
    decode_steps: int
    repeats: int


CASES = {
    "demo": Case(
        num_sequences=128,
        group_size=8,
        prompt_tokens=24,
        shortest=13,
        typical=45,
        longest=300,
        uniform=128,
        decode_steps=24,
        repeats=3,
    ),
    "smol": Case(
        num_sequences=16,
        group_size=8,
        prompt_tokens=32,
        shortest=4,
        typical=12,
        longest=80,
        uniform=24,
        decode_steps=4,
        repeats=2,
    ),
}
QUICK = {
    name: Case(
        num_sequences=8,
        group_size=4,
        prompt_tokens=8,
        shortest=2,
        typical=4,
        longest=16,
        uniform=6,
        decode_steps=2,
        repeats=1,
    )
    for name in CASES
}


def long_tailed(case: Case) -> list[int]:
    """Log-normal lengths around `typical`; the longest is there for sure."""
    rng = random.Random(0)
    lengths = [int(case.typical * rng.lognormvariate(0.0, 0.8)) for _ in range(case.num_sequences)]
    return [case.longest, *(min(max(length, case.shortest), case.longest) for length in lengths[1:])]


def prompts(case: Case, vocab: int) -> list[list[int]]:
    rng = random.Random(1)
    groups = [
        [rng.randrange(1, vocab) for _ in range(case.prompt_tokens)]
        for _ in range(case.num_sequences // case.group_size)
    ]
    return [groups[index // case.group_size] for index in range(case.num_sequences)]


class PerRowLength(StoppingCriteria):
    """Ends each row at its own length; `generate` then pads it."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return input_ids.shape[1] >= self._lengths


def hugging_face(model: LlamaForCausalLM, prompt_rows: list[list[int]], lengths: list[int]) -> None:
    input_ids = torch.tensor(prompt_rows)
    ends = [len(row) + length for row, length in zip(prompt_rows, lengths, strict=True)]
    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(lengths),
            stopping_criteria=StoppingCriteriaList([PerRowLength(ends)]),
        )
    assert output.shape[1] == max(ends)


def requests_for(prompt_rows: list[list[int]], lengths: list[int]) -> list[Request]:
    return [
        Request(
            request_id=str(index),
            group_id=str(row),
            token_ids=tuple(row),
            num_shared=len(row),
            num_answered=0,
            max_new_tokens=length,
            stop_token_ids=(),
            sampling=Sampling(),
            seed=index,
        )
        for index, (row, length) in enumerate(zip(prompt_rows, lengths, strict=True))
    ]


async def ours(engine: TorchEngine, prompt_rows: list[list[int]], lengths: list[int]) -> None:
    engine.submit(requests_for(prompt_rows, lengths))
    num_tokens = 0
    while outputs := await engine.step():
        num_tokens += sum(len(output.token_ids) for output in outputs)
    assert num_tokens == sum(lengths)


def cpu_seconds(work: Callable[[], object]) -> float:
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def engine_rules(max_running: int, max_tokens: int, quantum_s: float = 0.05) -> TorchEngineRules:
    return TorchEngineRules(
        max_running=max_running,
        kv_capacity_tokens=max_running * (max_tokens + 32),
        prefill_chunk_tokens=512,
        quantum_s=quantum_s,
    )


def compare(model: LlamaForCausalLM, folder: Path, case: Case) -> dict[str, object]:
    """Useful tokens per second of both sides on the same lengths."""
    rows = prompts(case, model.config.vocab_size)
    workloads = {"long_tailed": long_tailed(case), "uniform": [case.uniform] * case.num_sequences}
    rules = engine_rules(case.num_sequences, case.prompt_tokens + max(case.longest, case.uniform))
    results: dict[str, object] = {}
    with asyncio.Runner() as loop:
        engine = TorchEngine(folder, rules)
        loop.run(engine.start())
        loop.run(engine.load_weights(1, model.state_dict()))
        for name, lengths in workloads.items():
            warm = [min(4, length) for length in lengths]
            loop.run(ours(engine, rows, warm))
            hugging_face(model, rows, warm)
            times_s: tuple[list[float], list[float]] = ([], [])
            for _ in range(case.repeats):
                times_s[0].append(cpu_seconds(lambda: loop.run(ours(engine, rows, lengths))))  # noqa: B023
                times_s[1].append(cpu_seconds(lambda: hugging_face(model, rows, lengths)))  # noqa: B023
            ours_s, theirs_s = min(times_s[0]), min(times_s[1])
            results[name] = {
                "mean_tokens": round(sum(lengths) / len(lengths), 1),
                "max_tokens": max(lengths),
                "ours_tokens_per_s": round(sum(lengths) / ours_s),
                "hugging_face_tokens_per_s": round(sum(lengths) / theirs_s),
                "ratio": round(theirs_s / ours_s, 2),
            }
        loop.run(engine.close())
    return results


def limits() -> tuple[float, float]:
    """Bytes per second of reading memory, and FLOP/s of a large float32 GEMM, of one thread."""
    return machine_limits(torch.device("cpu"), torch.float32, cpu_seconds)


def decode_cost(shape: DecoderShape, batch: int, context: int) -> tuple[float, float]:
    """Bytes that one decode iteration has to read at least, and its FLOPs."""
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    matrices = shape.hidden * (2 * heads + 2 * kv_heads + 3 * shape.mlp)
    weights = shape.num_layers * matrices + shape.hidden * shape.vocab
    cached = shape.num_layers * 2 * kv_heads * context * batch
    attention = shape.num_layers * 4 * heads * context * batch
    return 4.0 * (weights + cached), 2.0 * weights * batch + attention


def decode_fractions(model: LlamaForCausalLM, folder: Path, case: Case, batches: list[int]) -> list[dict[str, object]]:
    """The best iteration at each batch size, as shares of memory bandwidth, of GEMM rate, and of the tighter bound."""
    bandwidth, gemm_rate = limits()
    runner = TorchRunner(folder, engine_rules(max(batches), case.prompt_tokens + case.decode_steps, quantum_s=0.0))
    runner.load_weights(1, model.state_dict())
    row = prompts(case, model.config.vocab_size)[0]
    results: list[dict[str, object]] = []
    for batch in batches:
        runner.enqueue(requests_for([row] * batch, [case.decode_steps + 2] * batch))
        times = []
        while not runner.is_idle:
            before = len(runner.rows)
            elapsed_s = cpu_seconds(runner.run)
            runner.collect()
            if before == len(runner.rows) == batch:
                times.append(elapsed_s)
        num_bytes, flops = decode_cost(read_shape(folder), batch, case.prompt_tokens + case.decode_steps // 2)
        best_s = min(times)
        results.append(
            {
                "batch": batch,
                "iteration_ms": round(best_s * 1e3, 3),
                "tokens_per_s": round(batch / best_s),
                "of_bandwidth": round(num_bytes / bandwidth / best_s, 2),
                "of_gemm_rate": round(flops / gemm_rate / best_s, 2),
                "of_roofline": round(max(num_bytes / bandwidth, flops / gemm_rate) / best_s, 2),
            }
        )
    return results


def measure(name: str, case: Case, batches: list[int]) -> dict[str, object]:
    torch.manual_seed(0)
    model = LlamaForCausalLM({"demo": DEMO, "smol": SMOL}[name])
    model.train(False)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        return {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "setting": asdict(case),
            "against_hugging_face": compare(model, Path(folder), case),
            "decode": decode_fractions(model, Path(folder), case, batches),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, not how fast")
    parser.add_argument("--models", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    bandwidth, gemm_rate = limits()
    cases, batches = (QUICK, [1, 8]) if options.quick else (CASES, [1, 8, 32, 128, 256])
    result = {
        "benchmark": "engine",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": 1,
            "torch": torch.__version__,
            "read_gb_per_s": round(bandwidth / 1e9, 1),
            "gemm_gflop_per_s": round(gemm_rate / 1e9, 1),
        },
        "clock": "CPU seconds of the process",
        "quick": options.quick,
        "models": {name: measure(name, cases[name], batches) for name in options.models},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
