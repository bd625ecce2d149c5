"""The broadcast chain: in which order relays pass a version on, who leads, and in pieces of what size.

Invariants: a chain starts with the master, names every relay once and enters every rack once; repairing it removes the
lost relays and moves nobody else, so that chunks which already arrived stay useful (paper §4.3, Fig. 7).
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from math import ceil, sqrt

from msgspec import Struct

MIN_CHUNK_BYTES = 64 * 1024
"""With 8 nodes on shaped 400 Mbit/s links this was the fastest of 64 KiB to 16 MiB; smaller ones were not tried."""


class RelayPlace(Struct, frozen=True, kw_only=True):
    """Where a relay stands."""

    relay_id: str
    rack: str
    machine: str


class RelayState(Struct, frozen=True, kw_only=True):
    """What a relay reports: the newest version it holds completely, None before the first one."""

    relay_id: str
    newest_version: int | None


class Mastership(Struct, frozen=True, kw_only=True):
    """Who leads the chain, and since which epoch; whatever carries an older epoch is fenced."""

    relay_id: str
    epoch: int


def plan_chain(relays: Sequence[RelayPlace], master: str) -> tuple[str, ...]:
    """Master first, then the rest of its machine and rack, then one rack after the other, all in a stable order.

    So the links between racks carry the payload once per rack. Raises ValueError if the master is not among them.
    """
    place_of = {place.relay_id: place for place in relays}
    if master not in place_of:
        raise ValueError(f"relay {master} cannot lead a chain that it is not part of")
    head = place_of[master]

    def nearness(place: RelayPlace) -> tuple[bool, str, bool, str, bool, str]:
        same_rack = place.rack == head.rack
        same_machine = same_rack and place.machine == head.machine
        return (not same_rack, place.rack, not same_machine, place.machine, place.relay_id != master, place.relay_id)

    return tuple(place.relay_id for place in sorted(place_of.values(), key=nearness))


def repair_chain(chain: Sequence[str], lost: AbstractSet[str]) -> tuple[str, ...]:
    """The chain with its gaps closed: the predecessor of a lost relay feeds the next one that is left."""
    return tuple(relay_id for relay_id in chain if relay_id not in lost)


def elect_master(relays: Sequence[RelayState], epoch: int) -> Mastership | None:
    """The relay with the newest complete version leads, under the next epoch; of equals the first as given.

    Given in chain order, that is the one next to the lost master, and the rest of the chain can stay as it is.
    None if no relay is left.
    """
    if not relays:
        return None
    best = max(relays, key=lambda relay: -1 if relay.newest_version is None else relay.newest_version)
    return Mastership(relay_id=best.relay_id, epoch=epoch + 1)


def broadcast_s(num_nodes: int, num_bytes: int, chunk_bytes: int, startup_s: float, bytes_per_s: float) -> float:
    """Seconds until the last of `num_nodes` has all bytes: (p + k - 2) steps of one chunk each (paper, appendix D)."""
    num_chunks = max(1, ceil(num_bytes / chunk_bytes))
    return (num_nodes + num_chunks - 2) * (num_bytes / num_chunks / bytes_per_s + startup_s)


def best_chunk_bytes(num_nodes: int, num_bytes: int, startup_s: float, bytes_per_s: float) -> int:
    """The chunk size with which `broadcast_s` is least: M / k* with k* = sqrt((p - 2) M T_byte / T_start).

    More chunks fill the chain sooner, fewer pay the start-up less often. With one receiver there is nothing to fill,
    and one chunk is best. Not below `MIN_CHUNK_BYTES`.
    """
    if num_nodes <= 2 or num_bytes <= MIN_CHUNK_BYTES:
        return max(1, num_bytes)
    most_chunks = num_bytes // MIN_CHUNK_BYTES
    transfer_s = num_bytes / bytes_per_s
    ideal = sqrt((num_nodes - 2) * transfer_s / startup_s) if startup_s > 0 else float(most_chunks)
    low = max(1, min(most_chunks, int(ideal)))
    candidates = [ceil(num_bytes / chunks) for chunks in (low, min(most_chunks, low + 1))]
    return min(candidates, key=lambda size: broadcast_s(num_nodes, num_bytes, size, startup_s, bytes_per_s))
