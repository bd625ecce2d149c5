"""The learner's end where the master relay is on another machine, or may move to one.

Invariants: a version is pushed under one key however often it is tried, so that only what is missing is sent again; the
learner's tensors are read only inside `publish`; who leads is what the keeper said last.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor

from laminar.relay.chain_messages import (
    MAX_RUNS,
    Alive,
    Denied,
    GivenUp,
    Landed,
    Push,
    Runs,
    Same,
    VersionKey,
    Wanted,
)
from laminar.relay.chain_messages import Written as AllWritten
from laminar.relay.frames import BadFrame
from laminar.relay.hops import dial
from laminar.relay.keeper import ChainWatch
from laminar.relay.manifest import Manifest, ManifestError
from laminar.relay.messages import to_error
from laminar.relay.parcels import Packer, Parcel, Part, Piece, parcel_of
from laminar.relay.publisher import WeightPublisher, Written
from laminar.relay.threads import run_until_stopped
from laminar.relay.wire import Wire
from laminar.scheduling.chunks import Range, Ranges, overlap
from laminar.scheduling.membership import Member
from laminar.schema.errors import DeadlinePassed, Fenced, PeerLost, PortError

RUNS_BYTES = 1 << 20
"""So much is cast, hashed and sent at a time: it stays in the cache, and a lost connection wastes no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRules:
    """Deadlines of a learner: for one connection on which nothing moves, and for a version over all tries."""

    connect_s: float = 5.0
    idle_s: float = 5.0
    publish_s: float = 120.0
    epoch_wait_s: float = 0.5
    """After a failed try the keeper usually names a new master within this time; else the old one is tried again."""
    second_s: float = 0.5
    """A publish waits so long for a second relay to have the version too, or the master's death could take it along.
    The chain is a chunk behind the learner, so this is milliseconds unless the second relay is in trouble."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A version that has left the learner; `written` is what is to be completed, None if it can be seen already."""

    stall_s: float
    written: Written | None


class ChainPublisher:
    """Fulfils `trainer.ports.WeightSink` for a chain of relays: publishes to whoever leads it.

    If the master is relay `local_id`, weights go through `local` into its memory; else every rank pushes its own part
    over TCP, all at once. `life` must be the same for all ranks of one life of the learner, and new after it went back.
    """

    def __init__(
        self,
        watch: ChainWatch,
        secret: bytes,
        dtype: str = "keep",
        *,
        local: WeightPublisher | None = None,
        local_id: str | None = None,
        part: Part | None = None,
        life: bytes | None = None,
        rules: PushRules | None = None,
    ) -> None:
        self._watch = watch
        self._secret = secret
        self._local = local
        self._local_id = local_id
        self._part = part or Part()
        self._packer = Packer(dtype, self._part)
        self._life = life or secrets.token_bytes(16)
        self._rules = rules or PushRules()
        self.taken_by: str | None = None
        """The relay that took the last version."""

    async def newest(self) -> int | None:
        """Newest complete version that the master holds; None if it holds none. Raises `PeerLost` if nobody leads."""
        return await self._watch.newest()

    async def publish(self, version: int, tensors: Mapping[str, Any]) -> float:
        """Bring the weights to the master and wait until they can be seen there; returns the seconds it took.

        Idempotent, also across masters. Raises `DeadlinePassed` if no master took them in time, `RunFailed` if they
        cannot be taken at all.
        """
        return await self._publish(version, self._packer.pack(tensors))

    async def write(self, version: int, tensors: Mapping[str, Any]) -> Left:
        """Only the first half of `publish`, if the bytes go into shared memory; a push over the network is answered
        milliseconds after its last byte, and nothing of it is left to wait for."""
        started_s = time.monotonic()
        written = await self._bring_to_master(version, self._packer.pack(tensors), completely=False)
        return Left(stall_s=time.monotonic() - started_s, written=written)

    async def complete(self, left: Left) -> None:
        """The second half. A master that is lost meanwhile may take the version with it."""
        if left.written is not None and self._local is not None:
            await self._local.complete(left.written)

    async def publish_pieces(self, version: int, manifest: Manifest, pieces: Sequence[Piece]) -> float:
        """The same for the blocks that this rank owns; all ranks give the same manifest, and together all blocks."""
        return await self._publish(version, parcel_of(manifest, pieces))

    def key(self, version: int) -> VersionKey:
        """What this life of the learner calls its weights of this version."""
        return VersionKey(version, int(xxhash.xxh3_64_intdigest(self._life + version.to_bytes(8, "big", signed=True))))

    async def _publish(self, version: int, parcel: Parcel) -> float:
        started_s = time.monotonic()
        await self._bring_to_master(version, parcel, completely=True)
        return time.monotonic() - started_s

    async def _bring_to_master(self, version: int, parcel: Parcel, *, completely: bool) -> Written | None:
        """Try one master after the other. Returns what is to be completed, None if the version can be seen."""
        started_s, epoch = time.monotonic(), -1
        refusal = "there is no master"
        while (left_s := started_s + self._rules.publish_s - time.monotonic()) > 0:
            led = await self._watch.master(epoch, min(left_s, self._rules.epoch_wait_s))
            if led is None:
                continue
            master, epoch = led
            try:
                written = await self._bring_while_it_leads(master, epoch, version, parcel, completely)
            except (PeerLost, DeadlinePassed, Fenced, BadFrame) as error:
                refusal = f"{master.relay_id}: {error}"
            else:
                self.taken_by = master.relay_id
                return written
        raise DeadlinePassed(f"no relay took version {version} within {self._rules.publish_s:g} s; last: {refusal}")

    async def _bring_while_it_leads(self, master: Member, epoch: int, *what: Any) -> Written | None:
        """Raises `Fenced` as soon as another relay leads: a frozen one would not say so itself."""
        bringing = asyncio.ensure_future(self._bring(master, epoch, *what))
        deposed = asyncio.ensure_future(self._watch.until_deposed(master.relay_id))
        try:
            await asyncio.wait([bringing, deposed], return_when=asyncio.FIRST_COMPLETED)
            if bringing.done():
                return await bringing
            raise Fenced(f"{master.relay_id} leads no more")
        finally:
            for task in (bringing, deposed):
                task.cancel()
            await asyncio.gather(bringing, deposed, return_exceptions=True)

    async def _bring(
        self, master: Member, epoch: int, version: int, parcel: Parcel, completely: bool
    ) -> Written | None:
        key = self.key(version)
        if self._local is not None and master.relay_id == self._local_id:
            written = await self._local.write_parcel(version, parcel, key.content)
            if not completely:
                return written
            await self._local.complete(written)
            return None
        frames = await dial(master.host, master.port, self._secret, self._rules.connect_s)
        wire = Wire(frames.hand_over(), self._rules.idle_s)
        request = Push(
            epoch=epoch,
            key=key,
            manifest=parcel.plan.manifest,
            part=self._part.index,
            num_parts=self._part.count,
            second_s=self._rules.second_s,
        )
        try:
            await run_until_stopped(partial(_push, wire, request, parcel.pieces), wire.shut_down)
        finally:
            wire.close()
        return None


