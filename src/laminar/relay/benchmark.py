"""How long weights take from a learner's tensors to a replica's over one machine's relay, against plain copies.

Times are seconds, medians of interleaved repetitions. `memcpy` is one numpy copy of as many bytes into warm memory,
`memcpy_by_tensor` the same in pieces of the model's tensors; `publish_stall` is how long the learner's tensors were
looked at and read, `write` the whole call after which the learner may go on, `visible` how long after its begin a
waiting reader has the version, `map` what it takes to have all tensors of a lease, `swap_in` the copy from there into
tensors of one's own, `read` both. The relay is another process.

Each ratio is the median of the ratios of neighbours: what was measured against the mean of the copies just before and
just after it, so that a machine that is busy for a while slows down both. Ratios of `cpu` compare the seconds that this
process computed, which do not count while others have the processor.
"""

import asyncio
import contextlib
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from laminar.relay.client import ClientRules
from laminar.relay.copying import copy_all
from laminar.relay.member import ChainRules
from laminar.relay.process import KeepOrder, RelayOrder
from laminar.relay.publisher import WeightPublisher
from laminar.relay.reader import WeightReader

SECRET = b"benchmark"
RULES = ClientRules(connect_s=60.0)
Times = dict[str, list[float]]
Model = dict[str, Tensor]

WARM_UP = 4
"""Versions until every slot is mapped and warm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`dtype` `bfloat16`: the learner holds float32 and casts on the way."""

    repeat: int = 9
    threads: int | None = None
    dtype: str = "keep"


def large_model(num_bytes: int, dtype: str = "keep") -> Model:
    """25 layers of 12 tensors in the proportions of a Llama, an embedding and a norm; `num_bytes` as published."""
    make = torch.float32 if dtype == "bfloat16" else torch.bfloat16
    parts = {"q": 0.1, "k": 0.03, "v": 0.03, "o": 0.1, "gate": 0.245, "up": 0.245, "down": 0.245}
    parts |= dict.fromkeys(("norm1", "norm2", "q_bias", "k_bias", "v_bias"), 1e-05)
    num_elements = num_bytes // 2
    sizes = {
        f"layers.{n}.{name}": int(part * 0.88 / 25 * num_elements) for n in range(25) for name, part in parts.items()
    }
    sizes |= {"embed": int(0.12 * num_elements), "norm": 2_048}
    return {name: torch.full((size,), 0.5, dtype=make) for name, size in sizes.items()}


def smollm2_135m() -> Model:
    """Shapes of SmolLM2-135M in bfloat16, tied embeddings (config.json of HuggingFaceTB/SmolLM2-135M)."""
    width, inner, keys = 576, 1_536, 192
    layer: dict[str, tuple[int, ...]]
    layer = {"q": (width, width), "k": (keys, width), "v": (keys, width), "o": (width, width)}
    layer |= {
        "gate": (inner, width),
        "up": (inner, width),
        "down": (width, inner),
        "norm1": (width,),
        "norm2": (width,),
    }
    make = torch.Generator().manual_seed(0)
    tensors = {
        f"layers.{n}.{name}": (0.02 * torch.randn(shape, generator=make)).bfloat16()
        for n in range(30)
        for name, shape in layer.items()
    }
    tensors |= {
        "embed": (0.02 * torch.randn(49_152, width, generator=make)).bfloat16(),
        "norm": torch.ones(width, dtype=torch.bfloat16),
    }
    return tensors | {"head": tensors["embed"]}


def measure(name: str, model: Model, options: Options) -> dict[str, Any]:
    """One row: run a relay, publish and read."""
    with tempfile.TemporaryDirectory() as folder, one_relay(Path(folder)) as path:
        times, facts = asyncio.run(_measure(path, model, options))
    medians = {key: round(statistics.median(values) * 1e3, 3) for key, values in sorted(times.items())}
    ratios = {
        f"{one} / {other}": ratio(times, one, other, at)
        for other in ("memcpy", "memcpy_by_tensor", "memcpy_cpu")
        for at, ones in enumerate((("publish_stall", "write", "write_cpu"), ("swap_in", "read", "swap_in_cpu")))
        for one in ones
        if one.endswith("_cpu") == other.endswith("_cpu")
    }
    return {"model": name, "tensors": len(model), **facts, "ms": medians, "ratios": ratios}


@contextlib.contextmanager
def one_relay(folder: Path) -> Iterator[Path]:
    """A chain of one relay; yields the socket of its machine."""
    with started(KeepOrder(secret=SECRET)) as keeper:
        rules = ChainRules(relay_id="only", keeper_host=keeper.host, keeper_port=keeper.port)
        path = folder / "relay"
        with started(RelayOrder(secret=SECRET, socket_path=str(path), rules=rules)):
            keeper.until(lambda event: event["kind"] == "chain_changed")
            yield path


class Started:
    """A process of ours, where it listens, and the events that it prints."""

    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self._child = child
        listening = self.until(lambda event: event["kind"] == "listening")
        self.host, self.port = listening["host"], listening["port"]
        self.pid = child.pid

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next event that fulfils the condition."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            event: dict[str, Any] = msgspec.json.decode(line)
            if condition(event):
                return event
        raise RuntimeError("a relay process ended")


