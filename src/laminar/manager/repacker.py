"""Follow every replica's KV use, plan repacks, have their sources let go.

What a source let go is an orphan with a preferred adopter: the state machine hands it over, and if the destination dies
meanwhile, elsewhere.
"""

import asyncio
from collections.abc import Sequence

from laminar.manager.ports import Replicas
from laminar.scheduling import fleet as decide
from laminar.scheduling.repack import IdleState, Move, RepackRules, plan_repack, repack_candidates, update_idleness
from laminar.schema.errors import PortError
from laminar.schema.fleet import ReplicaLoad
from laminar.telemetry.events import Events


class Repacker:
    """Moves the tails of several replicas onto few."""

    def __init__(self, rules: RepackRules, replicas: Replicas, events: Events, *, dry_run: bool = False) -> None:
        self._rules = rules
        self._replicas = replicas
        self._events = events
        self._dry_run = dry_run
        self._idleness: dict[str, IdleState] = {}

    def observe(self, load: ReplicaLoad) -> None:
        """A heartbeat came in."""
        self._idleness[load.replica_id] = update_idleness(self._idleness.get(load.replica_id), load, self._rules)

    async def repack(self, loads: Sequence[ReplicaLoad]) -> tuple[decide.Released, ...]:
        """Plan over these replicas and release the sources; returns what was let go."""
        plan = plan_repack(repack_candidates(loads, self._idleness), self._rules)
        if not plan.moves:
            return ()
        by_id = {load.replica_id: load for load in loads}
        self._events.emit(
            "repack",
            version=plan.moves[0].version,
            num_released=0 if self._dry_run else len(plan.moves),
            moves=[_described(move, by_id[move.source]) for move in plan.moves],
        )
        if self._dry_run:
            return ()
        released = await asyncio.gather(*(self._release(move, by_id[move.source]) for move in plan.moves))
        return tuple(filter(None, released))

    async def _release(self, move: Move, source: ReplicaLoad) -> decide.Released | None:
        """None if the source's batch ended meanwhile, or the source did: that is the state machine's business."""
        try:
            let_go = await self._replicas.port(source.replica_id, source.incarnation).release(move.lease_id)
        except PortError:
            return None
        if not let_go:
            return None
        return decide.Released(lease_id=move.lease_id, version=move.version, destination=move.destination)


def _described(move: Move, source: ReplicaLoad) -> dict[str, object]:
    return {
        "source": move.source,
        "target": move.destination,
        "num_trajectories": move.num_trajectories,
        "num_tokens": move.reprefill_tokens,
        "kv_fraction": round(source.kv_fraction, 4),
    }
