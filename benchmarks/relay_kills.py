"""What it takes a chain of relays to get over a death at a random instant; prints one JSON line.

    python benchmarks/relay_kills.py                                   # every kind, 20 instants each
    python benchmarks/relay_kills.py --only master --mib 1024

Four relays and their keeper are processes of this machine, linked over loopback; a learner pushes one version after the
other from here. While a version is on its way a relay is killed (SIGKILL) or frozen (SIGSTOP). `survivors` is from that
instant to the last survivor's reader having the version; `push` is how long that `publish` took, the push to a new
master included; `undisturbed` is how long a version takes to the last relay when nobody dies.

A reader at each relay, in a process of their own, reads whatever is new there and takes the checksum of every read;
`torn` counts those that did not agree.
`leaked` counts processes and shared-memory files that are still there in the end.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from laminar.relay import benchmark
from laminar.relay.benchmark import SECRET, Started, started
from laminar.relay.client import ClientRules
from laminar.relay.keeper import ChainWatch, KeeperRules
from laminar.relay.member import ChainRules
from laminar.relay.process import KeepOrder, RelayOrder
from laminar.relay.pushing import ChainPublisher, PushRules
from laminar.relay.reader import WeightReader
from laminar.relay.threads import run_in_thread
from laminar.schema.errors import PortError

NAMES = ("a", "b", "c", "d")
KINDS = {
    "middle": (2, signal.SIGKILL),
    "last": (3, signal.SIGKILL),
    "master": (0, signal.SIGKILL),
    "frozen middle": (2, signal.SIGSTOP),
    "frozen master": (0, signal.SIGSTOP),
}
"""Which of the chain, and how."""

PAGE_BYTES = 4096
NEVER = (-1, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--instants", type=int, default=20)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--dead-after-s", type=float, default=1.0, help="heartbeat timeout")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {"benchmark": "relay_kills", "machine": benchmark.machine(), "mib": options.mib}
    rows = [asyncio.run(kill_one_after_the_other(kind, options)) for kind in options.only]
    print(json.dumps(result | {"dead_after_s": options.dead_after_s, "rows": rows}))


async def kill_one_after_the_other(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """One kind of death at so many instants."""
    rng = random.Random(options.seed)
    place, how = KINDS[kind]
    survivors_s, push_s, num_hit = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        async with Chain.running(Path(folder), options) as chain:
            undisturbed_s, masters_s = await chain.warm_up()
            span_s = masters_s if place == 0 else undisturbed_s
            for _ in range(options.instants):
                publishing = asyncio.create_task(chain.publish())
                await asyncio.sleep(rng.uniform(0.0, span_s))
                victim = chain.order()[place]
                others = [name for name in NAMES if name != victim]
                struck_s = chain.strike(victim, how)
                num_hit += not chain.all_have(others)
                push_s.append(await publishing)
                survivors_s.append(await chain.until_all_have(others) - struck_s)
                await chain.bring_back(victim)
    return {
        "kind": kind,
        "instants": options.instants,
        "while_under_way": num_hit,
        "undisturbed_s": round(undisturbed_s, 3),
        "survivors_s": summary(survivors_s),
        "push_s": summary(push_s),
        "reads": chain.num_reads,
        "torn": chain.torn,
        "leaked": num_leaked(chain.pids),
        "load": round(os.getloadavg()[0], 1),
    }


class Chain:
    """Four relays, a reader of each, and the learner."""

    def __init__(
        self, folder: Path, keeper: Started, sink: ChainPublisher, watch: ChainWatch, readers: Connection, mib: int
    ) -> None:
        self._folder = folder
        self._keeper = keeper
        self._sink = sink
        self._watch = watch
        self._readers = readers
        self._num_pages = mib * 2**20 // PAGE_BYTES
        self._relays: dict[str, tuple[contextlib.ExitStack, int]] = {}
        self._had: dict[str, tuple[int, float]] = {}
        self._options: dict[str, Any] = {}
        self.version = -1
        self.num_reads = self.torn = 0
        self.pids: list[int] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, folder: Path, options: argparse.Namespace) -> AsyncIterator["Chain"]:
        """All of them, until the context ends."""
        rules = KeeperRules(dead_after_s=options.dead_after_s)
        with contextlib.ExitStack() as stack:
            keeper = stack.enter_context(started(KeepOrder(secret=SECRET, rules=rules)))
            watch = ChainWatch(keeper.host, keeper.port, SECRET)
            sink = ChainPublisher(watch, SECRET, rules=PushRules(idle_s=options.dead_after_s))
            chain = cls(folder, keeper, sink, watch, stack.enter_context(readers_of(folder)), options.mib)
            asyncio.get_running_loop().add_reader(chain._readers.fileno(), chain._hear)
            chain._options = {"beat_s": options.dead_after_s / 5, "deadline_s": options.dead_after_s}
            watching = asyncio.create_task(watch.run())
            try:
                for name in NAMES:
                    await chain._start(name)
                yield chain
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                asyncio.get_running_loop().remove_reader(chain._readers.fileno())
                for relay, _ in chain._relays.values():
                    relay.close()

    async def warm_up(self) -> tuple[float, float]:
        """Seconds that a version takes then to all relays, and to the master."""
        for _ in range(benchmark.WARM_UP + 1):
            started_s = time.monotonic()
            masters_s = await self.publish()
            done_s = await self.until_all_have(list(NAMES))
        return done_s - started_s, masters_s

    def order(self) -> list[str]:
        return [member.relay_id for member in self._watch.chain.members]

    async def publish(self) -> float:
        """The next version: every page says which it is."""
        self.version += 1
        pages = torch.full((self._num_pages, PAGE_BYTES // 8), self.version, dtype=torch.int64)
        half = self._num_pages // 2
        return await self._sink.publish(self.version, {"w0": pages[:half], "w1": pages[half:]})

    def all_have(self, names: list[str]) -> bool:
        """Whether the readers of these relays have read the newest version."""
        return all(self._had.get(name, NEVER)[0] >= self.version for name in names)

    async def until_all_have(self, names: list[str]) -> float:
        """When the last of them had."""
        async with asyncio.timeout(60.0):
            while not self.all_have(names):  # noqa: ASYNC110 (other processes)
                await asyncio.sleep(0.002)
        return max(self._had[name][1] for name in names)

    def strike(self, name: str, how: signal.Signals) -> float:
        """Returns when."""
        struck_s = time.monotonic()
        os.kill(self._relays[name][1], how)
        if how == signal.SIGKILL:
            self._relays.pop(name)[0].close()
            self._had.pop(name, None)
        return struck_s

    async def bring_back(self, name: str) -> None:
        """Start it anew, or let it go on; returns when it has caught up."""
        if name in self._relays:
            os.kill(self._relays[name][1], signal.SIGCONT)
        else:
            await self._start(name)
        async with asyncio.timeout(60.0):
            while name not in self.order() or not self.all_have(list(NAMES)):  # noqa: ASYNC110 (other processes)
                await asyncio.sleep(0.005)

    async def _start(self, name: str) -> None:
        rules = ChainRules(
            relay_id=name, machine=name, keeper_host=self._keeper.host, keeper_port=self._keeper.port, **self._options
        )
        order = RelayOrder(secret=SECRET, socket_path=str(self._folder / name), rules=rules)
        stack = contextlib.ExitStack()
        relay = await run_in_thread(stack.enter_context, started(order))
        self._relays[name] = stack, relay.pid
        self.pids.append(relay.pid)
        async with asyncio.timeout(60.0):
            while name not in self.order():  # noqa: ASYNC110 (other processes)
                await asyncio.sleep(0.005)

    def _hear(self) -> None:
        name, version, had_s, is_good = self._readers.recv()
        self.num_reads += 1
        self.torn += not is_good
        self._had[name] = max(self._had.get(name, NEVER), (version, had_s))


@contextlib.contextmanager
def readers_of(folder: Path) -> Iterator[Connection]:
    """Their process, and what they tell."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=run_readers, args=(folder, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        yield ours
    finally:
        child.kill()
        child.join()
        ours.close()


