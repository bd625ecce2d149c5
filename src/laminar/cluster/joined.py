"""A Ray cluster that a run has joined: its machines, and the chain of their relays."""

import asyncio

import ray

from laminar.cluster.agent import marker
from laminar.cluster.life import PingRules
from laminar.cluster.machine import Machine
from laminar.cluster.machines import Machines
from laminar.cluster.nodes import ClusterNodes
from laminar.cluster.relays import RelayChain
from laminar.cluster.shell import ChainPlace, Spec
from laminar.telemetry.events import Events


class JoinedCluster:
    """Call `run` around everything else; `ready` returns when there are machines to use."""

    def __init__(self, machines: Machines, spec: Spec, pings: PingRules, events: Events) -> None:
        self._spec = spec
        self._nodes = ClusterNodes(machines, spec, pings, events)
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._chain = RelayChain(spec.place, address, pings.dead_after_s, events)

    async def run(self) -> None:
        """Keep machines and chain; ends: never, cancelled when all that lives on the machines has ended."""
        with marker(self._spec.place):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._nodes.run())
                group.create_task(self._chain.run())

    async def ready(self) -> None:
        """Return when every node of the cluster is a machine of the run. Raises `UserError` if one cannot be."""
        await self._nodes.settled.wait()
        await self._chain.listening.wait()
        self._nodes.check()

    def chain_place(self, machine: Machine, *, near_learner: bool) -> ChainPlace:
        """Where the relay of a machine stands."""
        return self._chain.place_of(machine, near_learner=near_learner)
