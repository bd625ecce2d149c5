"""The relays of several machines, joined in one chain. Its keeper lives in the launcher: without it there is no run."""

import asyncio
from collections.abc import Collection

from laminar.cluster.machine import Machine
from laminar.cluster.ports import relay_name
from laminar.cluster.shell import ChainPlace, Place
from laminar.relay.address import RelayAddress, write_address
from laminar.relay.keeper import ChainKeeper, KeeperRules
from laminar.relay.member import ChainMember
from laminar.relay.process import run_relay
from laminar.relay.service import RelayService
from laminar.telemetry.events import Events


class RelayChain:
    """Call `run`; `place_of` is known once `listening` is set."""

    def __init__(self, place: Place, address: str, deadline_s: float, events: Events) -> None:
        self._place = place
        self._deadline_s = deadline_s
        rules = KeeperRules(dead_after_s=deadline_s)
        self._keeper = ChainKeeper(host=address, port=0, secret=place.secret, rules=rules, events=events)

    @property
    def listening(self) -> asyncio.Event:
        """Set when relays can join."""
        return self._keeper.listening

    async def run(self) -> None:
        """Keep the chain; ends: never, cancelled with the run."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keeper.run())
            await self.listening.wait()
            write_address(self._place.folder, RelayAddress(secret=self._place.secret, keeper=self._keeper.address))

    def place_of(self, machine: Machine, *, near_learner: bool) -> ChainPlace:
        """Where the relay of a machine stands."""
        return ChainPlace(
            relay_id=relay_name(machine.name),
            machine=machine.name,
            address=machine.address,
            keeper=self._keeper.address,
            near_learner=near_learner,
            deadline_s=self._deadline_s,
        )


class ChainedRelay:
    """Fulfils `cluster.shell.Service`: a relay that serves its machine and takes part in the chain."""

    def __init__(self, service: RelayService, member: ChainMember) -> None:
        self._service = service
        self._member = member

    async def run(self) -> None:
        """Serve; ends: never, cancelled with its process."""
        await run_relay(self._service, self._member)

    async def pin(self, versions: Collection[int]) -> None:
        """See `RelayService.pin`."""
        await self._service.pin(versions)
