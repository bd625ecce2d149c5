"""How much memory this process may still take: the machine's, or the container's if that is less.

Not done here: limits of single users (RLIMIT_AS) and NUMA nodes.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")

NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a huge number of bytes."""


def available_bytes(cgroups: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that can be taken without swapping and without the kernel killing somebody."""
    room = [int(psutil.virtual_memory().available)]
    for folder, limit, usage, stat in _memory_controllers(cgroups, membership):
        room += _rooms(cgroups, folder, limit, usage, stat)
    return max(0, min(room))


def gib(num_bytes: int) -> str:
    """Bytes as text for the user."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"


def _memory_controllers(cgroups: Path, membership: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Folder of this process in each hierarchy that counts memory, and the names of limit, usage and cache there."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield cgroups / path.lstrip("/"), "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            folder = cgroups / "memory" / path.lstrip("/")
            yield folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def _rooms(cgroups: Path, folder: Path, limit: str, usage: str, stat: str) -> list[int]:
    """What is left in this cgroup and in each of its parents that we can see."""
    rooms = []
    while folder == cgroups or cgroups in folder.parents:
        limit_bytes = _number(folder / limit)
        if limit_bytes is not None and limit_bytes < NO_LIMIT_BYTES:
            reclaimable = _stat(folder / "memory.stat", stat)
            rooms.append(limit_bytes - (_number(folder / usage) or 0) + reclaimable)
        folder = folder.parent
    return rooms


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file here, or the word "max"
        return None


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)
