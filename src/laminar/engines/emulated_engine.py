"""An engine that only takes its time: real batching, KV budget and preemption, made-up but reproducible answers.

It does what a GPU engine of a given pace would do, on whatever clock the event loop has: virtual in a simulation, real
(and scaled) in a real cluster. The cost of running it is per event, not per token (`emulated_batch`).

An answer is a piece of one long sequence of noise, cut at a place that prompt, seed and loaded version choose, so a
continued answer equals an undisturbed one, and another version's answer differs; its log-prob names the version. The
last turn of an answer ends with the first stop token of its request, every other one with the last stop token.
"""

import asyncio
import random
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from laminar.engines import emulated_batch
from laminar.engines.calibration import calibration
from laminar.engines.emulated_batch import EmulatedBatch
from laminar.engines.emulated_pace import roofline_pace
from laminar.engines.protocol import Engine, EngineLoad, FinishReason, Output, Request
from laminar.engines.rules import EmulatedEngineRules
from laminar.engines.scripted_engine import prompt_of, scripted_logprob
from laminar.engines.workloads import LogNormal, Workload, published_lengths
from laminar.scheduling.order import stable_hash
from laminar.scheduling.roofline import HARDWARE
from laminar.schema.tokens import pack_ids

NOISE_IDS = 1 << 15
"""Length of the sequence that answers are cut from."""


class EmulatedEngine:
    """Passes the same contract as the real engines."""

    def __init__(self, rules: EmulatedEngineRules, workload: Workload) -> None:
        self._rules = rules
        self._workload = workload
        self._batch = EmulatedBatch(rules)
        self._sequences: dict[str, emulated_batch.Sequence] = {}
        self._version: int | None = None
        self._report_at_s = 0.0
        self._sleeper: asyncio.Future[None] | None = None

    async def start(self) -> None:
        pass

    def submit(self, requests: Sequence[Request]) -> None:
        fresh: dict[str, Request] = {}
        for request in requests:
            self._check(request)
            if request.request_id in self._sequences or request.request_id in fresh:
                raise ValueError(f"request {request.request_id} is already queued")
            fresh[request.request_id] = request
        if fresh:
            self._batch.advance(self._now_s())
            for request_id, request in fresh.items():
                self._sequences[request_id] = sequence = self._sequence(request)
                self._batch.submit(sequence)
            self._wake()

    async def step(self) -> list[Output]:
        if not self._sequences:
            return []
        if self._version is None:
            raise RuntimeError("the engine has requests but no weights; call load_weights first")
        while True:
            now_s = self._now_s()
            self._batch.advance(now_s)
            is_due = now_s + emulated_batch.SAME_S >= self._report_at_s
            if is_due or self._batch.has_ended or not self._sequences:
                break
            next_s = self._batch.next_event_s()
            await self._sleep_until(min(self._report_at_s, self._report_at_s if next_s is None else next_s))
        outputs = [self._output(sequence, self._version, _finish_of(sequence)) for sequence in self._batch.take_ended()]
        for output in outputs:
            del self._sequences[output.request_id]
        if is_due:
            self._report_at_s = now_s + self._rules.report_every_s
            outputs += self._progress(self._version)
        return outputs

    async def abort(self, request_ids: Sequence[str] | None = None) -> list[Output]:
        self._batch.advance(self._now_s())
        outputs = []
        for request_id in list(self._sequences) if request_ids is None else request_ids:
            sequence = self._sequences.pop(request_id, None)
            if sequence is not None:
                has_ended = sequence.num_drawn == sequence.num_due
                self._batch.remove(request_id)
                finish = _finish_of(sequence) if has_ended else "aborted"
                outputs.append(self._output(sequence, self._version or 0, finish))
        self._wake()
        return outputs

    async def load_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        if self._sequences:
            raise RuntimeError(f"weights can only be swapped when idle; the engine has {len(self._sequences)} requests")
        self._version = version

    def load(self) -> EngineLoad:
        batch = self._batch
        return EngineLoad(
            num_running=batch.num_running,
            num_waiting=batch.num_waiting,
            kv_used_tokens=batch.kv_used_tokens,
            kv_capacity_tokens=self._rules.kv_capacity_tokens,
            num_preempted=batch.num_preempted,
        )

    async def close(self) -> None:
        pass

    def _check(self, request: Request) -> None:
        if len(request.token_ids) < 1 or request.max_new_tokens < 1:
            raise ValueError(f"request {request.request_id} needs at least 1 token and room for at least 1 new one")
        num_tokens = (len(request.token_ids) + request.max_new_tokens) * self._rules.tokens_per_id
        if num_tokens > self._rules.kv_capacity_tokens:
            raise ValueError(
                f"request {request.request_id} may grow to {num_tokens} tokens, which can never fit a KV cache of "
                f"{self._rules.kv_capacity_tokens} tokens"
            )

    def _sequence(self, request: Request) -> emulated_batch.Sequence:
        turn = self._workload.turn(request.seed, request.num_answered, self._rules.tokens_per_id)
        num_due, limit = turn.end_ids - request.num_answered, request.max_new_tokens
        if not request.stop_token_ids or num_due > limit:
            return emulated_batch.Sequence(request, limit, None)
        stop_token_id = request.stop_token_ids[0 if turn.is_last else -1]
        return emulated_batch.Sequence(request, max(1, num_due), stop_token_id)

    def _progress(self, version: int) -> list[Output]:
        fresh = [sequence for sequence in self._batch.running() if sequence.num_drawn > sequence.num_reported]
        return [self._output(sequence, version, None) for sequence in fresh]

    def _output(self, sequence: emulated_batch.Sequence, version: int, finish: FinishReason | None) -> Output:
        request, start, stop = sequence.request, sequence.num_reported, sequence.num_drawn
        sequence.num_reported = stop
        stops = (sequence.stop_token_id,) if finish == "stop" and sequence.stop_token_id is not None else ()
        first = request.num_answered + start
        token_ids = self._noise(request, version, first, request.num_answered + stop - len(stops)) + stops
        return Output(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=(scripted_logprob(version),) * len(token_ids),
            finish=finish,
        )

    def _noise(self, request: Request, version: int, first: int, last: int) -> tuple[int, ...]:
        start = stable_hash(request.seed, version, zlib.crc32(pack_ids(prompt_of(request)))) + first
        noise = _noise_without(request.stop_token_ids, self._rules.vocab)
        token_ids: tuple[int, ...] = ()
        while len(token_ids) < last - first:
            at = (start + len(token_ids)) % NOISE_IDS
            token_ids += noise[at : at + last - first - len(token_ids)]
        return token_ids

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() * self._rules.time_scale

    async def _sleep_until(self, when_s: float) -> None:
        """waits for:  the moment, or `submit` or `abort`"""
        loop = asyncio.get_running_loop()
        self._sleeper = loop.create_future()
        timer = loop.call_at(when_s / self._rules.time_scale, self._wake)
        try:
            await self._sleeper
        finally:
            timer.cancel()
            self._sleeper = None

    def _wake(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)


