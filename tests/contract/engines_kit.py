"""How to build each engine small, and how to drive one: shared by the contract tests of engines."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from laminar.engines.emulated_engine import EmulatedEngine
from laminar.engines.emulated_pace import Pace
from laminar.engines.factory import build_engine
from laminar.engines.protocol import Engine, Request
from laminar.engines.rules import EmulatedEngineRules, ScriptedEngineRules, TorchEngineRules
from laminar.engines.workloads import Fixed, Turn, Workload
from laminar.schema.trajectories import Sampling

VOCAB = 60
PAGE_TOKENS = 8


@dataclass(frozen=True)
class EngineKit:
    """`build` makes an engine that reports every few tokens; `weights` gives what `load_weights` takes."""

    build: Callable[..., Engine]
    weights: Callable[[int], Mapping[str, Any]]

    async def ready(self, *, version: int = 1, **bounds: int) -> Engine:
        engine = self.build(**bounds)
        await engine.start()
        await engine.load_weights(version, self.weights(version))
        return engine


def scripted_kit() -> EngineKit:
    def build(*, max_running: int = 8, kv_capacity_tokens: int = 2048) -> Engine:
        rules = ScriptedEngineRules(
            max_running=max_running,
            kv_capacity_tokens=kv_capacity_tokens,
            prefill_chunk_tokens=16,
            iterations_per_step=1,
            vocab=VOCAB,
            page_tokens=PAGE_TOKENS,
        )
        return build_engine("scripted", Path(), rules)

    return EngineKit(build, lambda version: {})


class UnevenLengths(Workload, frozen=True, kw_only=True):
    """Answers of 5 to 24 tokens."""

    def turn(self, seed: int, num_answered: int, tokens_per_id: int) -> Turn:
        return Turn(end_ids=5 + seed % 20, is_last=True)


def emulated_kit() -> EngineKit:
    pace = Pace(
        weights_s=1e-3,
        gemm_s_per_sequence=0.0,
        layers_s=0.0,
        per_sequence_s=1e-5,
        per_kv_token_s=1e-7,
        prefill_tokens_per_s=1e5,
    )

    def build(*, max_running: int = 8, kv_capacity_tokens: int = 2048) -> Engine:
        rules = EmulatedEngineRules(
            pace=pace,
            max_running=max_running,
            kv_capacity_tokens=kv_capacity_tokens,
            report_every_s=2e-3,
            vocab=VOCAB,
        )
        return EmulatedEngine(rules, UnevenLengths(tokens=Fixed(value=20)))

    return EngineKit(build, lambda version: {})


def torch_kit(folder: Path) -> EngineKit:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    config.save_pretrained(folder)

    def build(*, max_running: int = 8, kv_capacity_tokens: int = 2048) -> Engine:
        rules = TorchEngineRules(
            max_running=max_running,
            kv_capacity_tokens=kv_capacity_tokens,
            prefill_chunk_tokens=16,
            quantum_s=0.0,  # one iteration per step
            page_tokens=PAGE_TOKENS,
        )
        return build_engine("torch", folder, rules)

    def weights(version: int) -> Mapping[str, Any]:
        torch.manual_seed(version)
        return LlamaForCausalLM(config).state_dict()

    return EngineKit(build, weights)


def ask(
    name: str,
    *,
    prompt: Iterable[int] = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5),
    answered: Iterable[int] = (),
    group: str | None = None,
    new: int = 20,
    stops: tuple[int, ...] = (),
    temperature: float = 1.0,
) -> Request:
    """A request whose seed follows from its name."""
    prompt, answered = tuple(prompt), tuple(answered)
    return Request(
        request_id=name,
        group_id=group or name,
        token_ids=prompt + answered,
        num_shared=len(prompt),
        num_answered=len(answered),
        max_new_tokens=new,
        stop_token_ids=stops,
        sampling=Sampling(temperature=temperature),
        seed=sum(name.encode()),
    )


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    num_reports: int = 0


class Answers(dict[str, Answer]):
    """What an engine reported, by request; checks that nothing follows a finish."""

    def take(self, outputs: Iterable[Any]) -> None:
        for output in outputs:
            answer = self.setdefault(output.request_id, Answer())
            assert answer.finish is None, output
            assert len(output.token_ids) == len(output.logprobs), output
            answer.token_ids.extend(output.token_ids)
            answer.logprobs.extend(output.logprobs)
            answer.finish = output.finish
            answer.num_reports += 1

    def token_ids(self) -> dict[str, list[int]]:
        return {name: answer.token_ids for name, answer in sorted(self.items())}


async def finish_all(engine: Engine, requests: Iterable[Request] = (), answers: Answers | None = None) -> Answers:
    """Submit and step until nothing is left; KV use stays within its capacity throughout."""
    engine.submit(list(requests))
    answers = Answers() if answers is None else answers
    while (load := engine.load()).num_running + load.num_waiting:
        assert load.kv_used_tokens <= load.kv_capacity_tokens, load
        answers.take(await engine.step())
    answers.take(await engine.step())
    return answers
