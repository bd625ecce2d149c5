"""Trouble drawn from a seed: what breaks, when, for how long.

Invariant: the seed and the settings determine every fault; after `until_s` nothing breaks any more, and everything that
was frozen, cut or stormy is mended.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec import Struct

from laminar.simulator.lines import CALL_S, Host
from laminar.simulator.world import Life, World

SLOWER = 20.0
"""A slow link's transfer takes so many times as long."""


class FaultRules(Struct, frozen=True, kw_only=True):
    """`per_minute` faults on average, until `until_s`; what passes again lasts up to `longest_s`."""

    per_minute: float
    until_s: float
    longest_s: float = 8.0


class Weather:
    """Messages are delayed, and lost while it storms (`lines.Weather`)."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.storms = 0
        """Storms that rage now."""

    def delay_s(self) -> float:
        """Longer in a storm, and never twice the same."""
        return CALL_S * (1.0 + self._rng.random() * (200.0 if self.storms else 1.0))

    def loses(self) -> bool:
        """One message in ten in a storm, none else."""
        return self.storms > 0 and self._rng.random() < 0.1


class Trouble:
    """Breaks a world."""

    def __init__(self, world: World, weather: Weather, rules: FaultRules, rng: random.Random) -> None:
        self._world = world
        self._weather = weather
        self._rules = rules
        self._rng = rng
        self._group: asyncio.TaskGroup | None = None
        self.kinds: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "kill_replica": self._kill_replica,
            "freeze_replica": self._freeze_replica,
            "freeze_machine": self._freeze_machine,
            "kill_machine": self._kill_machine,
            "kill_relay": self._kill_relay,
            "kill_master_relay": self._kill_master_relay,
            "kill_trainer": self._kill_trainer,
            "kill_data": self._kill_data,
            "kill_manager": self._world.manager_lost,
            "freeze_relay": self._freeze_relay,
            "freeze_trainer": lambda: self._freeze(self._world.trainer_host),
            "freeze_data": lambda: self._freeze(self._world.data_host),
            "cut_line": self._cut_line,
            "slow_links": self._slow_links,
            "storm": self._storm,
            "broken_engine": self._broken_engine,
        }

    async def run(self) -> None:
        """Break one thing after the other, until it is time to stop.

        waits for:  time; ends: when all that was to pass again has passed
        """
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as self._group:
            while True:
                await asyncio.sleep(self._rng.expovariate(self._rules.per_minute / 60.0))
                if loop.time() >= self._rules.until_s:
                    return
                kind = self._rng.choice(list(self.kinds))
                self._world.events.emit("fault", what=kind)
                self._group.create_task(self.kinds[kind]())

    def _some_life(self) -> Life | None:
        lives = [life for _, life in sorted(self._world.lives.items()) if not life.host.is_over]
        return self._rng.choice(lives) if lives else None

    def _some_machine(self) -> str:
        return self._rng.choice(list(self._world.relays.machines))

    async def _pass(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.1, self._rules.longest_s))

    async def _kill_replica(self) -> None:
        if (life := self._some_life()) is not None:
            self._world.end_life(life, "killed")

    async def _freeze_replica(self) -> None:
        if (life := self._some_life()) is not None:
            await self._freeze(life.host)

    async def _freeze_machine(self) -> None:
        machine = self._some_machine()
        hosts = [life.host for life in self._world.lives.values() if life.machine == machine]
        for host in hosts:
            host.freeze()
        await self._pass()
        for host in hosts:
            host.thaw()

    async def _kill_machine(self) -> None:
        await self._world.machine_lost(self._some_machine())

    async def _kill_relay(self) -> None:
        await self._world.relay_lost(self._some_machine())

    async def _kill_master_relay(self) -> None:
        await self._world.relay_lost(next(iter(self._world.relays.machines)))

    async def _kill_trainer(self) -> None:
        self._world.trainer_lost()

    async def _kill_data(self) -> None:
        await self._world.data_lost(self._rng.randint(0, self._world.journal.num_pending))

    async def _freeze_relay(self) -> None:
        await self._freeze(self._world.relays.machines[self._some_machine()].host)

    async def _freeze(self, host: Host | None) -> None:
        if host is not None:
            host.freeze()
            await self._pass()
            host.thaw()

    async def _slow_links(self) -> None:
        """Weights take longer than an iteration, so several versions are under way at once."""
        self._world.relays.slowness *= SLOWER
        await self._pass()
        self._world.relays.slowness /= SLOWER

    async def _cut_line(self) -> None:
        life = self._some_life()
        if life is not None and life.lines:
            line = self._rng.choice(life.lines)
            line.is_cut = True
            await self._pass()
            line.is_cut = False

    async def _storm(self) -> None:
        self._weather.storms += 1
        await self._pass()
        self._weather.storms -= 1

    async def _broken_engine(self) -> None:
        if (life := self._some_life()) is not None:
            self._world.broken_replicas.add(life.replica_id)
            self._world.end_life(life, "its engine broke")
            await self._pass()
            self._world.broken_replicas.discard(life.replica_id)
