"""A run's own small process on each machine of a Ray cluster: it checks the run folder, and ends what is frozen.

Invariant: when it ends, however it ends, all processes of the run on its machine end (its guardian sees to that), and
the folder of their sockets is removed. So the loss of the agent is the loss of the machine.
"""

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from msgspec import Struct

from laminar.cluster.guardian import kill_marked
from laminar.cluster.shell import Place
from laminar.schema.errors import UserError

MARKER: Final = ".machines"
"""File of the run folder that every machine must see, with the same words in it."""

SEE_S: Final = 10.0
"""A file that was just written may show on another machine a few seconds later (NFS caches that it was not there)."""

SEE_AGAIN_S: Final = 0.2


class MachineFacts(Struct, frozen=True, kw_only=True):
    """What the launcher must know of a machine."""

    sockets: Path


class MachineAgent:
    """Fulfils `cluster.shell.Service`; `scratch` is the folder of this machine."""

    def __init__(self, place: Place, scratch: Path, *, see_s: float = SEE_S) -> None:
        self._place = place
        self._see_s = see_s
        self._scratch = scratch

    async def run(self) -> None:
        """Be there; ends: never, cancelled with the run."""
        await asyncio.get_running_loop().create_future()

    async def look(self) -> MachineFacts:
        """Raises `UserError` if the run folder is not the same one here as where the launcher is."""
        give_up_s = asyncio.get_running_loop().time() + self._see_s
        while not _sees_marker(self._place):
            if asyncio.get_running_loop().time() > give_up_s:
                raise UserError(
                    f"it does not see the run folder {self._place.folder} as the launcher does; give an --out folder "
                    "on a file system that all machines of the Ray cluster share, under the same path"
                )
            await asyncio.sleep(SEE_AGAIN_S)
        return MachineFacts(sockets=self._scratch)

    async def kill(self, pid: int) -> None:
        """End a process of the run, even if it is frozen; any other is left alone."""
        await asyncio.to_thread(kill_marked, pid, str(self._scratch))


@contextmanager
def marker(place: Place) -> Iterator[None]:
    """What all machines must see in the run folder, for the time of the context."""
    path = place.folder / MARKER
    path.write_text(_words(place), encoding="ascii")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _sees_marker(place: Place) -> bool:
    try:
        return (place.folder / MARKER).read_text(encoding="ascii") == _words(place)
    except (OSError, ValueError):
        return False


def _words(place: Place) -> str:
    """New with every start of the run, and no secret."""
    return hashlib.sha256(b"marker of the run folder" + place.secret).hexdigest()
