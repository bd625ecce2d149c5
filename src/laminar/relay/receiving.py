"""A master's side towards learners on other machines: every rank brings its part of a version over its own connection.

Invariant: bytes that have arrived and were checked are never written again, whoever sends them; the version is seen
when all parts are there, and the learner is told when a second relay has it too. What arrived of a push that broke off
stays for its repetition, here and down the chain.
"""

import contextlib
import time

import xxhash

from laminar.relay.arrivals import Arrival, Board
from laminar.relay.chain_messages import (
    MAX_CHUNK_BYTES,
    Alive,
    Denied,
    GivenUp,
    Landed,
    Push,
    Runs,
    Same,
    Wanted,
    Written,
)
from laminar.relay.following import Inbox
from laminar.relay.frames import BadFrame
from laminar.relay.messages import to_failure
from laminar.relay.wire import Wire
from laminar.scheduling.chunks import num_covered, overlap
from laminar.schema.errors import Fenced, LaminarError, RunFailed

ALIVE_S = 1.0


def receive_push(wire: Wire, push: Push, board: Board, inbox: Inbox) -> None:
    """Take one rank's part. Blocks, for a thread of its own; raises `PeerLost`, `DeadlinePassed`, `BadFrame`."""
    try:
        arrival = inbox.arrive(push.key, push.manifest, None)
        if arrival is None:
            wire.send(Wanted(()))
            _take(wire, push, None, board, inbox)
        elif inbox.hold(arrival):  # another connection may end this version, but not give its memory away meanwhile
            try:
                wire.send(Wanted(arrival.missing()))
                _take(wire, push, arrival, board, inbox)
            finally:
                inbox.let_go(arrival)
        else:
            raise Fenced(f"version {push.key.version} was begun anew")
    except LaminarError as error:
        with contextlib.suppress(LaminarError):
            wire.send(Denied(to_failure(error)))
        raise


def _take(wire: Wire, push: Push, arrival: Arrival | None, board: Board, inbox: Inbox) -> None:
    while True:
        match wire.receive(object):
            case Runs() as runs:
                _receive_runs(wire, runs, arrival)
            case Same() as same:
                _compare(same, push, board, inbox)
            case Written():
                break
            case GivenUp():
                if arrival is not None:
                    inbox.withdraw(arrival)
                return
            case other:
                raise BadFrame(f"{type(other).__name__} was not due")
    if arrival is not None:
        _complete(wire, arrival, board, inbox)
    _until_passed_on(wire, push, board, inbox)
    wire.send(Landed())


def _receive_runs(wire: Wire, runs: Runs, arrival: Arrival | None) -> None:
    if arrival is None:
        raise BadFrame("bytes that were not wanted")
    missing, digest = arrival.missing(), xxhash.xxh3_64()
    if sum(end - start for start, end in runs.ranges) > MAX_CHUNK_BYTES:
        raise BadFrame("more bytes at once than are allowed")
    for start, end in runs.ranges:
        if not 0 <= start < end <= arrival.total_bytes or num_covered(overlap(missing, (start, end))) != end - start:
            raise BadFrame(f"bytes {start} to {end} of {arrival.total_bytes} are not missing")
    for start, end in runs.ranges:
        view = arrival.memory[start:end]
        wire.receive_into(view)
        digest.update(view)
    if digest.intdigest() != runs.digest:
        raise BadFrame("bytes that do not agree with their digest")
    arrival.landed(runs.ranges)


def _compare(same: Same, push: Push, board: Board, inbox: Inbox) -> None:
    """Raise `RunFailed` if the learner has other weights under the key of a version that is held."""
    held = board.get(push.key.version)
    if held is None or held.key != push.key or not inbox.hold(held):
        raise Fenced(f"version {push.key.version} was forgotten meanwhile")
    try:
        digest = xxhash.xxh3_64()
        for start, end in same.ranges:
            digest.update(held.memory[start:end])
    finally:
        inbox.let_go(held)
    if digest.intdigest() != same.digest:
        raise RunFailed(
            f"version {push.key.version} is held already, with other weights: versions never change; "
            "a learner that goes back must begin a new life, or rewind the relay first"
        )


def _complete(wire: Wire, arrival: Arrival, board: Board, inbox: Inbox) -> None:
    """Wait for the other ranks' parts; whoever sees the last byte in makes the version visible."""
    while True:
        with board.changed:
            if arrival.is_whole:
                return
            if arrival.is_dropped:
                raise Fenced(f"version {arrival.key.version} was begun anew or forgotten while it came in")
            is_last = not arrival.missing() and arrival.claim()
            is_news = is_last or board.changed.wait(ALIVE_S)
        if is_last:
            inbox.arrived(arrival, arrival.checksum())
            return
        if not is_news:
            wire.send(Alive())


def _until_passed_on(wire: Wire, push: Push, board: Board, inbox: Inbox) -> None:
    """Wait for the next relay to have the version too, but no longer than the learner wants, nor if there is none."""
    give_up_s = time.monotonic() + push.second_s
    while (left_s := give_up_s - time.monotonic()) > 0 and inbox.has_next():
        with board.changed:
            arrival = board.get(push.key.version)
            if arrival is None or arrival.key != push.key or arrival.is_passed_on:
                return
            is_news = board.changed.wait(min(ALIVE_S, left_s))
        if not is_news:
            wire.send(Alive())
