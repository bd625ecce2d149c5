"""What a replica needs from its neighbours."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from laminar.engines.protocol import Weights
from laminar.schema.fleet import Adoption, ReplicaLoad
from laminar.schema.trajectories import Batch, Grade, Update
from laminar.tasks.protocol import Environment, Message, Problem


class DataPort(Protocol):
    """The data shard, as a replica sees it. All calls are idempotent."""

    async def claim(self, lease_id: str, version: int, max_trajectories: int, wait_s: float) -> Batch:
        """Lease up to `max_trajectories` in whole groups, or one evaluation batch; waits up to `wait_s` for room."""
        ...

    async def stream(self, lease_id: str, updates: tuple[Update, ...]) -> tuple[str, ...]:
        """Record progress; returns the ids that the caller no longer holds (fenced) and must abort."""
        ...

    async def adopt(self, from_lease: str, to_lease: str, version: int) -> Batch:
        """Take over all unfinished trajectories of a lease; each with attempt + 1. Empty if there are none left."""
        ...


class ManagerPort(Protocol):
    """The manager, as a replica sees it."""

    async def heartbeat(self, load: ReplicaLoad) -> Adoption | None:
        """Report; an idle replica may be told what to take over next.

        Raises `Fenced` if this incarnation was declared dead.
        """
        ...

    async def adoption_ended(self, replica_id: str, lease_id: str, taken_over: bool) -> None:
        """What became of an order to take over a lease between two batches; it fails if there are no weights for it."""
        ...


class WeightSource(Protocol):
    """The relay of this machine, as a replica sees it."""

    async def newest(self) -> int | None:
        """Newest complete version, None before the first publish."""
        ...

    async def wait_newer(self, than: int | None, wait_s: float) -> int | None:
        """Newest complete version as soon as it is newer than `than` (None: as soon as there is one)."""
        ...

    def lease(self, version: int | None = None) -> AbstractAsyncContextManager[Weights]:
        """Map a version (None: the newest complete one), kept while the context is open.

        Raises `WeightsUnavailable` if it is not held.
        """
        ...


class Grader(Protocol):
    """Whatever computes rewards without blocking the replica."""

    async def grade(self, problem: Problem, answer: str) -> Grade:
        """Reward of an answer, or why there is none."""
        ...


class Tokenizer(Protocol):
    """Text of the model's vocabulary."""

    stop_token_ids: tuple[int, ...]

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of a piece of context, without special tokens."""
        ...

    def encode_reply(self, messages: Sequence[Message], after: Sequence[int]) -> tuple[int, ...]:
        """Token ids of messages that follow a turn of the model, up to the opening of its next turn."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens removed."""
        ...


class Environments(Protocol):
    """Makes episodes; None stands for a task that is answered in one turn."""

    def environment(self, problem: Problem) -> Environment:
        """A fresh environment for one episode."""
        ...

    def forget(self, environment: Environment) -> None:
        """The episode is over, or went elsewhere."""
        ...
