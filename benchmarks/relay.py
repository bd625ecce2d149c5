"""How long weights take from the learner to a replica over one machine's relay; prints one JSON line.

    python benchmarks/relay.py                # a 1 GiB model of 302 tensors, and the model of recipes/gcd
    python benchmarks/relay.py --mib 4096     # needs about seven times as much memory
    GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x100000 python benchmarks/relay.py

Times are medians in milliseconds over interleaved repetitions; `memcpy` is one numpy copy of as many bytes into warm
memory, `memcpy_by_tensor` the same in pieces of the model's tensors. `publish_stall` is how long the learner's tensors
were being read, `visible` how long after the call to `publish` a waiting reader has the version, `swap_in` the copy
from a lease into tensors of one's own, `map` what it takes to have all tensors of a lease. The relay is another
process.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from laminar.relay.client import ClientRules
from laminar.relay.publisher import WeightPublisher
from laminar.relay.reader import WeightReader
from laminar.relay.tensors import copy_all

SECRET = b"benchmark"
RULES = ClientRules(connect_s=60.0)

RELAY = f"""
import asyncio, pathlib, sys
from laminar.relay.service import RelayService
asyncio.run(RelayService(socket_path=pathlib.Path(sys.argv[1]), secret={SECRET!r}, keep_versions=2).run())
"""
Times = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the large model")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="copy threads of the publisher")
    parser.add_argument("--dtype", default="keep", choices=["keep", "bfloat16"], help="cast to this on the way")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {f"{options.mib} MiB": large_model(options.mib << 20, options.dtype), "recipes/gcd": gcd_model()}
    rows = [measure(name, model, options) for name, model in models.items()]
    print(json.dumps({"benchmark": "relay", "machine": machine(), "dtype": options.dtype, "rows": rows}))


def large_model(num_bytes: int, dtype: str) -> dict[str, torch.Tensor]:
    """25 layers of 12 tensors in the proportions of a Llama, an embedding and a norm."""
    make = torch.float32 if dtype == "bfloat16" else torch.bfloat16
    parts = {"q": 0.1, "k": 0.03, "v": 0.03, "o": 0.1, "gate": 0.245, "up": 0.245, "down": 0.245}
    parts |= dict.fromkeys(("norm1", "norm2", "q_bias", "k_bias", "v_bias"), 1e-05)
    num_elements = num_bytes // make.itemsize
    sizes = {
        f"layers.{n}.{name}": int(part * 0.88 / 25 * num_elements) for n in range(25) for name, part in parts.items()
    }
    sizes |= {"embed": int(0.12 * num_elements), "norm": 2_048}
    return {name: torch.full((size,), 0.5, dtype=make) for name, size in sizes.items()}


def gcd_model() -> dict[str, torch.Tensor]:
    """The shapes of recipes/gcd: 128 wide, 3 layers, float32, tied embeddings."""
    layer = {"q": (128, 128), "k": (64, 128), "v": (64, 128), "o": (128, 128)}
    layer |= {"gate": (256, 128), "up": (256, 128), "down": (128, 256), "norm1": (128,), "norm2": (128,)}
    tensors = {f"layers.{n}.{name}": torch.randn(shape) for n in range(3) for name, shape in layer.items()}
    tensors |= {"embed": torch.randn(64, 128), "norm": torch.randn(128)}
    return tensors | {"head": tensors["embed"]}


def measure(name: str, model: dict[str, torch.Tensor], options: argparse.Namespace) -> dict[str, object]:
    """One row: run a relay, publish and read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "relay.sock"
        relay = subprocess.Popen([sys.executable, "-c", RELAY, str(path)])
        try:
            times, facts = asyncio.run(measure_links(path, model, options))
        finally:
            relay.kill()
            relay.wait()
    measure_file(model, times)
    medians = {key: round(statistics.median(values) * 1e3, 3) for key, values in sorted(times.items())}
    ratios = {
        "publish_stall / memcpy": ratio(times, "publish_stall", "memcpy"),
        "publish_stall / memcpy_by_tensor": ratio(times, "publish_stall", "memcpy_by_tensor"),
        "swap_in / memcpy": ratio(times, "swap_in", "memcpy"),
        "swap_in / memcpy_by_tensor": ratio(times, "swap_in", "memcpy_by_tensor"),
    }
    return {"model": name, "tensors": len(model), **facts, "ms": medians, "ratios": ratios}