@contextlib.contextmanager
def started(order: KeepOrder | RelayOrder, prefix: tuple[str, ...] = ()) -> Iterator[Started]:
    """Run an order in a process that ends with the context; `prefix` goes before its command."""
    command = [*prefix, sys.executable, "-m", "laminar.relay.process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(order) + b"\n")
        child.stdin.flush()
        try:
            yield Started(child)
        finally:
            child.kill()


async def _measure(path: Path, model: Model, options: Options) -> tuple[Times, dict[str, Any]]:
    times: Times = defaultdict(list)
    async with (
        WeightPublisher(path, SECRET, options.dtype, num_threads=options.threads, rules=RULES) as publisher,
        WeightReader(path, SECRET, rules=RULES) as reader,
        WeightReader(path, SECRET, rules=RULES) as waiter,
    ):
        await reader.newest()  # the relay is there
        before_bytes = private_bytes()
        first_s = await timed(publisher.publish(0, model))
        publisher_bytes = private_bytes() - before_bytes
        for version in range(1, WARM_UP):
            await publisher.publish(version, model)
            async with reader.lease() as weights:
                own = copies_of(weights.tensors)
        payload_bytes = sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in own.values()}.values())
        copies = Memcpy(own)
        copies.measure(times)
        for version in range(WARM_UP, WARM_UP + options.repeat):
            waiting = asyncio.create_task(stamped(waiter.wait_newer(version - 1, 60.0)))
            await asyncio.sleep(0)
            started_s = time.perf_counter()
            with stopped(times, "write"):
                written = await publisher.write(version, model)
            times["publish_stall"].append(written.stall_s)
            await publisher.complete(written)
            times["publish"].append(time.perf_counter() - started_s)
            times["visible"].append(await waiting - started_s)
            copies.measure(times)
            await _read(reader, own, times)
            copies.measure(times)
        status = await reader.status()
    facts = {
        "payload_mib": round(payload_bytes / 2**20, 1),
        "first_publish_ms": round(first_s * 1e3, 1),
        "relay_slots": status.num_slots,
        "relay_mib": round(status.slot_bytes / 2**20, 1),
        "publisher_extra_mib": round(publisher_bytes / 2**20, 1),
        "GiB_per_s": round(payload_bytes / 2**30 / statistics.median(times["publish_stall"]), 2),
    }
    return times, facts


def copies_of(tensors: Mapping[str, Tensor]) -> Model:
    """Tensors of one's own; what is tied stays tied."""
    own = {tensor.data_ptr(): tensor.clone() for tensor in tensors.values()}
    return {name: own[tensor.data_ptr()] for name, tensor in tensors.items()}


class Memcpy:
    """The same bytes from one warm place to another, in one piece and in pieces of the model's tensors."""

    def __init__(self, tensors: Model) -> None:
        unique = {t.data_ptr(): t for t in tensors.values()}.values()
        self._sources = [t.reshape(-1).view(torch.uint8).numpy() for t in unique]
        num_bytes = sum(source.nbytes for source in self._sources)
        self._source, self._target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
        bounds = np.cumsum([0, *(source.nbytes for source in self._sources)])
        self._targets = [self._target[a:b] for a, b in itertools.pairwise(bounds)]

    def measure(self, times: Times) -> None:
        """Once each way."""
        with stopped(times, "memcpy"):
            np.copyto(self._target, self._source)
        with stopped(times, "memcpy_by_tensor"):
            self._by_tensor()

    def _by_tensor(self) -> None:
        for target, source in zip(self._targets, self._sources, strict=True):
            np.copyto(target, source)


async def _read(reader: WeightReader, own: Model, times: Times) -> None:
    started_s = time.perf_counter()
    async with reader.lease() as weights:
        pairs = list({own[key].data_ptr(): (own[key], tensor) for key, tensor in weights.tensors.items()}.values())
        times["map"].append(time.perf_counter() - started_s)
        with stopped(times, "swap_in"):
            copy_all(pairs)
    times["read"].append(times["map"][-1] + times["swap_in"][-1])


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


async def timed(work: Awaitable[object]) -> float:
    """How long it takes to await it."""
    started_s = time.perf_counter()
    await work
    return time.perf_counter() - started_s


async def stamped(work: Awaitable[object]) -> float:
    """When it was done."""
    await work
    return time.perf_counter()


@contextlib.contextmanager
def stopped(times: Times, name: str) -> Iterator[None]:
    """How long the context takes, and under `name`_cpu how long this process computes meanwhile."""
    started_s, computed_s = time.perf_counter(), time.process_time()
    yield
    times[name].append(time.perf_counter() - started_s)
    times[f"{name}_cpu"].append(time.process_time() - computed_s)


def ratio(times: Times, one: str, copy: str, at: int) -> float:
    """The median over repetitions, each of which lies between two copies: the first two (`at` 0) or the last two."""
    around = [(before + after) / 2 for before, after in itertools.pairwise(times[copy])]
    pairs = zip(times[one], around[at::2], strict=True)
    return round(statistics.median(measured / copied for measured, copied in pairs), 2)


def private_bytes() -> int:
    """Memory of this process alone; 0 where /proc does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def machine() -> dict[str, Any]:
    """What the numbers were measured on, and how busy it was."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
    }