def run_readers(folder: Path, pipe: Connection) -> None:
    """Read at every relay whatever is new, again after it came back; tell which version, since when, and if whole."""

    async def read(name: str) -> None:
        newest: int | None = None
        async with WeightReader(folder / name, SECRET, rules=ClientRules(connect_s=60.0, call_s=60.0)) as reader:
            while True:
                try:
                    version = await reader.wait_newer(newest, 60.0)
                    if version is not None and version != newest:
                        newest = await check(reader, name)
                except PortError:  # it was killed; what comes back holds nothing
                    newest = None

    async def check(reader: WeightReader, name: str) -> int:
        async with reader.lease() as held:
            had_s = time.monotonic()
            is_whole = await run_in_thread(held.tensors.compute_checksum) == held.tensors.checksum
            ends = {int(held.tensors[key][at][0]) for key in ("w0", "w1") for at in (0, -1)}
        pipe.send((name, held.version, had_s, is_whole and ends == {held.version}))
        return held.version

    async def main() -> None:
        await asyncio.gather(*map(read, NAMES))

    torch.set_num_threads(1)
    asyncio.run(main())


def summary(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "max": round(max(values), 3)}


def num_leaked(pids: list[int]) -> int:
    """Processes and shared-memory files."""
    files = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return sum(Path(f"/proc/{pid}").exists() for pid in pids) + sum("laminar" in name for name in files)


if __name__ == "__main__":
    main()