async def measure_links(
    path: Path, model: dict[str, torch.Tensor], options: argparse.Namespace
) -> tuple[Times, dict[str, object]]:
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
        for version in range(1, 4):  # every slot is mapped and warm
            await publisher.publish(version, model)
            async with reader.lease() as weights:
                own = {key: tensor.clone() for key, tensor in weights.tensors.items()}
        payload_bytes = sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in own.values()}.values())
        copies = Memcpy(own)
        for version in range(4, 4 + options.repeat):
            waiting = asyncio.create_task(stamped(waiter.wait_newer(version - 1, 60.0)))
            await asyncio.sleep(0)
            copies.measure(times)
            started_s = time.perf_counter()
            times["publish_stall"].append(await publisher.publish(version, model))
            times["publish"].append(time.perf_counter() - started_s)
            times["visible"].append(await waiting - started_s)
            await read(reader, own, times)
        status = await reader.status()
    facts: dict[str, object] = {
        "payload_mib": round(payload_bytes / 2**20, 1),
        "first_publish_ms": round(first_s * 1e3, 1),
        "relay_slots": status.num_slots,
        "relay_mib": round(status.slot_bytes / 2**20, 1),
        "publisher_extra_mib": round(publisher_bytes / 2**20, 1),
        "GiB_per_s": round(payload_bytes / 2**30 / statistics.median(times["publish_stall"]), 2),
    }
    return times, facts


class Memcpy:
    """The same bytes from one warm place to another, in one piece and in pieces of the model's tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._sources = [
            t.reshape(-1).view(torch.uint8).numpy() for t in {t.data_ptr(): t for t in tensors.values()}.values()
        ]
        num_bytes = sum(source.nbytes for source in self._sources)
        self._source, self._target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
        bounds = np.cumsum([0, *(source.nbytes for source in self._sources)])
        self._targets = [self._target[a:b] for a, b in itertools.pairwise(bounds)]

    def measure(self, times: Times) -> None:
        times["memcpy"].append(seconds(lambda: np.copyto(self._target, self._source)))
        times["memcpy_by_tensor"].append(seconds(self._by_tensor))

    def _by_tensor(self) -> None:
        for target, source in zip(self._targets, self._sources, strict=True):
            np.copyto(target, source)


async def read(reader: WeightReader, own: dict[str, torch.Tensor], times: Times) -> None:
    started_s = time.perf_counter()
    async with reader.lease() as weights:
        pairs = [(own[key], tensor) for key, tensor in weights.tensors.items()]
        times["map"].append(time.perf_counter() - started_s)
        times["swap_in"].append(seconds(lambda: copy_all(pairs)))


def measure_file(model: dict[str, torch.Tensor], times: Times) -> None:
    """What it replaces: a file in memory, written by one process and read by the other."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "weights.pt"
        for _ in range(3):
            times["torch_save"].append(seconds(lambda: torch.save(model, path)))
            times["torch_load"].append(seconds(lambda: torch.load(path)))


def seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


async def timed(work) -> float:
    started_s = time.perf_counter()
    await work
    return time.perf_counter() - started_s


async def stamped(work) -> float:
    await work
    return time.perf_counter()


def ratio(times: Times, one: str, other: str) -> float:
    return round(statistics.median(times[one]) / statistics.median(times[other]), 2)


def private_bytes() -> int:
    """Memory of this process alone; 0 where /proc does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def machine() -> dict[str, object]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "tunables": os.environ.get("GLIBC_TUNABLES", ""),
    }


if __name__ == "__main__":
    main()
