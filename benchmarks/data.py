"""What one data shard carries on one core: partial responses streamed in, and trajectories from claim to commit.

Prints one JSON line. Goals: 2.5 M tokens/s of stream (the paper's largest run makes 0.26 M), and 200 finished
trajectories/s with the journal on. The journal's writer thread shares the core, and everything is durable when the clock
stops. Calls are made directly: what a transport would add is not in these numbers.

    python benchmarks/data.py [--seconds 4] [--folder /tmp]
"""

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from laminar.data.journal import Journal, MemoryRows, Rows
from laminar.data.ports import DataRules
from laminar.data.rows import Row
from laminar.data.shard import DataShard
from laminar.data.sqlite_journal import SqliteJournal
from laminar.schema.tokens import pack_ids, pack_logprobs
from laminar.schema.trajectories import Append, Finish, Piece, Prompt, Scored, Update, WorkItem
from laminar.telemetry.events import NullEvents

GROUP_SIZE = 16
BATCH_TRAJECTORIES = 512
NUM_REPLICAS = 8
TOKENS_PER_APPEND = 128
"""`rollout.stream_every_tokens`."""

SHORT_ANSWER_TOKENS = 256
"""Answers in the second measurement: short, so that what a trajectory costs besides its tokens is seen."""

FLUSH_S = 0.05


class NoJournal:
    """Forgets what is written: the shard without durability."""

    def write(self, rows: tuple[Row, ...]) -> None:
        """Do nothing."""

    async def durable(self) -> None:
        """Nothing ever is."""

    async def room(self) -> None:
        """There always is."""

    async def failed(self) -> NoReturn:
        """Never; the benchmark does not ask."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is open."""

    @contextmanager
    def rows(self) -> Iterator[Rows]:
        """Nothing was written."""
        yield MemoryRows()


class ManyPrompts:
    """An endless supply."""

    num_train = 1_000_000
    num_heldout = 0

    def prompt(self, split: str, index: int) -> Prompt:
        """The same tokens under another name."""
        return Prompt(prompt_id=str(index), token_ids=tuple(range(100)), payload={"answer": index})


def piece(num_tokens: int, version: int) -> Piece:
    """Some tokens."""
    ids, logprobs = pack_ids(range(num_tokens)), pack_logprobs([-0.5] * num_tokens)
    return Piece(token_ids=ids, logprobs=logprobs, generated=True, version=version)


def appends(items: tuple[WorkItem, ...], offset: int, new: Piece) -> tuple[Update, ...]:
    """One append for each trajectory, as a replica sends them; to make it counts as the caller's work and ours."""
    return tuple(
        Append(trajectory_id=item.trajectory_id, attempt=item.attempt, offset=offset, pieces=(new,)) for item in items
    )


def finishes(items: tuple[WorkItem, ...]) -> tuple[Update, ...]:
    """All trajectories of a batch are graded."""
    grade = Scored(reward=1.0, metrics={"correct": 1.0})
    return tuple(
        Finish(trajectory_id=item.trajectory_id, attempt=item.attempt, stop_reason="stop", grade=grade)
        for item in items
    )


async def stream_rate(shard: DataShard, journal: Journal, seconds: float) -> float:
    """Tokens per second that replicas can stream in."""
    batches = [
        (f"r{n}/0/1", (await shard.claim(f"r{n}/0/1", 0, BATCH_TRAJECTORIES, 0.0)).items) for n in range(NUM_REPLICAS)
    ]
    await journal.durable()
    new, offset, started_s = piece(TOKENS_PER_APPEND, 0), 0, time.perf_counter()
    while time.perf_counter() - started_s < seconds:
        for lease, items in batches:
            assert await shard.stream(lease, appends(items, offset, new)) == ()
        offset += TOKENS_PER_APPEND
    await journal.durable()
    return offset * NUM_REPLICAS * BATCH_TRAJECTORIES / (time.perf_counter() - started_s)


async def finish_rate(shard: DataShard, journal: Journal, seconds: float) -> float:
    """Trajectories per second from claim over stream and grade to sample and commit."""
    groups_per_step = BATCH_TRAJECTORIES // GROUP_SIZE
    started_s, step = time.perf_counter(), 0
    while time.perf_counter() - started_s < seconds:
        step += 1
        lease = f"s/0/{step}"
        items = (await shard.claim(lease, step - 1, BATCH_TRAJECTORIES, 0.0)).items
        assert len(items) == BATCH_TRAJECTORIES
        new = piece(SHORT_ANSWER_TOKENS, step - 1)
        for at in range(0, len(items), GROUP_SIZE):  # as they trickle in
            some = items[at : at + GROUP_SIZE]
            await shard.stream(lease, appends(some, 0, new) + finishes(some))
        assert len(await shard.sample(step, 0, groups_per_step, 1.0)) == groups_per_step
        await shard.commit(step)
    await journal.durable()
    return step * BATCH_TRAJECTORIES / (time.perf_counter() - started_s)


Measure = Callable[[DataShard, Journal, float], Awaitable[float]]


async def measure(what: Measure, journal: Journal, seconds: float) -> float:
    """One fresh shard."""
    rules = DataRules(group_size=GROUP_SIZE, max_groups_ahead=4 * NUM_REPLICAS * BATCH_TRAJECTORIES // GROUP_SIZE)
    async with DataShard.open(journal, ManyPrompts(), rules, NullEvents()) as shard:
        return await what(shard, journal, seconds)


def on_and_off(what: Measure, folder: Path, seconds: float) -> tuple[float, float]:
    """The rate with the journal and without."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        on = asyncio.run(measure(what, SqliteJournal(Path(place) / "journal.sqlite", flush_s=FLUSH_S), seconds))
    return on, asyncio.run(measure(what, NoJournal(), seconds))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each of four measurements")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the journal lies")
    options = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    stream_on, stream_off = on_and_off(stream_rate, options.folder, options.seconds)
    finish_on, finish_off = on_and_off(finish_rate, options.folder, options.seconds)
    result: dict[str, Any] = {
        "benchmark": "data",
        "machine": f"{platform.machine()}, one core of {os.cpu_count()}, Python {platform.python_version()}",
        "tokens_per_append": TOKENS_PER_APPEND,
        "short_answer_tokens": SHORT_ANSWER_TOKENS,
        "stream_tokens_per_s": {"journal": round(stream_on), "no_journal": round(stream_off), "goal": 2_500_000},
        "finished_per_s": {"journal": round(finish_on), "no_journal": round(finish_off), "goal": 200},
        "durability_cost": {
            "stream": round(stream_off / stream_on, 2),
            "finished": round(finish_off / finish_on, 2),
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
