"""What relays, their keeper and learners on other machines say to each other over TCP.

Invariant: everything is one of these structs in msgpack behind a length of four bytes; `Chunk` and `Runs` are followed
by as many bytes of weights as they say. Decoding builds values and runs nothing.

A connection begins like a local one (`Challenge`, `Proof`, `Welcome`). The first message then says what it is for:
`Follow` (a relay wants to be fed), `Push` (a learner brings a version), `Join` (a relay takes part; keeper only) or
`Watch` (somebody wants to know the chain; keeper only).

Feeding:   Follow -> Accepted -> { Begin -> Want -> Chunk... -> Whole -> Taken | Dropped } | Rewound | Alive
Pushing:   Push -> Wanted -> Runs... (or Same..., if nothing is wanted) -> Written -> Landed
"""

from typing import Annotated

from msgspec import Meta, Struct, msgpack

from laminar.relay.manifest import Manifest
from laminar.relay.messages import Count, Failure
from laminar.scheduling.membership import Chain, Member

MAX_CHUNK_BYTES = 64 << 20
"""Nobody is asked to take more at once; `scheduling.chain` chooses far less."""

MAX_CHUNKS = 1 << 20
"""Pieces of one version, so that a mad sender cannot fill the memory with books about them."""

MAX_RUNS = 1024
"""Pieces of one `Runs`; as many as the kernel scatters in one call."""

MAX_SECOND_S = 60.0
"""A learner waits no longer for a second relay."""

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Digest = Annotated[int, Meta(ge=0)]
PayloadBytes = Annotated[int, Meta(ge=0, le=MAX_CHUNK_BYTES)]
Range = tuple[Count, Count]


class VersionKey(Struct, frozen=True, array_like=True):
    """A version and which weights it means: after a learner went back, the same number means others."""

    version: int
    content: Digest


class Follow(Struct, frozen=True, tag=True, kw_only=True):
    """-> Accepted or Denied. The sender is the next relay in the chain of this epoch."""

    relay_id: Name
    epoch: Count
    link: Name
    held: tuple[VersionKey, ...]


class Accepted(Struct, frozen=True, tag=True):
    """The link stands."""


class Denied(Struct, frozen=True, tag=True):
    """Not now, or never: an error of the tree in `schema.errors`. The connection ends here."""

    failure: Failure


class Begin(Struct, frozen=True, tag=True, kw_only=True):
    """-> Want. A version comes, in chunks of this size. `checksum` is the xxh3_64 over all its bytes; None while the
    learner is still pushing it."""

    epoch: Count
    key: VersionKey
    manifest: Manifest
    chunk_bytes: Annotated[int, Meta(ge=64, le=MAX_CHUNK_BYTES)]
    checksum: Digest | None = None


class Want(Struct, frozen=True, tag=True, kw_only=True):
    """What is missing, which versions are here to apply changes to, and where a one-sided link may write."""

    key: VersionKey
    missing: tuple[Range, ...]
    bases: tuple[VersionKey, ...]
    memory: bytes = b""


class Chunk(Struct, frozen=True, tag=True, kw_only=True):
    """One chunk; `digest` is the xxh3_64 of its bytes as they will lie in memory, whatever form they travel in.

    `inline` bytes follow. With a `base` they are the changes from that version's chunk; without one they are the chunk
    itself, which a one-sided link has put into memory already, so that 0 follow.
    """

    index: Count
    inline: PayloadBytes
    digest: Digest
    base: int | None = None


class Whole(Struct, frozen=True, tag=True):
    """All chunks of the version were sent; `checksum` is the xxh3_64 over all its bytes."""

    key: VersionKey
    checksum: Digest


class Taken(Struct, frozen=True, tag=True):
    """The answer to `Whole`: the version can be seen here."""

    key: VersionKey


class Dropped(Struct, frozen=True, tag=True):
    """The rest of this version does not come: a newer one does."""

    key: VersionKey


class Rewound(Struct, frozen=True, tag=True):
    """The learner went back: forget all versions after this one."""

    version: int


class Alive(Struct, frozen=True, tag=True):
    """Nothing new; the sender is not frozen."""


class Push(Struct, frozen=True, tag=True, kw_only=True):
    """-> Wanted or Denied. A learner's rank brings its part of a version; again after a failure, under the same key.

    `second_s`: how long it waits at the end for a second relay to have the version, so that no death takes it along.
    """

    epoch: Count
    key: VersionKey
    manifest: Manifest
    part: Count
    num_parts: Annotated[int, Meta(ge=1, le=1 << 20)]
    second_s: Annotated[float, Meta(ge=0, le=MAX_SECOND_S)] = 0.0


class Wanted(Struct, frozen=True, tag=True):
    """What is missing of the whole version; empty if it is held already."""

    missing: tuple[Range, ...]


class Runs(Struct, frozen=True, tag=True):
    """Bytes for these ranges follow, one after the other; `digest` is their xxh3_64."""

    ranges: Annotated[tuple[Range, ...], Meta(min_length=1, max_length=MAX_RUNS)]
    digest: Digest


class Same(Struct, frozen=True, tag=True):
    """The version is held already: the learner's bytes of these ranges have this digest, and so must those held."""

    ranges: Annotated[tuple[Range, ...], Meta(min_length=1, max_length=MAX_RUNS)]
    digest: Digest


class Written(Struct, frozen=True, tag=True):
    """-> Landed or Denied. This rank has sent all that was wanted of its part."""


class GivenUp(Struct, frozen=True, tag=True):
    """The learner cannot bring the rest: forget what came of it."""


class Landed(Struct, frozen=True, tag=True):
    """All parts are there and the version can be seen, by readers of two relays if that did not take too long."""


class Join(Struct, frozen=True, tag=True, kw_only=True):
    """A relay takes part. The keeper answers with `Topology` now and after every change; the relay sends `Beat`s."""

    member: Member
    epoch: Count
    newest: int | None = None


class Beat(Struct, frozen=True, tag=True, kw_only=True):
    """What a relay holds, how far it is with what comes, and what its link to its predecessor takes."""

    newest: int | None
    coming: int | None
    coming_bytes: Count
    bytes_per_s: Annotated[float, Meta(ge=0)]
    """While it received the last complete version; 0 if it has received none over this link."""
    startup_s: Annotated[float, Meta(ge=0)]
    held_bytes: Count
    epoch: Count


class Watch(Struct, frozen=True, tag=True):
    """-> Topology, now and after every change."""


class Look(Struct, frozen=True, tag=True):
    """-> ChainStatus, once."""


class Topology(Struct, frozen=True, tag=True, kw_only=True):
    """The chain. The master cuts versions by the slowest hop: `startup_s` and `bytes_per_s`, 0 if unknown."""

    chain: Chain
    startup_s: float = 0.0
    bytes_per_s: float = 0.0


class RelayReport(Struct, frozen=True, kw_only=True):
    """One relay as the keeper knows it; the chain's order is theirs. `silent_s` is the age of the last beat."""

    member: Member
    beat: Beat | None
    silent_s: float


class ChainStatus(Struct, frozen=True, tag=True):
    """The whole chain at one instant."""

    epoch: int
    relays: tuple[RelayReport, ...]


Message = (
    Follow | Accepted | Denied | Begin | Want | Chunk | Whole | Taken | Dropped | Rewound | Alive
    | Push | Wanted | Runs | Same | Written | GivenUp | Landed | Join | Beat | Watch | Look | Topology | ChainStatus
)  # fmt: skip

decode_message = msgpack.Decoder(Message).decode