def emulated_engine(
    model_path: Path,
    *,
    model: str,
    hardware: str,
    tensor_parallel: int = 1,
    lengths: str | None = None,
    median_tokens: float = 2_000.0,
    p99_over_median: float = 10.0,
    max_new_tokens: int = 16_384,
    max_running: int = 1_024,
    kv_capacity_tokens: int = 65_536,
    tokens_per_id: int = 34,
    time_scale: float = 1.0,
    report_every_s: float = 1.0,
) -> Engine:
    """For real runs: `rollout.engine: {kind: custom, path: laminar.engines.emulated_engine:emulated_engine}`.

    `model` and `hardware` name what is emulated, `lengths` a published distribution (None: a log-normal one). Emulated
    seconds pass `time_scale` times as fast as real ones. The model in `model_path` is not used.
    """
    del model_path
    constants = calibration()
    pace = roofline_pace(
        constants.models[model],
        HARDWARE[hardware],
        constants.decode,
        tensor_parallel=tensor_parallel,
        sequence_s=constants.decode.sequence_s(model, tensor_parallel),
    )
    log_normal = LogNormal(median=median_tokens, p99_over_median=p99_over_median, most=float(max_new_tokens))
    rules = EmulatedEngineRules(
        pace=pace,
        max_running=max_running,
        kv_capacity_tokens=kv_capacity_tokens,
        tokens_per_id=tokens_per_id,
        report_every_s=report_every_s,
        time_scale=time_scale,
    )
    return EmulatedEngine(rules, Workload(tokens=published_lengths()[lengths] if lengths else log_normal))


def _finish_of(sequence: emulated_batch.Sequence) -> FinishReason:
    return "length" if sequence.stop_token_id is None else "stop"


@lru_cache(maxsize=8)
def _noise_without(stop_token_ids: tuple[int, ...], vocab: int) -> tuple[int, ...]:
    allowed = [token_id for token_id in range(vocab) if token_id not in stop_token_ids]
    return tuple(random.Random(vocab).choices(allowed, k=NOISE_IDS))
