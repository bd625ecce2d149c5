"""What relay and local peers say to each other, and how errors cross the socket.

Invariant: everything on the wire is one of these structs in msgpack; decoding builds values and runs nothing.

A connection begins with `Challenge`, `Proof`, `Welcome` (or `Refused`); then every `Call` gets one `Answer` with its
number, in any order. Descriptors travel with the first byte of the answer that announces them.
"""

from typing import Annotated

from msgspec import Meta, Struct, msgpack

from laminar.relay.manifest import Manifest
from laminar.schema.errors import (
    DeadlinePassed,
    Fenced,
    LaminarError,
    PeerLost,
    PortError,
    RunFailed,
    UserError,
    WeightsUnavailable,
)

PROTOCOL = 1
"""Peers of one run are installed together; a different number means a process of another installation."""

Nonce = Annotated[bytes, Meta(min_length=32, max_length=32)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]


class Challenge(Struct, frozen=True, tag=True):
    """The relay speaks first."""

    protocol: int
    nonce: Nonce


class Proof(Struct, frozen=True, tag=True):
    """The peer knows the secret, and wants to see that the relay does."""

    nonce: Nonce
    mac: bytes


class Welcome(Struct, frozen=True, tag=True):
    """The relay knows it too."""

    mac: bytes


class Refused(Struct, frozen=True, tag=True):
    """The connection ends here."""

    reason: str


class Newest(Struct, frozen=True, tag=True):
    """-> Version: the newest complete one."""


class WaitNewer(Struct, frozen=True, tag=True):
    """-> Version: newer than `than`, or the newest there is after `wait_s`."""

    than: int | None
    wait_s: Seconds


class TakeLease(Struct, frozen=True, tag=True):
    """-> Leased. `version` None: the newest."""

    version: int | None


class ReleaseLease(Struct, frozen=True, tag=True):
    """-> Done: the lease was held until now."""

    lease_id: Count


class Reserve(Struct, frozen=True, tag=True):
    """-> Reserved: memory for part `part` of `num_parts` of a version.

    `content` stands for these weights wherever they go; None: their checksum will.
    """

    version: int
    manifest: Manifest
    part: Count
    num_parts: Annotated[int, Meta(ge=1, le=1 << 20)]
    content: Annotated[int, Meta(ge=0)] | None = None


class Commit(Struct, frozen=True, tag=True):
    """-> Done, once all parts are committed and the version can be seen."""

    reservation_id: Count
    part: Count
    num_bytes: Count


class Abandon(Struct, frozen=True, tag=True):
    """-> Done: the version will not be seen, the writer writes no more."""

    reservation_id: Count


class GetStatus(Struct, frozen=True, tag=True):
    """-> RelayStatus."""


class Done(Struct, frozen=True, tag=True):
    """It was done."""


class Version(Struct, frozen=True, tag=True):
    """A complete version; None: there is none yet."""

    version: int | None


class Memory(Struct, frozen=True, kw_only=True):
    """A slot to map. Its descriptor comes along on the first mention in a connection, and never again.

    Maps of slots that are not in `live_slots` should be dropped: their memory is freed when nobody maps it.
    """

    slot_id: int
    num_bytes: int
    with_fd: bool
    writable: bool
    live_slots: tuple[int, ...]


class Leased(Struct, frozen=True, tag=True, kw_only=True):
    """A version that will not change or go away until the lease is released or the connection closes."""

    lease_id: int
    version: int
    manifest: Manifest
    checksum: int
    memory: Memory


class Reserved(Struct, frozen=True, tag=True, kw_only=True):
    """Memory to write to until `Commit` or `Abandon`."""

    reservation_id: int
    memory: Memory


class Failure(Struct, frozen=True, tag=True):
    """An error of the tree in `schema.errors`, by the name of its class."""

    error: str
    text: str


class VersionStatus(Struct, frozen=True, kw_only=True):
    """One complete version; `num_leases` counts readers that map it now."""

    version: int
    num_bytes: int
    age_s: float
    num_leases: int
    pinned: bool


class RelayStatus(Struct, frozen=True, tag=True, kw_only=True):
    """What one relay holds at this instant; `num_peers` counts open connections."""

    newest: int | None
    versions: tuple[VersionStatus, ...]
    incoming: tuple[int, ...]
    pinned: tuple[int, ...]
    num_slots: int
    num_free_slots: int
    slot_bytes: int
    num_peers: int


Request = Newest | WaitNewer | TakeLease | ReleaseLease | Reserve | Commit | Abandon | GetStatus
Reply = Done | Version | Leased | Reserved | RelayStatus | Failure


class Call(Struct, frozen=True, array_like=True):
    """`number` is the peer's, unique among its calls in flight."""

    number: Count
    request: Request


class Answer(Struct, frozen=True, array_like=True):
    """To the call of this number."""

    number: Count
    reply: Reply


encode = msgpack.Encoder().encode
decode_greeting = msgpack.Decoder(Challenge | Proof | Welcome | Refused).decode
decode_call = msgpack.Decoder(Call).decode
decode_answer = msgpack.Decoder(Answer).decode

ERRORS: dict[str, type[LaminarError]] = {
    error.__name__: error
    for error in (DeadlinePassed, Fenced, PeerLost, PortError, RunFailed, UserError, WeightsUnavailable)
}
"""Errors that a relay may answer with; others are its own fault and close the connection."""


def to_failure(error: LaminarError) -> Failure:
    """An error as a value."""
    return Failure(type(error).__name__, str(error))


def to_error(failure: Failure) -> LaminarError:
    """The same error on the other side; PortError if this side does not know it."""
    return ERRORS.get(failure.error, PortError)(failure.text)
