"""Relay, publishers and readers as processes of their own, to be killed."""

import asyncio
import contextlib
import multiprocessing
import os
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from laminar.relay.publisher import WeightPublisher
from laminar.relay.reader import WeightReader
from laminar.relay.service import RelayService

T = TypeVar("T")

SECRET = b"integration"
KEEP_VERSIONS = 2

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "laminar.relay.publisher", "laminar.relay.reader", "laminar.relay.service"])


@contextlib.contextmanager
def process(target: Callable[..., None], *args: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """Run it in a process that cannot outlive the test; the connection leads to its last argument."""
    ours, theirs = CONTEXT.Pipe()
    child = CONTEXT.Process(target=target, args=(*args, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()
        child.close()
        ours.close()


def run_relay(path: Path, pipe: Connection) -> None:
    """Serve until killed; answers every message with its number of descriptors and its own memory in bytes."""

    async def main() -> None:
        service = RelayService(socket_path=path, secret=SECRET, keep_versions=KEEP_VERSIONS, keep_read_s=0.2)
        loop = asyncio.get_running_loop()
        loop.add_reader(pipe.fileno(), lambda: pipe.recv() and pipe.send((num_fds(), private_bytes())))
        await service.run()

    torch.set_num_threads(1)
    asyncio.run(main())


def run_publisher(path: Path, versions: range, num_tensors: int, num_elements: int, pipe: Connection) -> None:
    """Publish these versions, telling when each begins and is complete."""

    async def main() -> None:
        async with WeightPublisher(path, SECRET, "bfloat16") as publisher:
            for version in versions:
                tensors = weights(version, num_tensors, num_elements)
                pipe.send(("begins", version))
                await publisher.publish(version, tensors)
                pipe.send(("complete", version))

    torch.set_num_threads(1)
    asyncio.run(main())


def run_reader(path: Path, num_versions: int, last_version: int, pipe: Connection) -> None:
    """Read the newest version again and again until so many were seen and the last one is out; tell what was torn."""

    async def main() -> None:
        torn: list[str] = []
        seen: set[int] = set()
        num_reads = 0
        version = -1
        async with WeightReader(path, SECRET) as reader:
            while version < last_version or len(seen) < num_versions:
                if num_reads % 3 == 0:
                    await reader.wait_newer(version, 20.0)
                async with reader.lease() as held:
                    version = held.version
                    seen.add(version)
                    num_reads += 1
                    if num_reads % 5 == 0:
                        await asyncio.sleep(0.005)
                    if held.tensors.compute_checksum() != held.tensors.checksum:  # type: ignore[attr-defined]
                        torn.append(f"checksum of {version}")
                    torn += [f"{name} of {version}" for name, t in held.tensors.items() if not is_of(t, version)]
        pipe.send((torn, num_reads))

    torch.set_num_threads(1)
    asyncio.run(main())


def run_leaser(path: Path, pipe: Connection) -> None:
    """Lease the newest version and never let go."""

    async def main() -> None:
        async with WeightReader(path, SECRET) as reader, reader.lease() as held:
            pipe.send(held.version)
            await asyncio.sleep(3_600)

    asyncio.run(main())


async def eventually(look: Callable[[], Awaitable[T]], condition: Callable[[T], bool]) -> T:
    """What one sees once the condition holds; fails after five seconds."""
    async with asyncio.timeout(5.0):
        while not condition(seen := await look()):  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.001)
    return seen


def weights(version: int, num_tensors: int = 8, num_elements: int = 10_000) -> dict[str, torch.Tensor]:
    """Weights that show which version they belong to, exactly even in bfloat16."""
    tensors = {f"w{i}": torch.full((num_elements + i,), float(version % 256)) for i in range(num_tensors)}
    return tensors | {"version": torch.tensor(version)}


def is_of(tensor: torch.Tensor, version: int) -> bool:
    """Whether all of it belongs to this version."""
    expected = version if tensor.dtype == torch.int64 else version % 256
    return bool((tensor == expected).all())


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def private_bytes() -> int:
    """Memory of this process alone, without maps that it shares."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def shared_memory_files() -> list[str]:
    """Files in /dev/shm that could be ours; others use it too."""
    return [name for name in os.listdir("/dev/shm") if "laminar" in name]


def weight_segments() -> list[str]:
    """Memory of weights that this process still holds."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "laminar-weights" in os.readlink(f"/proc/self/fd/{fd}"):
                found.append(fd)
    return found
