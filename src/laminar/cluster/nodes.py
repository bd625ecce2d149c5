"""The nodes of a Ray cluster as machines of the run: an agent on each, for as long as both live.

Invariant: what is in `Machines` has an agent that answers and sees the run folder. A node that comes is looked at
within `LOOK_S`, one whose agent is lost is no machine any more; if Ray still has the node later, it comes anew, under
another name.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import ray
from msgspec import Struct
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from laminar.cluster import builders
from laminar.cluster.agent import MachineFacts
from laminar.cluster.guardian import MARK
from laminar.cluster.life import Life, PingRules
from laminar.cluster.machine import Machine
from laminar.cluster.machines import Machines
from laminar.cluster.ports import first_line, port_to
from laminar.cluster.shell import Spec
from laminar.schema.errors import LaminarError, PeerLost, RunFailed, UserError
from laminar.telemetry.events import Events
from laminar.telemetry.files import EVENTS, events_of

LOOK_S: Final = 2.0
"""Time between two looks at which nodes there are."""


LOOK_AGAIN_S: Final = 20.0
"""After the loss of an agent: Ray calls a node that lost its power alive for some fifteen seconds."""


class Node(Struct, frozen=True, kw_only=True):
    """A node that Ray calls alive."""

    node_id: str
    host: str
    address: str
    num_gpus: float


class ClusterNodes:
    """Call `run`; `settled` is set when every node of the first look is a machine or was refused."""

    def __init__(self, machines: Machines, spec: Spec, pings: PingRules, events: Events) -> None:
        self._machines = machines
        self._spec = spec
        self._pings = pings
        self._events = events
        self._tended: set[str] = set()
        self._undecided: set[str] = set()
        self._left: set[str] = set()
        self._refused: dict[str, LaminarError] = {}
        self._num_named: Counter[str] = Counter()
        self._killing: set[asyncio.Future[None]] = set()
        self._resume = f"go on with: laminar train --resume {spec.place.folder}"
        self._home = str(ray.get_runtime_context().get_node_id())
        self.settled = asyncio.Event()

    async def run(self) -> None:
        """Tend the nodes.

        waits for:  time
        ends:       cancelled with the run, and all agents end then; with `RunFailed` if Ray is gone where we are
        """
        async with asyncio.TaskGroup() as group:
            while True:
                nodes = sorted(await live_nodes(), key=lambda node: node.node_id != self._home)
                if not nodes or nodes[0].node_id != self._home:
                    raise RunFailed(f"Ray has died on the machine of the launcher; start it again, then {self._resume}")
                for node in nodes:
                    if node.node_id not in self._tended:
                        self._tended.add(node.node_id)
                        self._undecided.add(node.node_id)
                        group.create_task(self._tend(node, self._new_name(node)))
                await asyncio.sleep(LOOK_S)

    def check(self) -> None:
        """Once settled: raise `UserError` if a machine cannot be used, as a user who starts a run wants to know."""
        for host, error in self._refused.items():
            raise UserError(f"machine {host} of the Ray cluster cannot be used: {error}")

    def _new_name(self, node: Node) -> str:
        """Names are numbered where a host has several nodes, or comes again, and never used twice."""
        self._num_named[node.host] += 1
        number = self._num_named[node.host]
        return node.host if number == 1 else f"{node.host}-{number}"

    async def _tend(self, node: Node, name: str) -> None:
        """Use a node as long as it can be used; then let the next look find it anew, unless it was left or refused.

        waits for:  the end of its agent; ends: with it, and some time later if Ray may not know yet that it is gone
        """
        try:
            await self._live(node, name)
        except LaminarError as error:
            await self._refuse(node, error)
            return
        finally:
            self._decided(node)
        if node.node_id != self._home:
            await asyncio.sleep(LOOK_AGAIN_S)
        self._tended -= {node.node_id} - self._left

    async def _live(self, node: Node, name: str) -> None:
        """One life of an agent; raises what kept the node from being of use.

        waits for:  the end of the agent; ends: with it, and kills what may be left of it
        """
        life = await Life.begin(f"agent-{name}", builders.machine, self._spec, self._bare(node, name))
        ready = asyncio.Event()
        living = asyncio.ensure_future(life.run(lambda pid: None, self._pings, lambda pid: ready.set()))
        readying = asyncio.ensure_future(ready.wait())
        try:
            await asyncio.wait([living, readying], return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                await living
            await self._use(node, name, life, living)
        finally:
            for task in (living, readying):
                task.cancel()
            await asyncio.wait([living, readying])
            life.kill()

    async def _use(self, node: Node, name: str, life: Life, living: "asyncio.Future[None]") -> None:
        """The node is a machine of the run until its agent ends. Raises what makes it useless."""
        facts: MachineFacts = await port_to(self._spec.place.run_id, f"agent-{name}").look()
        machine = self._machine(node, name, facts.sockets, lambda: self._leave(node, life))
        if node.node_id == self._home:
            self._machines.near = machine.name
        self._machines.add(machine)
        self._decided(node)
        self._events.emit("machine_joined", machine=machine.name, host=node.host, num_gpus=node.num_gpus)
        try:
            await living
            reason = "its agent returned"
        except LaminarError as error:
            reason = str(error)
        finally:
            self._machines.remove(machine)
        self._events.emit("machine_lost", machine=machine.name, reason=reason)

    async def _refuse(self, node: Node, error: LaminarError) -> None:
        if node.node_id in {live.node_id for live in await live_nodes()}:
            self._refused[node.host] = error
            self._events.emit("machine_refused", host=node.host, reason=str(error))

    def _decided(self, node: Node) -> None:
        self._undecided.discard(node.node_id)
        if not self._undecided:
            self.settled.set()

    def _bare(self, node: Node, name: str) -> Machine:
        """What is known of a machine before its agent lives; the agent itself is killed by Ray alone."""
        return Machine(
            name=name,
            host=node.host,
            address=node.address,
            sockets=Path(),
            num_gpus=node.num_gpus,
            kill=lambda pid: None,
            options={"scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False)},
        )

    def _leave(self, node: Node, agent: Life) -> None:
        """For good: with its agent all ends that the run has there."""
        self._left.add(node.node_id)
        agent.machine_is_lost()

    def _machine(self, node: Node, name: str, sockets: Path, leave: Callable[[], None]) -> Machine:
        return Machine(
            name=name,
            host=node.host,
            address=node.address,
            sockets=sockets,
            num_gpus=node.num_gpus,
            kill=lambda pid: self._kill(f"agent-{name}", pid),
            leave=leave,
            events=EVENTS if node.node_id == self._home else events_of(name),
            options={
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False),
                "runtime_env": {"env_vars": {MARK: str(sockets)}},  # by which the guardian there knows what is ours
            },
        )

    def _kill(self, agent: str, pid: int) -> None:
        """Begin to have a process killed."""
        task = asyncio.ensure_future(self._call_kill(agent, pid))
        self._killing.add(task)
        task.add_done_callback(self._killing.discard)

    async def _call_kill(self, agent: str, pid: int) -> None:
        try:
            await port_to(self._spec.place.run_id, agent).kill(pid)
        except PeerLost:
            return  # then the agent's guardian kills all that there is
        except LaminarError as error:
            self._events.emit("command_failed", reason=f"process {pid} was not killed: {first_line(error)}")


async def live_nodes() -> list[Node]:
    """As Ray knows them. Raises `RunFailed` if it does not answer any more."""
    try:
        rows = await asyncio.to_thread(ray.nodes)
    except RayError as error:
        raise RunFailed(f"the Ray cluster does not answer any more: {first_line(error)}") from None
    return [_node(row) for row in rows if row["Alive"]]


def _node(row: dict[str, Any]) -> Node:
    return Node(
        node_id=row["NodeID"],
        host=row["NodeManagerHostname"],
        address=row["NodeManagerAddress"],
        num_gpus=float(row["Resources"].get("GPU", 0.0)),
    )