def _push(wire: Wire, request: Push, pieces: list[Piece]) -> None:
    """In a thread: send what is wanted, and wait until the version can be seen."""
    wire.send(request)
    wanted = _answer(wire, Wanted)
    try:
        _send(wire, request.manifest, pieces, wanted.missing)
    except PortError:
        raise
    except BaseException:
        with contextlib.suppress(PortError):
            wire.send(GivenUp())
        raise
    wire.send(AllWritten())
    _answer(wire, Landed)


def _send(wire: Wire, manifest: Manifest, pieces: list[Piece], missing: Ranges) -> None:
    for runs, data in packed(manifest, pieces, missing):
        wire.send(Runs(runs, int(xxhash.xxh3_64_intdigest(data))), [data])
    if not missing:
        for runs, data in packed(manifest, pieces, ((0, manifest.total_bytes),)):
            wire.send(Same(runs, int(xxhash.xxh3_64_intdigest(data))))


def _answer(wire: Wire, kind: Any) -> Any:
    while isinstance(message := wire.receive(object), Alive):
        pass
    if isinstance(message, Denied):
        raise to_error(message.failure)
    if not isinstance(message, kind):
        raise BadFrame(f"{type(message).__name__} where {kind.__name__} was due")
    return message


def packed(manifest: Manifest, pieces: Iterable[Piece], missing: Ranges) -> Iterator[tuple[Ranges, memoryview]]:
    """The missing bytes of these pieces, cast and gathered into messages of about `RUNS_BYTES`."""
    ranges: list[Range] = []
    parts: list[Tensor] = []
    size = 0
    for place, data in _missing_bytes(manifest, pieces, missing):
        ranges.append(place)
        parts.append(data)
        size += len(data)
        if size >= RUNS_BYTES or len(ranges) == MAX_RUNS:
            yield tuple(ranges), _joined(parts)
            ranges, parts, size = [], [], 0
    if ranges:
        yield tuple(ranges), _joined(parts)


def _missing_bytes(manifest: Manifest, pieces: Iterable[Piece], missing: Ranges) -> Iterator[tuple[Range, Tensor]]:
    entries = {entry.name: entry for entry in manifest.entries}
    for piece in pieces:
        if piece.name not in entries:
            raise ManifestError(f"{piece.name} is not in the manifest")
        entry, position = entries[piece.name], 0
        flat: Tensor | None = None
        for start, end in entry.runs(piece.start, tuple(piece.data.shape)):
            for low, high in overlap(missing, (start, end)):
                if flat is None:
                    flat = _as_bytes(piece.data, entry.dtype)
                for at in range(low, high, RUNS_BYTES):
                    until = min(at + RUNS_BYTES, high)
                    yield (at, until), flat[position + at - start : position + until - start]
            position += end - start


def _as_bytes(data: Tensor, dtype: str) -> Tensor:
    cast = data.detach().to(device="cpu", dtype=getattr(torch, dtype))
    return cast.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _joined(parts: list[Tensor]) -> memoryview:
    data = parts[0] if len(parts) == 1 else torch.cat(parts)
    return memoryview(data.numpy().data)
