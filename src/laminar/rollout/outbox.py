"""What a replica has to tell the data shard, sent in few calls and in order.

Invariant: an update is kept until a call that carried it was answered; resending is safe because every update carries
its offset and attempt.
"""

import asyncio

from laminar.rollout.ports import DataPort
from laminar.schema.errors import DeadlinePassed, PeerLost
from laminar.schema.trajectories import Update

RETRY_S = 0.2
"""Pause before a call to a lost data shard is repeated; it is restarted within seconds."""


class Outbox:
    """Updates of one lease on their way to the data shard; at most one call is in flight."""

    def __init__(self, data: DataPort, lease_id: str, *, give_up_after_s: float) -> None:
        self._data = data
        self._lease_id = lease_id
        self._give_up_after_s = give_up_after_s
        self._updates: list[Update] = []
        self._sending = asyncio.Lock()

    def put(self, *updates: Update) -> None:
        """Queue updates; bounded by what the batch's trajectories can produce."""
        self._updates.extend(updates)

    async def send(self) -> tuple[str, ...]:
        """Send all that is queued; returns the ids that this replica no longer holds.

        waits for:  an answer of the data shard, again and again while it restarts, `give_up_after_s` in all
        """
        async with self._sending:
            updates = tuple(self._updates)
            if not updates:
                return ()
            fenced = await self._deliver(updates)
            del self._updates[: len(updates)]
            return fenced

    async def _deliver(self, updates: tuple[Update, ...]) -> tuple[str, ...]:
        async with asyncio.timeout(self._give_up_after_s):
            while True:
                try:
                    return await self._data.stream(self._lease_id, updates)
                except (PeerLost, DeadlinePassed):
                    await asyncio.sleep(RETRY_S)
