"""Who is in the chain, in which order, under which master and epoch; and which relay holds the others up.

Invariants: every change of the chain makes a new, larger epoch; who stays keeps its place relative to the others who
stay, so that chunks which already arrived stay useful (paper §4.3, Fig. 7); the master is the first of the chain.
"""

from collections.abc import Collection, Mapping

from msgspec import Struct

from laminar.scheduling.chain import RelayPlace, RelayState, elect_master, plan_chain, repair_chain


class Member(Struct, frozen=True, kw_only=True):
    """A relay that takes part: where it stands and where it listens; `near_learner` makes it the first choice as
    master, since the learner writes into its memory without a network."""

    place: RelayPlace
    host: str
    port: int
    near_learner: bool = False

    @property
    def relay_id(self) -> str:
        return self.place.relay_id


class Chain(Struct, frozen=True, kw_only=True):
    """The members in the order in which weights pass; the first is the master."""

    epoch: int = 0
    members: tuple[Member, ...] = ()

    @property
    def master(self) -> Member | None:
        return self.members[0] if self.members else None

    def upstream_of(self, relay_id: str) -> Member | None:
        """Who feeds this relay; None for the master and for strangers."""
        ids = [member.relay_id for member in self.members]
        at = ids.index(relay_id) if relay_id in ids else 0
        return self.members[at - 1] if at else None

    def downstream_of(self, relay_id: str) -> Member | None:
        """Whom this relay feeds."""
        return next((m for m in self.members if (up := self.upstream_of(m.relay_id)) and up.relay_id == relay_id), None)


class Progress(Struct, frozen=True, kw_only=True):
    """How far a relay is with the version that it receives: bytes it has, and how fast they came of late."""

    version: int | None
    num_bytes: int
    bytes_per_s: float


def joined(chain: Chain, member: Member, newest: Mapping[str, int | None], known_epoch: int = 0) -> Chain:
    """The chain with one more relay, beside those of its machine or rack, else at the end.

    `known_epoch` is what the relay has seen: a keeper that starts anew goes on from there. A chain without weights is
    led by a relay near the learner; one that has weights keeps its master, unless the new relay alone has a newer
    version: a master that was thought dead after it had taken one.
    """
    chain = left(chain, {member.relay_id}, newest) if member.relay_id in _ids(chain) else chain
    others = list(chain.members)
    others.insert(_place_for(others, member), member)
    members = tuple(others)
    if _is_newest(member, chain.members, newest):
        members = (member, *chain.members)
    elif member.near_learner and not any(m.near_learner for m in chain.members) and not _has_weights(newest, members):
        order = plan_chain([m.place for m in members], member.relay_id)
        members = _ordered(members, order)
    return Chain(epoch=max(chain.epoch, known_epoch) + 1, members=members)


def left(chain: Chain, lost: Collection[str], newest: Mapping[str, int | None]) -> Chain:
    """The chain without the lost relays; if the master is among them, the one with the newest version leads.

    Of equals that is the next in the chain, and nobody else moves.
    """
    if not set(lost) & set(_ids(chain)):
        return chain
    order = repair_chain(_ids(chain), frozenset(lost))
    states = [RelayState(relay_id=relay_id, newest_version=newest.get(relay_id)) for relay_id in order]
    elected = elect_master(states, chain.epoch)
    if elected is None:
        return Chain(epoch=chain.epoch + 1)
    if chain.members[0].relay_id in lost:
        order = (elected.relay_id, *(relay_id for relay_id in order if relay_id != elected.relay_id))
    return Chain(epoch=elected.epoch, members=_ordered(chain.members, order))


def demoted(chain: Chain, relay_id: str) -> Chain:
    """The chain with this relay at its end, where it holds up nobody."""
    members = [member for member in chain.members if member.relay_id != relay_id]
    members += [member for member in chain.members if member.relay_id == relay_id]
    return Chain(epoch=chain.epoch + 1, members=tuple(members))


def slow_relay(
    chain: Chain, progress: Mapping[str, Progress], typical_bytes_per_s: float, slow_fraction: float, slack_bytes: int
) -> str | None:
    """The relay that holds up those behind it: its predecessor has much more of the same or a newer version than it
    has, yet it receives at less than `slow_fraction` of what is typical. The last of the chain holds up nobody."""
    for before, member in zip(chain.members, chain.members[1:-1], strict=False):
        ahead, here = progress.get(before.relay_id), progress.get(member.relay_id)
        if ahead is None or here is None or here.version is None:
            continue
        behind = ahead.version != here.version or ahead.num_bytes - here.num_bytes > slack_bytes
        if behind and here.bytes_per_s < slow_fraction * typical_bytes_per_s:
            return member.relay_id
    return None


def _place_for(members: list[Member], new: Member) -> int:
    """Behind the last member of the same machine, else of the same rack, else of all."""
    same_machine = [at for at, m in enumerate(members) if m.place.machine == new.place.machine]
    same_rack = [at for at, m in enumerate(members) if m.place.rack == new.place.rack]
    for beside in (same_machine, same_rack):
        if beside:
            return beside[-1] + 1
    return len(members)


def _is_newest(new: Member, members: Collection[Member], newest: Mapping[str, int | None]) -> bool:
    held = newest.get(new.relay_id)
    others = [version for member in members if (version := newest.get(member.relay_id)) is not None]
    return held is not None and bool(members) and held > max(others, default=-1)


def _has_weights(newest: Mapping[str, int | None], members: Collection[Member]) -> bool:
    return any(newest.get(member.relay_id) is not None for member in members)


def _ids(chain: Chain) -> tuple[str, ...]:
    return tuple(member.relay_id for member in chain.members)


def _ordered(members: Collection[Member], order: Collection[str]) -> tuple[Member, ...]:
    by_id = {member.relay_id: member for member in members}
    return tuple(by_id[relay_id] for relay_id in order)
