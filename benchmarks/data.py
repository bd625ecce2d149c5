"""What one data shard carries on one core: partial responses streamed in, and trajectories from claim to commit.

Prints one JSON line. Goals: 2.5 M tokens/s of stream (the paper's largest run makes 0.26 M), and 200 finished
trajectories/s with the journal on. The journal's writer thread shares the core, and everything is durable when the
clock stops. Calls are made directly: what a transport would add is not in these numbers. Beside wall time stands the
rate per second of CPU time, which a busy machine changes less; the durability cost is the ratio of those.

A third measurement, on all cores, moves trajectories from producers to a consumer across processes: our shard in an
actor of Ray, beside a plain Ray queue and TransferQueue (`pip install TransferQueue`), each by its own transport.

    python benchmarks/data.py [--seconds 4] [--folder /tmp]
"""

import argparse
import asyncio
import importlib.util
import json
import os
import platform
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from laminar.data.journal import Journal, MemoryRows, Rows
from laminar.data.ports import DataRules
from laminar.data.rows import Row
from laminar.data.shard import DataShard
from laminar.data.sqlite_journal import SqliteJournal
from laminar.schema.tokens import pack_ids, pack_logprobs
from laminar.schema.trajectories import Append, Finish, Piece, Prompt, Scored, Update, WorkItem
from laminar.telemetry.events import NullEvents
from peers.queues import measure_peers

GROUP_SIZE = 16
BATCH_TRAJECTORIES = 512
NUM_REPLICAS = 8
TOKENS_PER_APPEND = 128
"""`rollout.stream_every_tokens`."""

SHORT_ANSWER_TOKENS = 256
"""Answers in the second measurement: short, so that what a trajectory costs besides its tokens is seen."""

FLUSH_S = 0.05


class Rate(Struct, frozen=True, kw_only=True):
    """Per second of wall time and of CPU time."""

    per_s: float
    per_cpu_s: float


class NoJournal:
    """Forgets what is written: the shard without durability."""

    def write(self, rows: tuple[Row, ...]) -> None:
        """Do nothing."""

    async def durable(self) -> None:
        """Nothing ever is."""

    async def committed(self) -> None:
        """Nothing ever is."""

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


class Clock:
    """Wall and CPU seconds since it was made."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    @property
    def wall_s(self) -> float:
        """Seconds that passed."""
        return time.perf_counter() - self._wall_s

    def rate(self, num: int) -> Rate:
        """What was done, per second."""
        return Rate(per_s=num / self.wall_s, per_cpu_s=num / (time.process_time() - self._cpu_s))


async def stream_rate(shard: DataShard, journal: Journal, seconds: float) -> Rate:
    """Tokens that replicas can stream in."""
    batches = [
        (f"r{n}/0/1", (await shard.claim(f"r{n}/0/1", 0, BATCH_TRAJECTORIES, 0.0)).items) for n in range(NUM_REPLICAS)
    ]
    await journal.durable()
    new, offset, clock = piece(TOKENS_PER_APPEND, 0), 0, Clock()
    while clock.wall_s < seconds:
        calls = (shard.stream(lease, appends(items, offset, new)) for lease, items in batches)
        assert set(await asyncio.gather(*calls)) == {()}
        offset += TOKENS_PER_APPEND
    await journal.durable()
    return clock.rate(offset * NUM_REPLICAS * BATCH_TRAJECTORIES)


async def answer_a_share(shard: DataShard, lease: str, version: int) -> None:
    """One replica's part of a step: claim, then finish a group at a time, as they trickle in."""
    items = (await shard.claim(lease, version, BATCH_TRAJECTORIES // NUM_REPLICAS, 0.0)).items
    assert len(items) == BATCH_TRAJECTORIES // NUM_REPLICAS
    new = piece(SHORT_ANSWER_TOKENS, version)
    for at in range(0, len(items), GROUP_SIZE):
        some = items[at : at + GROUP_SIZE]
        assert await shard.stream(lease, appends(some, 0, new) + finishes(some)) == ()


async def finish_rate(shard: DataShard, journal: Journal, seconds: float) -> Rate:
    """Trajectories from claim over stream and grade to sample and commit."""
    groups_per_step = BATCH_TRAJECTORIES // GROUP_SIZE
    clock, step = Clock(), 0
    while clock.wall_s < seconds:
        step += 1
        await asyncio.gather(*(answer_a_share(shard, f"s{n}/0/{step}", step - 1) for n in range(NUM_REPLICAS)))
        assert len(await shard.sample(step, 0, groups_per_step, 1.0)) == groups_per_step
        await shard.commit(step)
    await journal.durable()
    return clock.rate(step * BATCH_TRAJECTORIES)


Measure = Callable[[DataShard, Journal, float], Awaitable[Rate]]


async def measure(what: Measure, journal: Journal, seconds: float) -> Rate:
    """One fresh shard."""
    rules = DataRules(group_size=GROUP_SIZE, max_groups_ahead=4 * NUM_REPLICAS * BATCH_TRAJECTORIES // GROUP_SIZE)
    async with DataShard.open(journal, ManyPrompts(), rules, NullEvents()) as shard:
        return await what(shard, journal, seconds)


def on_and_off(what: Measure, folder: Path, seconds: float) -> tuple[Rate, Rate]:
    """The rate with the journal and without."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        on = asyncio.run(measure(what, SqliteJournal(Path(place) / "journal.sqlite", flush_s=FLUSH_S), seconds))
    return on, asyncio.run(measure(what, NoJournal(), seconds))


def rates(on: Rate, off: Rate, goal_per_s: int) -> dict[str, Any]:
    """One measurement as it is printed."""
    return {
        "goal_per_s": goal_per_s,
        "journal_per_s": round(on.per_s),
        "journal_per_cpu_s": round(on.per_cpu_s),
        "no_journal_per_s": round(off.per_s),
        "no_journal_per_cpu_s": round(off.per_cpu_s),
        "durability_cost": round(off.per_cpu_s / on.per_cpu_s, 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each of four measurements")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the journal lies")
    parser.add_argument("--skip-transfer-queue", action="store_true", help="only a plain Ray queue as a peer")
    options = parser.parse_args()
    with_transfer_queue = not options.skip_transfer_queue
    if with_transfer_queue and importlib.util.find_spec("transfer_queue") is None:
        parser.error("TransferQueue is not installed: pip install TransferQueue, or give --skip-transfer-queue")
    shared = measure_peers(options.seconds, with_transfer_queue=with_transfer_queue)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    stream_on, stream_off = on_and_off(stream_rate, options.folder, options.seconds)
    finish_on, finish_off = on_and_off(finish_rate, options.folder, options.seconds)
    result: dict[str, Any] = {
        "benchmark": "data",
        "machine": f"{platform.machine()}, one core of {os.cpu_count()}, Python {platform.python_version()}",
        "tokens_per_append": TOKENS_PER_APPEND,
        "short_answer_tokens": SHORT_ANSWER_TOKENS,
        "stream_tokens": rates(stream_on, stream_off, goal_per_s=2_500_000),
        "finished_trajectories": rates(finish_on, finish_off, goal_per_s=200),
        "trajectories_across_processes": shared,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
