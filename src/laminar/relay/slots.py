"""Memory that holds one version at a time, is paid for once and used again and again.

Invariant: the memory has no name in any file system, so nothing is left behind however its owner dies; readers get
descriptors through which it cannot be written; its size never changes, so that no reader can fall off its end.

Pages are made when the slot is made: filling fresh pages costs 0.5 to 1 s per GiB, filling them again 0.1 s
(benchmarks/relay.py).
"""

import contextlib
import fcntl
import mmap
import os
import sys
import tempfile
from typing import Protocol

import xxhash

from laminar.relay.manifest import Manifest

PIECE_BYTES = 8 << 20
"""Filling and hashing go in pieces of about a millisecond, so that the event loop beside them gets its turn."""

POPULATE_PIECE_BYTES = 64 << 20
"""`madvise` holds the interpreter lock; page tables for so much take some 15 ms."""

MADV_POPULATE_WRITE = 23
"""Linux 5.14: set up page tables in one call instead of one fault per 4 KiB; Python 3.11 has no name for it."""


class SlotMemory(Protocol):
    """What the store needs of a slot."""

    slot_id: int
    num_bytes: int

    def view(self) -> memoryview:
        """All bytes, to read and to write."""
        ...

    def checksum(self, num_bytes: int) -> int:
        """xxh3_64 of the first bytes; takes 0.1 s per GiB."""
        ...

    def clear(self, manifest: Manifest) -> None:
        """Zero the padding of this layout."""
        ...

    def close(self) -> None:
        """Let go of the memory; who has mapped it keeps it until they unmap it."""
        ...


class SharedSlot:
    """A slot that other processes map. Close it, or leave it to the end of the process."""

    def __init__(self, slot_id: int, num_bytes: int) -> None:
        self.slot_id = slot_id
        self.num_bytes = whole_pages(num_bytes)
        self.write_fd, self.read_fd = _anonymous_memory(self.num_bytes)
        self._map: mmap.mmap | None = None

    def prefault(self) -> None:
        """Make all pages; blocks for about half a second per GiB. Raises OSError if there is no room."""
        zeros = memoryview(bytes(min(PIECE_BYTES, self.num_bytes)))
        position = 0
        while position < self.num_bytes:
            position += os.pwrite(self.write_fd, zeros[: self.num_bytes - position], position)

    def view(self) -> memoryview:
        if self._map is None:
            self._map = map_writable(self.write_fd, self.num_bytes)
        return memoryview(self._map)

    def checksum(self, num_bytes: int) -> int:
        return checksum(self.view(), num_bytes)

    def clear(self, manifest: Manifest) -> None:
        for start, end in manifest.gaps():
            os.pwrite(self.write_fd, bytes(end - start), start)

    def close(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            os.close(self.read_fd)
            self.write_fd = self.read_fd = -1
            self._map = None


class PrivateSlot:
    """A slot inside this process, for links that need no sockets."""

    def __init__(self, slot_id: int, num_bytes: int) -> None:
        self.slot_id = slot_id
        self.num_bytes = whole_pages(num_bytes)
        self.memory = mmap.mmap(-1, self.num_bytes)

    def view(self) -> memoryview:
        return memoryview(self.memory)

    def checksum(self, num_bytes: int) -> int:
        return checksum(self.view(), num_bytes)

    def clear(self, manifest: Manifest) -> None:
        for start, end in manifest.gaps():
            self.memory[start:end] = bytes(end - start)

    def close(self) -> None:
        """Nothing to do: the memory goes with the last tensor that shows it."""


def whole_pages(num_bytes: int) -> int:
    """At least one page: a version of empty tensors has no bytes, but memory of no bytes cannot be mapped."""
    return max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def map_readable(fd: int, num_bytes: int) -> mmap.mmap:
    """A map through which nothing can be written; keeps the memory, not the descriptor."""
    return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


def map_writable(fd: int, num_bytes: int) -> mmap.mmap:
    """A map for a writer."""
    return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def populate(memory: mmap.mmap) -> None:
    """Set up all page tables of a writable map (0.2 s per GiB), so that its first copy is as fast as the later ones."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # an older kernel: the first copy pays
            for start in range(0, len(memory), POPULATE_PIECE_BYTES):
                memory.madvise(MADV_POPULATE_WRITE, start, min(POPULATE_PIECE_BYTES, len(memory) - start))


def checksum(memory: mmap.mmap | memoryview, num_bytes: int) -> int:
    """xxh3_64 of the first bytes of a map."""
    digest = xxhash.xxh3_64()
    with memoryview(memory) as view:
        for start in range(0, num_bytes, PIECE_BYTES):
            digest.update(view[start : min(start + PIECE_BYTES, num_bytes)])
    return int(digest.intdigest())


def _anonymous_memory(num_bytes: int) -> tuple[int, int]:
    """Two descriptors of the same nameless memory: one to write, one to read."""
    if hasattr(os, "memfd_create"):
        write_fd = os.memfd_create("laminar-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        path = f"/proc/self/fd/{write_fd}"
    else:
        write_fd, path = tempfile.mkstemp(prefix="laminar-weights-")
    try:
        os.ftruncate(write_fd, num_bytes)
        read_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except BaseException:
        os.close(write_fd)
        raise
    finally:
        if not hasattr(os, "memfd_create"):
            os.unlink(path)
    if hasattr(os, "memfd_create"):
        fcntl.fcntl(write_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return write_fd, read_fd
