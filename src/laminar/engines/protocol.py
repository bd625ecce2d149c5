"""The contract between a replica and its engine: tokens in, tokens with log-probs out.

Every engine passes `tests/contract/test_engines.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from msgspec import Struct

from laminar.schema.trajectories import Sampling

FinishReason = Literal["stop", "length", "aborted"]


class Request(Struct, frozen=True, kw_only=True):
    """One sequence to decode.

    `token_ids` holds the prompt and everything answered so far; the first `num_shared` of them are the group's common
    prompt, whose KV may be computed once for all requests with the same `group_id`. Token number i counted from the end
    of the prompt is drawn from (`seed`, i), so a continued request draws what the undisturbed one would have drawn.
    """

    request_id: str
    group_id: str
    token_ids: tuple[int, ...]
    num_shared: int
    num_answered: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int


class Output(Struct, frozen=True, kw_only=True):
    """New tokens of one request since the last report; `finish` is set on its last report.

    A stop token that was drawn is part of `token_ids`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason | None


class EngineLoad(Struct, frozen=True, kw_only=True):
    """Counters of this instant. `num_preempted` counts requests ever pushed out of the KV cache to make room."""

    num_running: int
    num_waiting: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    num_preempted: int


class Weights(NamedTuple):
    """One weight version mapped into this process: read-only tensors by Hugging Face name."""

    version: int
    tensors: Mapping[str, Any]


class Engine(Protocol):
    """Continuous batching over a bounded KV cache.

    All methods are called from one event loop. `submit` may be called while `step` is in flight.
    """

    async def start(self) -> None:
        """Allocate memory; weights come later through `load_weights`."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; they are admitted as the KV cache has room. Raises ValueError if one can never fit."""
        ...

    async def step(self) -> list[Output]:
        """Make progress for about one quantum and report what is new. Returns [] at once if nothing is queued."""
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> list[Output]:
        """Stop these requests (None: all), report their last tokens with finish `aborted`; unknown ids are ignored."""
        ...

    async def load_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Swap weights in place; copies what it needs before it returns. Raises RuntimeError unless idle."""
        ...

    def load(self) -> EngineLoad:
        """Counters of this instant; cheap."""
        ...

    async def close(self) -> None:
        """Release memory and threads."""
        ...
