"""Where a run's relay is and what opens it: a file of the run folder that only its owner can read."""

import os
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from laminar.schema.errors import UserError

ADDRESS: Final = ".relay"
"""File of the run folder, there while the run lives."""


class RelayAddress(Struct, frozen=True, kw_only=True):
    """The only relay's socket for this machine's processes, or where the keeper of a chain of relays is."""

    secret: bytes
    socket_path: str = ""
    keeper: tuple[str, int] | None = None


def write_address(folder: Path, address: RelayAddress) -> None:
    """Tell whoever may read the folder as this user."""
    path = folder / ADDRESS
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(address))


def read_address(folder: Path) -> RelayAddress:
    """What was written. Raises `UserError` if no relay of this run is alive."""
    try:
        return msgspec.json.decode((folder / ADDRESS).read_bytes(), type=RelayAddress)
    except FileNotFoundError:
        raise UserError(
            f"{folder} is not a run that is alive; go on with laminar train --resume {folder}, or give --keeper "
            "HOST:PORT of a chain"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{folder / ADDRESS} cannot be read: {error}") from None
