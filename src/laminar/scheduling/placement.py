"""Which machine a part of the run goes to: a replica, or a service that can live anywhere.

Invariants: no machine gets more than its GPUs hold; what failed once starts again in its place; a machine on which the
same part has failed again after that is given up, and gets work only where no other machine has room (paper §3.3);
replicas are spread evenly over the others.
"""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from laminar.scheduling.restarts import STABLE_AFTER_S

IN_PLACE: int = 1
"""Failures in a row after which a part still starts in its place."""


class Need(Struct, frozen=True, kw_only=True):
    """What a part takes. Replicas are spread; others are only counted by their GPUs."""

    num_gpus: float = 0.0
    is_replica: bool = False


class Home(Struct, frozen=True, kw_only=True):
    """Where a part stood last, and how many of its lives there have failed in a row."""

    machine: str
    failures: int = 0


class Placement(Struct, frozen=True, kw_only=True):
    """GPUs of each machine that is there, what stands where, and what is remembered. The maps are never changed."""

    gpus: Mapping[str, float] = {}
    tenants: Mapping[str, tuple[str, Need]] = {}
    homes: Mapping[str, Home] = {}
    given_up: frozenset[str] = frozenset()

    def room_on(self, machine: str, but: str = "") -> float:
        """GPUs that are free there, those of the part `but` counted as free."""
        taken = (need.num_gpus for name, (at, need) in self.tenants.items() if at == machine and name != but)
        return self.gpus[machine] - sum(taken)

    def num_replicas_on(self, machine: str) -> int:
        """Replicas that stand there now."""
        return sum(at == machine and need.is_replica for at, need in self.tenants.values())


def machine_joined(placement: Placement, machine: str, num_gpus: float) -> Placement:
    """One more machine; its name must be new."""
    return replace(placement, gpus={**placement.gpus, machine: num_gpus})


def machine_left(placement: Placement, machine: str) -> Placement:
    """Without this machine, and whatever stood there."""
    return Placement(
        gpus={name: gpus for name, gpus in placement.gpus.items() if name != machine},
        tenants={name: tenant for name, tenant in placement.tenants.items() if tenant[0] != machine},
        homes={name: home for name, home in placement.homes.items() if home.machine != machine},
        given_up=placement.given_up - {machine},
    )


def best_machine(placement: Placement, name: str, need: Need, near: str | None = None) -> str | None:
    """Where this part should start; None if no machine has room. `near` is the first choice of one without a home."""
    home = placement.homes.get(name) or Home(machine=near or "")

    def badness(machine: str) -> tuple[bool, bool, int, float, int, str]:
        return (
            machine in placement.given_up,
            machine != home.machine or home.failures > IN_PLACE,
            placement.num_replicas_on(machine),
            -placement.room_on(machine, but=name),
            sum(at == machine for at, _ in placement.tenants.values()),
            machine,
        )

    fitting = [m for m in placement.gpus if placement.room_on(m, but=name) + 1e-9 >= need.num_gpus]
    return min(fitting, key=badness, default=None)


def placed(placement: Placement, name: str, need: Need, machine: str) -> Placement:
    """This part starts there."""
    home = placement.homes.get(name)
    if home is None or home.machine != machine:
        home = Home(machine=machine)
    return replace(
        placement,
        tenants={**placement.tenants, name: (machine, need)},
        homes={**placement.homes, name: home},
    )


def ended(placement: Placement, name: str, lived_s: float) -> Placement:
    """A life of this part has failed after `lived_s`; a service keeps its room, as it starts again soon.

    A service without GPUs says nothing about its machine: it stays there while the machine does.
    """
    home = placement.homes.get(name)
    if home is None or name not in placement.tenants:
        return placement
    _, need = placement.tenants[name]
    if not need.is_replica and not need.num_gpus:
        return placement
    failures = 1 if lived_s >= STABLE_AFTER_S else home.failures + 1
    tenants = {other: tenant for other, tenant in placement.tenants.items() if other != name or not need.is_replica}
    return replace(
        placement,
        tenants=tenants,
        homes={**placement.homes, name: replace(home, failures=failures)},
        given_up=placement.given_up | ({home.machine} if failures > IN_PLACE else set()),
    )


def num_that_fit(placement: Placement, need: Need) -> float:
    """How many more parts of this kind have room; without GPUs any number."""
    if not need.num_gpus:
        return float("inf") if placement.gpus else 0
    return sum(int((placement.room_on(machine) + 1e-9) // need.num_gpus) for machine in placement.gpus)
