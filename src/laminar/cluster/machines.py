"""Which machines a run has, and where its parts stand: `scheduling.placement` decides, this remembers and waits."""

import asyncio

from laminar.cluster.life import LifeLost
from laminar.cluster.machine import Machine
from laminar.scheduling.placement import (
    Need,
    Placement,
    best_machine,
    ended,
    machine_joined,
    machine_left,
    num_that_fit,
    placed,
)
from laminar.telemetry.events import Events
from laminar.telemetry.waits import Waits


class Machines:
    """The machines of a run by name. `near` is the one on which services start if they can."""

    def __init__(self, events: Events, *, room_wait_s: float) -> None:
        self._events = events
        self._waits = Waits("launcher", events)
        self._room_wait_s = room_wait_s
        self._placement = Placement()
        self._changed = asyncio.Event()
        self.present: dict[str, Machine] = {}
        self.near: str | None = None

    def add(self, machine: Machine) -> None:
        """It can be used from now on."""
        self.present[machine.name] = machine
        self._decide(machine_joined(self._placement, machine.name, machine.num_gpus))

    def remove(self, machine: Machine) -> None:
        """It is gone, with all that stood there."""
        del self.present[machine.name]
        self._decide(machine_left(self._placement, machine.name))

    async def changed(self) -> None:
        """Return after the next change of machines, or of what stands where."""
        await self._changed.wait()

    async def place(self, name: str, need: Need) -> Machine:
        """The machine for the next life of a part, with room kept for it.

        waits for:  a machine with room; ends: with `LifeLost` after the time that a start may take
        """
        near = None if need.is_replica else self.near
        try:
            async with asyncio.timeout(self._room_wait_s):
                while (best := best_machine(self._placement, name, need, near)) is None:
                    with self._waits.on(f"a machine with room for {name}", deadline_s=self._room_wait_s):
                        await self._changed.wait()
        except TimeoutError:
            raise LifeLost(f"no machine has {need.num_gpus:g} free GPUs for {name}") from None
        self._decide(placed(self._placement, name, need, best))
        return self.present[best]

    def machine_of(self, name: str) -> Machine | None:
        """Where this part stands now."""
        tenant = self._placement.tenants.get(name)
        return None if tenant is None else self.present[tenant[0]]

    def ended(self, name: str, lived_s: float) -> None:
        """A life of this part has failed."""
        before = self._placement.given_up
        self._decide(ended(self._placement, name, lived_s))
        for machine in self._placement.given_up - before:
            if len(self.present) > 1:
                self._events.emit("machine_given_up", machine=machine, reason=f"{name} failed there again and again")

    def num_that_fit(self, need: Need) -> float:
        """How many more parts of this kind have room."""
        return num_that_fit(self._placement, need)

    @property
    def num_gpus(self) -> float:
        """Of all machines."""
        return sum(machine.num_gpus for machine in self.present.values())

    def _decide(self, placement: Placement) -> None:
        self._placement = placement
        self._changed.set()
        self._changed = asyncio.Event()
