"""A data shard and what tests do with it."""

from collections.abc import Sequence

from laminar.data.audit import audit_rows
from laminar.data.journal import MemoryJournal
from laminar.data.ports import DataRules
from laminar.data.shard import DataShard
from laminar.schema.tokens import pack_ids, pack_logprobs
from laminar.schema.trajectories import (
    Append,
    Batch,
    Finish,
    Grade,
    Piece,
    Prompt,
    Scored,
    Update,
    WorkItem,
)
from laminar.telemetry.events import MemoryEvents
from laminar.telemetry.vocabulary import problem


class Prompts:
    """Prompt n of a split is called like it; those in `too_long` have a hundred tokens."""

    def __init__(self, num_train: int = 50, num_heldout: int = 3, too_long: Sequence[int] = (), name: str = "") -> None:
        self.num_train = num_train
        self.num_heldout = num_heldout
        self._too_long = too_long
        self._name = name

    def prompt(self, split: str, index: int) -> Prompt:
        num_tokens = 100 if index in self._too_long else 3
        return Prompt(prompt_id=f"{split[0]}{self._name}{index}", token_ids=(7,) * num_tokens, payload={"i": index})


class World:
    """A shard and what tests do with it."""

    def __init__(self, prompts: Prompts | None = None, **rules: object) -> None:
        defaults = {"group_size": 2, "max_groups_ahead": 8, "shuffle": False, "max_prompt_tokens": 10}
        self.rules = DataRules(**{**defaults, **rules})  # type: ignore[arg-type]
        self.prompts = prompts or Prompts()
        self.journal = MemoryJournal()
        self.events = MemoryEvents()
        self.shard = DataShard(self.journal, self.prompts, self.rules, self.events)

    def restart(self) -> "World":
        """The process dies, all of its journal is kept."""
        self.journal = self.journal.after_crash(self.journal.num_pending)
        self.shard = DataShard(self.journal, self.prompts, self.rules, self.events)
        return self

    async def claim(self, lease: str, version: int = 0, num: int = 2, wait_s: float = 0.0) -> Batch:
        return await self.shard.claim(lease, version, num, wait_s)

    async def append(self, lease: str, item: WorkItem, ids: Sequence[int], version: int = 0, offset: int = 0):
        return await self.shard.stream(lease, (append(item, ids, version, offset),))

    async def grade(self, lease: str, item: WorkItem, grade: Grade | float = 1.0):
        grade = Scored(reward=grade) if isinstance(grade, float) else grade
        finish = Finish(trajectory_id=item.trajectory_id, attempt=item.attempt, stop_reason="stop", grade=grade)
        return await self.shard.stream(lease, (finish,))

    async def answer(self, lease: str, batch: Batch, version: int = 0, reward: float = 1.0) -> None:
        for item in batch.items:
            assert await self.append(lease, item, [1, 2, 3], version) == ()
            assert await self.grade(lease, item, reward) == ()

    async def ready(self, num_groups: int, version: int = 0) -> list[str]:
        """Make some groups complete, one after the other."""
        names = []
        for _ in range(num_groups):
            lease = f"ready-{len(self.events.of('claimed'))}"
            batch = await self.claim(lease, version, self.rules.group_size)
            await self.answer(lease, batch, version)
            names.append(batch.items[0].group_id)
        return names

    async def counts(self) -> dict[str, int]:
        return dict((await self.shard.stats()).counts)

    def check(self) -> None:
        """The journal is sound and every event is in the vocabulary."""
        with self.journal.rows() as rows:
            report = audit_rows(rows)
        assert report.is_sound, report.problems
        assert [p for p in map(problem, self.events.events) if p] == []


def append(item: WorkItem, ids: Sequence[int], version: int = 0, offset: int = 0) -> Update:
    logprobs = pack_logprobs([-0.5] * len(ids))
    piece = Piece(token_ids=pack_ids(ids), logprobs=logprobs, generated=True, version=version)
    return Append(trajectory_id=item.trajectory_id, attempt=item.attempt, offset=offset, pieces=(piece,))


def ids(batch: Batch) -> list[str]:
    return [item.trajectory_id for item in batch.items]


def purposes(batch: Batch) -> set[str]:
    return {item.purpose for item in batch.items}
