"""The part that a data shard shares with queues: trajectories go in from several producers, batches come out to one.

Everything crosses processes by each system's own transport, as in its users' jobs: our shard as an actor of Ray with
its journal on, TransferQueue with its default storage, and `ray.util.queue.Queue`. Trajectories go in by groups and
come out by batches; each carries token ids and log-probs. Only ours leases prompts, keeps partial answers, counts
attempts and survives a crash; the rates say what that costs.
"""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray

from laminar.data.ports import DataRules
from laminar.data.shard import DataShard
from laminar.data.sqlite_journal import SqliteJournal
from laminar.schema.tokens import pack_ids, pack_logprobs
from laminar.schema.trajectories import Append, Finish, Piece, Prompt, Scored
from laminar.telemetry.events import NullEvents

GROUP_SIZE = 16
BATCH = 512
TOKENS = 256
NUM_PRODUCERS = 8

Round = Callable[[int], Awaitable[None]]
"""Moves one batch of BATCH trajectories through, all producers at work; gets the number of the round."""


class ManyPrompts:
    """An endless supply."""

    num_train = 1_000_000
    num_heldout = 0

    def prompt(self, split: str, index: int) -> Prompt:
        """The same tokens under another name."""
        return Prompt(prompt_id=str(index), token_ids=tuple(range(100)), payload={})


@ray.remote(num_cpus=0)
class ShardHost:
    """A data shard in a process of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shard: DataShard | None = None

    async def call(self, method: str, *args: Any) -> Any:
        """Any method of the shard."""
        if self._shard is None:
            rules = DataRules(group_size=GROUP_SIZE, max_groups_ahead=4 * BATCH // GROUP_SIZE)
            self._shard = DataShard(SqliteJournal(self._path, flush_s=0.05), ManyPrompts(), rules, NullEvents())
        return await getattr(self._shard, method)(*args)


async def laminar_rate(seconds: float) -> float:
    """Our shard: claim, stream, grade, sample, commit."""
    piece = Piece(token_ids=pack_ids(range(TOKENS)), logprobs=pack_logprobs([-0.5] * TOKENS), generated=True, version=0)
    grade = Scored(reward=1.0)

    async def produce(host: Any, lease: str, num: int) -> None:
        batch = await host.call.remote("claim", lease, 0, num, 5.0)
        for at in range(0, len(batch.items), GROUP_SIZE):
            some = batch.items[at : at + GROUP_SIZE]
            updates: list[Any] = []
            for item in some:
                me = {"trajectory_id": item.trajectory_id, "attempt": item.attempt}
                updates += [Append(**me, offset=0, pieces=(piece,)), Finish(**me, stop_reason="stop", grade=grade)]
            await host.call.remote("stream", lease, tuple(updates))

    with tempfile.TemporaryDirectory() as folder:
        host = ShardHost.remote(Path(folder) / "journal.sqlite")

        async def one(number: int) -> None:
            leases = [f"r{n}/0/{number}" for n in range(NUM_PRODUCERS)]
            await asyncio.gather(*(produce(host, lease, BATCH // NUM_PRODUCERS) for lease in leases))
            groups = await host.call.remote("sample", number, 0, BATCH // GROUP_SIZE, 5.0)
            assert len(groups) == BATCH // GROUP_SIZE
            await host.call.remote("commit", number)

        try:
            return await rate(one, seconds)
        finally:
            ray.kill(host)


async def ray_queue_rate(seconds: float) -> float:
    """Groups as lists of arrays through an unbounded queue."""
    from ray.util.queue import Queue

    queue = Queue()
    sample = (np.arange(TOKENS, dtype=np.int32), np.full(TOKENS, -0.5, np.float32), 1.0)

    async def produce(num: int) -> None:
        for _ in range(num // GROUP_SIZE):
            await queue.put_async([sample] * GROUP_SIZE)

    async def one(number: int) -> None:
        del number
        await asyncio.gather(*(produce(BATCH // NUM_PRODUCERS) for _ in range(NUM_PRODUCERS)))
        for _ in range(BATCH // GROUP_SIZE):
            await queue.get_async()

    try:
        return await rate(one, seconds)
    finally:
        queue.shutdown()


async def transfer_queue_rate(seconds: float) -> float:
    """Groups by its batch interface: put with tags, list, get, clear."""
    import torch
    import transfer_queue as tq  # type: ignore[import-not-found]
    from tensordict import TensorDict

    tq.init()
    fields = TensorDict(
        {
            "token_ids": torch.arange(TOKENS, dtype=torch.int32).repeat(GROUP_SIZE, 1),
            "logprobs": torch.full((GROUP_SIZE, TOKENS), -0.5),
            "reward": torch.ones(GROUP_SIZE, 1),
        },
        batch_size=GROUP_SIZE,
    )

    async def produce(number: int, producer: int, num: int) -> None:
        for group in range(num // GROUP_SIZE):
            keys = [f"{number}-{producer}-{group}-{member}" for member in range(GROUP_SIZE)]
            tags = [{"version": number}] * GROUP_SIZE
            await tq.async_kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=tags)

    async def one(number: int) -> None:
        each = BATCH // NUM_PRODUCERS
        await asyncio.gather(*(produce(number, producer, each) for producer in range(NUM_PRODUCERS)))
        listed = await tq.async_kv_list(partition_id="train")
        keys = list(listed["train"])
        assert len(keys) == BATCH
        await tq.async_kv_batch_get(keys=keys, partition_id="train")
        await tq.async_kv_clear(keys=keys, partition_id="train")

    try:
        return await rate(one, seconds)
    finally:
        tq.close()


async def rate(one: Round, seconds: float) -> float:
    """Trajectories per second of wall time, after a first round that warms up."""
    await one(1)
    number, began_s = 1, time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        number += 1
        await one(number)
    return (number - 1) * BATCH / (time.perf_counter() - began_s)


PEERS: dict[str, Callable[[float], Awaitable[float]]] = {
    "laminar": laminar_rate,
    "ray_queue": ray_queue_rate,
    "transfer_queue": transfer_queue_rate,
}


def measure_peers(seconds: float, *, with_transfer_queue: bool) -> dict[str, Any]:
    """All of them in turns, in one Ray instance; ratios are ours over theirs."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        names = [name for name in PEERS if with_transfer_queue or name != "transfer_queue"]
        rates = {name: asyncio.run(PEERS[name](seconds)) for name in names}  # type: ignore[arg-type]
    finally:
        ray.shutdown()  # type: ignore[no-untyped-call]
    told: dict[str, Any] = {f"{name}_per_s": round(value) for name, value in rates.items()}
    ours = rates.pop("laminar")
    return told | {f"laminar_over_{name}": round(ours / value, 2) for name, value in rates.items()}
