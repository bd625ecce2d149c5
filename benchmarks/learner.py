"""How fast the learner learns: against Hugging Face's model on padded batches, and against this machine's GEMM rate.

Prints one JSON line. Times are CPU seconds of this process with one thread, best of several alternating repeats. Both
sides make one whole update (forward, policy-gradient loss, backward, clipping, AdamW) on the same answers, whose
lengths are long-tailed; useful tokens are without padding. Hugging Face pads a micro-batch to its
longest answer and may choose the best of several numbers of rows.
"""

import argparse
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaForCausalLM

from engine import DEMO, SMOL, decode_cost
from laminar.config.training import TrainerConfig
from laminar.engines.benchmark import machine_limits
from laminar.engines.decoder_shape import read_shape
from laminar.schema.tokens import pack_ids, pack_logprobs
from laminar.schema.trajectories import Experience, ExperienceGroup, Piece, Prompt, response_ids
from laminar.trainer.learner import TorchLearner


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison; lengths are log-normal around `typical`."""

    num_groups: int
    group_size: int
    prompt_tokens: int
    typical: int
    longest: int
    micro_batch_tokens: int
    padded_rows: tuple[int, ...]
    repeats: int


MODELS = {"demo": DEMO, "smol": SMOL}
CASES = {
    "demo": Case(
        num_groups=16,
        group_size=8,
        prompt_tokens=12,
        typical=60,
        longest=300,
        micro_batch_tokens=4096,
        padded_rows=(8, 16, 32, 64),
        repeats=5,
    ),
    "smol": Case(
        num_groups=2,
        group_size=8,
        prompt_tokens=32,
        typical=60,
        longest=300,
        micro_batch_tokens=2048,
        padded_rows=(4, 8),
        repeats=3,
    ),
}
QUICK = Case(
    num_groups=2,
    group_size=2,
    prompt_tokens=4,
    typical=6,
    longest=16,
    micro_batch_tokens=256,
    padded_rows=(2,),
    repeats=1,
)


def experience(case: Case, vocab: int) -> list[ExperienceGroup]:
    """Random answers, half of them right; the first one is as long as any may be."""
    rng = random.Random(0)
    lengths = [min(int(case.typical * rng.lognormvariate(0.0, 0.8)) + 1, case.longest) for _ in range(1 << 10)]
    lengths[0] = case.longest
    groups = []
    for number in range(case.num_groups):
        prompt = tuple(rng.randrange(1, vocab) for _ in range(case.prompt_tokens))
        members = []
        for member in range(case.group_size):
            ids = [rng.randrange(1, vocab) for _ in range(lengths[number * case.group_size + member])]
            logprobs = pack_logprobs([-4.0] * len(ids))
            members.append(
                Experience(
                    trajectory_id=f"{number}-{member}",
                    pieces=(Piece(token_ids=pack_ids(ids), logprobs=logprobs, generated=True, version=0),),
                    reward=float(member % 2),
                    metrics={},
                    stop_reason="stop",
                    version=0,
                    staleness=0,
                )
            )
        problem = Prompt(prompt_id=str(number), token_ids=prompt, payload={})
        groups.append(ExperienceGroup(group_id=str(number), prompt=problem, members=tuple(members)))
    return groups


class PaddedLearner:
    """The usual loop over Hugging Face's model, with its scaled-dot-product attention and a padding mask."""

    def __init__(self, model: LlamaForCausalLM, groups: Sequence[ExperienceGroup]) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        self._rows = []
        for group in groups:
            prompt = group.prompt.token_ids
            for member in group.members:
                ids = torch.tensor([*prompt, *response_ids(member.pieces)])
                self._rows.append((ids, len(prompt), 2.0 * member.reward - 1.0))

    def step(self, rows: int) -> None:
        """One update in micro-batches of so many rows."""
        self._optimizer.zero_grad()
        for first in range(0, len(self._rows), rows):
            batch = self._rows[first : first + rows]
            ids = nn.utils.rnn.pad_sequence([row for row, _, _ in batch], batch_first=True)
            places = torch.arange(ids.shape[1])
            ends = torch.tensor([[len(row)] for row, _, _ in batch])
            starts = torch.tensor([[start] for _, start, _ in batch])
            logits = self._model(input_ids=ids, attention_mask=(places < ends).long(), use_cache=False).logits[:, :-1]
            losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            advantages = torch.tensor([[advantage] for _, _, advantage in batch])
            is_answer = (places[1:] >= starts) & (places[1:] < ends)
            ((losses * advantages * is_answer).sum() / is_answer.sum()).backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()


def cpu_seconds(work: Callable[[], object]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def measure(name: str, case: Case) -> dict[str, object]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(MODELS[name])
    groups = experience(case, model.config.vocab_size)
    lengths = [case.prompt_tokens + member.pieces[0].num_tokens for group in groups for member in group.members]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        shape = read_shape(Path(folder))
        rules = TrainerConfig(num_steps=1, micro_batch_tokens=case.micro_batch_tokens)
        ours = TorchLearner(folder, rules, seed=0)
    theirs = PaddedLearner(model.train(False), groups)
    ours.step(groups)
    rows = min(case.padded_rows, key=lambda rows: cpu_seconds(lambda: theirs.step(rows)))
    pairs = [
        (cpu_seconds(lambda: ours.step(groups)), cpu_seconds(lambda: theirs.step(rows))) for _ in range(case.repeats)
    ]
    ours_s, theirs_s = (min(column) for column in zip(*pairs, strict=True))
    _, gemm_rate = machine_limits(torch.device("cpu"), torch.float32, cpu_seconds)
    # An update is a forward and twice as much backward; a token attends to half of its sequence on average, and logits
    # are needed of answers only.
    flops = 3 * sum(decode_cost(shape, length, length // 2)[1] for length in lengths)
    flops -= 3 * 2 * shape.hidden * shape.vocab * case.prompt_tokens * len(lengths)
    return {
        "tokens": sum(lengths),
        "longest": max(lengths),
        "padded_rows": rows,
        "ours_tokens_per_s": round(sum(lengths) / ours_s),
        "hugging_face_tokens_per_s": round(sum(lengths) / theirs_s),
        "ratio": round(theirs_s / ours_s, 2),
        "of_gemm_rate": round(flops / gemm_rate / ours_s, 2),
        "gemm_gflop_per_s": round(gemm_rate / 1e9, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, not how fast")
    parser.add_argument("--models", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "benchmark": "learner",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": 1,
            "torch": torch.__version__,
        },
        "clock": "CPU seconds of the process",
        "quick": options.quick,
        "models": {name: measure(name, QUICK if options.quick else CASES[name]) for name in options.models},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
