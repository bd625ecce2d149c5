"""Carry out repack plans: sources let go, destinations take over.

Invariant: a lease that its source let go is reported to the state machine unless its destination took it over at once, so
that it cannot be forgotten.
"""

import asyncio

from laminar.manager.ports import ReplicaPort, Replicas
from laminar.scheduling import fleet as decide
from laminar.scheduling.repack import (
    IdleState,
    Move,
    RepackRules,
    plan_repack,
    repack_candidates,
    update_idleness,
)
from laminar.schema.errors import PortError
from laminar.schema.fleet import ReplicaLoad
from laminar.telemetry.events import Events


class Repacker:
    """Follows every replica's KV use and moves the tails of several onto few."""

    def __init__(self, rules: RepackRules, replicas: Replicas, events: Events) -> None:
        self._rules = rules
        self._replicas = replicas
        self._events = events
        self._idleness: dict[str, IdleState] = {}
        self._loads: dict[str, ReplicaLoad] = {}

    def observe(self, load: ReplicaLoad) -> None:
        """A heartbeat came in."""
        state = self._idleness.get(load.replica_id)
        self._idleness[load.replica_id] = update_idleness(state, load, self._rules)
        self._loads[load.replica_id] = load

    def forget(self, replica_id: str) -> None:
        """The replica is gone, or this life of it."""
        self._idleness.pop(replica_id, None)
        self._loads.pop(replica_id, None)

    async def repack(self, healthy: frozenset[str]) -> tuple[decide.Released, ...]:
        """Plan over the healthy replicas and carry it out; returns leases that were let go but not taken over."""
        loads = [load for load in self._loads.values() if load.replica_id in healthy]
        plan = plan_repack(repack_candidates(loads, self._idleness), self._rules)
        if not plan.moves:
            return ()
        self._events.emit("repack", num_released=len(plan.moves), moves=[self._described(move) for move in plan.moves])
        left = await asyncio.gather(*(self._move(move) for move in plan.moves))
        return tuple(released for released in left if released is not None)

    async def _move(self, move: Move) -> decide.Released | None:
        """Release the source, then have the destination adopt; None if nothing is left to care for."""
        source, destination = self._loads[move.source], self._loads[move.destination]
        try:
            if not await self._port(source).release(move.lease_id):
                return None
        except PortError:
            return None  # a dead source is the state machine's business
        self.forget(move.source)
        try:
            if await self._port(destination).adopt(move.lease_id, move.version):
                return None
        except PortError as error:
            self._events.emit("command_failed", reason=str(error))
        return decide.Released(lease_id=move.lease_id, version=move.version)

    def _port(self, load: ReplicaLoad) -> ReplicaPort:
        return self._replicas.port(load.replica_id, load.incarnation)

    def _described(self, move: Move) -> dict[str, object]:
        return {
            "source": move.source,
            "target": move.destination,
            "version": move.version,
            "num_trajectories": move.num_trajectories,
            "num_tokens": move.reprefill_tokens,
            "kv_fraction": round(self._loads[move.source].kv_fraction, 4),
        }
