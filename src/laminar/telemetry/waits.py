"""Who waits for what, and for whom: the first question when a run stands still.

Invariant: only waits longer than ANNOUNCE_AFTER_S are announced, while they go on, and each announced one is ended
unless its process dies; then the start of its successor ends it.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct

from laminar.telemetry.events import Events
from laminar.telemetry.vocabulary import (
    Fact,
    ReplicaLost,
    ReplicaStarted,
    Resumed,
    RunFinished,
    RunStarted,
    ServiceLost,
    ServiceStarted,
    WaitEnded,
    WaitStarted,
)

ANNOUNCE_AFTER_S = 1.0
"""Shorter waits are the normal course of things and would only fill the event file."""

MAX_CHAIN = 20
"""Longest chain looked for; there are not so many kinds of services."""


class Waits:
    """The waits of one service; `source` is its name, as in its events."""

    def __init__(self, source: str, events: Events, announce_after_s: float = ANNOUNCE_AFTER_S) -> None:
        self._source = source
        self._events = events
        self._announce_after_s = announce_after_s
        self._num_waits = 0

    @contextmanager
    def on(self, what: str, *, of: str | Sequence[str] = (), deadline_s: float | None = None) -> Iterator[None]:
        """Wait inside this context for `what`, which one of the sources `of` must bring about (needs an event loop).

        `of` names sources (`data`, `replica-1`), or a role: `replica` stands for any of the replicas.
        """
        import asyncio  # on use: reading events needs no event loop

        loop = asyncio.get_running_loop()
        self._num_waits += 1
        wait_id = f"{self._source}:{self._num_waits}"
        began_s = loop.time()
        announced = False

        def announce() -> None:
            nonlocal announced
            announced = True
            self._events.emit(
                "wait_started",
                wait_id=wait_id,
                waiter=self._source,
                what=what,
                of=[of] if isinstance(of, str) else list(of),
                deadline_s=deadline_s,
                waited_s=round(loop.time() - began_s, 3),
            )

        timer = loop.call_later(self._announce_after_s, announce)
        try:
            yield
        except GeneratorExit:  # dropped with its owner, as in a crash: nobody is there to tell
            announced = False
            raise
        finally:
            timer.cancel()
            if announced:
                waited_s = round(loop.time() - began_s, 3)
                self._events.emit("wait_ended", wait_id=wait_id, waiter=self._source, waited_s=waited_s)


class Wait(Struct, frozen=True, kw_only=True):
    """A wait that goes on; `since` and `deadline` are wall seconds."""

    wait_id: str
    waiter: str
    what: str
    of: tuple[str, ...]
    since: float
    deadline: float


def fold_wait(waits: dict[str, Wait], fact: Fact) -> None:
    """Bring the current waits, by id, up to date with one more event."""
    match fact:
        case WaitStarted():
            since = fact.t - fact.waited_s
            waits[fact.wait_id] = Wait(
                wait_id=fact.wait_id,
                waiter=_without_life(fact.waiter),
                what=fact.what,
                of=tuple(fact.of),
                since=since,
                deadline=math.inf if fact.deadline_s is None else since + fact.deadline_s,
            )
        case WaitEnded():
            waits.pop(fact.wait_id, None)
        case ReplicaLost(replica_id=waiter) | ReplicaStarted(replica_id=waiter):
            _forget_waiter(waits, waiter)
        case ServiceLost(service=waiter) | ServiceStarted(service=waiter):
            _forget_waiter(waits, waiter)
        case RunStarted() | Resumed() | RunFinished():
            waits.clear()


def current_waits(facts: Iterable[Fact]) -> list[Wait]:
    """Waits that have begun and not ended, the oldest first."""
    waits: dict[str, Wait] = {}
    for fact in facts:
        fold_wait(waits, fact)
    return sorted(waits.values(), key=lambda wait: wait.since)


def longest_chain(waits: Iterable[Wait]) -> list[Wait]:
    """The longest chain in which each one waits for the next; of equally long ones, the one that began first.

    Nobody is in a chain twice; a chain whose end waits for its beginning (`closes`) is a deadlock.
    """
    ordered = sorted(waits, key=lambda wait: wait.since)
    first_of_each = {(_role(wait.waiter), wait.of): wait for wait in reversed(ordered)}
    best: list[Wait] = []
    for wait in reversed(first_of_each.values()):
        chain = _chain_from(wait, ordered, frozenset())
        if len(chain) > len(best):
            best = chain
    return best


def closes(chain: Sequence[Wait]) -> bool:
    """Whether the last of a chain waits for the first: nobody in it can ever go on."""
    return len(chain) > 0 and _is_one_of(chain[0].waiter, chain[-1].of)


def _chain_from(wait: Wait, waits: Sequence[Wait], above: frozenset[tuple[str, tuple[str, ...]]]) -> list[Wait]:
    # Of many replicas that wait for the same, one stands for all; without this the search is exponential.
    above = above | {(_role(wait.waiter), wait.of)}
    best: list[Wait] = []
    tried = set(above)
    for after in waits if len(above) < MAX_CHAIN else ():
        alike = (_role(after.waiter), after.of)
        if alike in tried or not _is_one_of(after.waiter, wait.of):
            continue
        tried.add(alike)
        chain = _chain_from(after, waits, above)
        if len(chain) > len(best):
            best = chain
    return [wait, *best]


def _without_life(source: str) -> str:
    """`replica-3` of `replica-3/2`, the name of its second life."""
    return source.partition("/")[0]


def _role(source: str) -> str:
    """`replica` of `replica-3`; other sources are their own role."""
    role, _, number = source.rpartition("-")
    return role if role and number.isdigit() else source


def _is_one_of(source: str, names: Iterable[str]) -> bool:
    return any(name in (source, _role(source)) for name in names)


def _forget_waiter(waits: dict[str, Wait], waiter: str) -> None:
    for wait_id in [wait_id for wait_id, wait in waits.items() if wait.waiter == waiter]:
        del waits[wait_id]
