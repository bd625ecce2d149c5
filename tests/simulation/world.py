"""A whole run in one event loop: the shipped services, scripted engines, an in-memory relay and journal.

Ports are the services themselves, seen through `Line`, which can be cut. There is no trainer process but a loop that
samples and publishes; no Ray but `World` itself, which starts and ends lives of replicas as the manager orders.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from laminar.data.audit import AuditReport, audit_rows
from laminar.data.journal import MemoryJournal
from laminar.data.ports import DataRules
from laminar.data.shard import DataShard
from laminar.engines.protocol import Request, Weights
from laminar.engines.scripted_engine import ScriptedEngine, ScriptedEngineRules
from laminar.manager.manager import Manager, ManagerRules
from laminar.manager.orders import KillOrder, StartOrder
from laminar.relay.memory_link import MemoryLink
from laminar.rollout.batch_run import StreamRules
from laminar.rollout.episodes import Episodes
from laminar.rollout.replica import Replica, ReplicaRules
from laminar.rollout.trajectory import EpisodeLimits
from laminar.scheduling.fleet import FleetRules
from laminar.scheduling.repack import RepackRules
from laminar.schema.errors import PeerLost
from laminar.schema.fleet import KnownFleet
from laminar.schema.trajectories import ExperienceGroup, Grade, Prompt, Sampling, Scored
from laminar.tasks.environments import InlineEnvironments
from laminar.tasks.protocol import Environment, Problem, Reply
from laminar.telemetry.events import MemoryEvents
from laminar.telemetry.waits import Waits

STOP = 0
VOCAB = 64
RUN_SEED = 7


class Line:
    """Calls to a service that fail with `PeerLost` while the line is cut."""

    def __init__(self, find: Callable[[], Any], name: str) -> None:
        self._find = find
        self._name = name
        self.is_cut = False

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0.001)
            service = self._find()
            if self.is_cut or service is None:
                raise PeerLost(f"{self._name} cannot be reached")
            return await getattr(service, method)(*args, **kwargs)

        return call


class RelayLine(Line):
    """A relay that cannot be reached while the line is cut."""

    @contextlib.asynccontextmanager
    async def lease(self, version: int | None = None) -> AsyncIterator[Weights]:
        if self.is_cut:
            raise PeerLost(f"{self._name} cannot be reached")
        async with self._find().lease(version) as weights:
            yield weights


class Words:
    """A tokenizer whose text is token ids in decimal, so that nothing is lost on the way."""

    stop_token_ids = (STOP,)

    def encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(int(word) for word in text.split())

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(str(token_id) for token_id in token_ids if token_id != STOP)


class NumProblems:
    """Prompts p0, p1, ... of one token each."""

    def __init__(self, num_train: int, num_heldout: int = 0) -> None:
        self.num_train = num_train
        self.num_heldout = num_heldout

    def prompt(self, split: str, index: int) -> Prompt:
        problem_id = f"p{index}" if split == "train" else f"h{index}"
        return Prompt(
            prompt_id=problem_id,
            token_ids=(1 + index % 50,),
            payload={"problem_id": problem_id, "prompt": str(index), "payload": {}},
        )


class LengthGrader:
    """Reward 1 for an answer of even length; takes a moment."""

    async def grade(self, problem: Problem, answer: str) -> Grade:
        await asyncio.sleep(0.01)
        return Scored(reward=float(len(answer.split()) % 2 == 0))


class Echo(Environment):
    """Replies with the number of turns so far, twice, then ends the episode."""

    def __init__(self) -> None:
        self._turns = 0

    async def act(self, turn: str) -> Reply:
        await asyncio.sleep(0.5)
        self._turns += 1
        return Reply(text=str(50 + self._turns), done=self._turns == 3)


class EchoTask:
    def environment(self, problem: Problem) -> Environment:
        return Echo()


def long_tailed(request: Request) -> int:
    """Most answers take 20 tokens, one in eight takes 400."""
    return 400 if request.seed % 8 == 0 else 20 + request.seed % 16


@dataclass(kw_only=True)
class Settings:
    """What a test may vary."""

    num_replicas: int = 2
    num_steps: int = 6
    groups_per_step: int = 4
    group_size: int = 8
    batch_trajectories: int = 32
    repack: bool = True
    strict_idleness: bool = False
    environments: EchoTask | None = None
    act_timeout_s: float = 10.0
    train_s: float = 1.0
    lengths: Callable[[Request], int] = long_tailed
    max_new_tokens: int = 500
    num_heldout: int = 0


@dataclass
class Life:
    """One life of a replica."""

    replica: Replica
    engine: ScriptedEngine
    lines: dict[str, Line]
    task: "asyncio.Task[None] | None" = None


@dataclass
class World:
    """See the module; `async with World(settings) as world`, then `await world.train()`."""

    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        self.events = MemoryEvents(source="world", clock=lambda: asyncio.get_running_loop().time())
        self.link = MemoryLink(keep_versions=2)
        self.journal = MemoryJournal()
        self.lives: dict[tuple[str, int], Life] = {}
        self.trained: list[ExperienceGroup] = []
        self.version = 0

    async def __aenter__(self) -> "World":
        s = self.settings
        rules = DataRules(
            group_size=s.group_size,
            max_groups_ahead=4 * s.groups_per_step,
            total_groups=s.num_steps * s.groups_per_step,
            seed=RUN_SEED,
        )
        self.shard = DataShard(self.journal, NumProblems(40, s.num_heldout), rules, self.events)
        self.manager = Manager(
            self._manager_rules(),
            fleet=KnownFleet(num_replicas=s.num_replicas),
            replicas=self,
            data=Line(lambda: self.shard, "data"),
            relay=self.link,
            events=self.events,
        )
        self._loops = asyncio.TaskGroup()
        await self._loops.__aenter__()
        self._endless = [self._loops.create_task(self.manager.run()), self._loops.create_task(self._obey())]
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *error: Any) -> None:
        for task in [*self._endless, *(life.task for life in self.lives.values() if life.task)]:
            task.cancel()
        await self._loops.__aexit__(*error)

    def port(self, replica_id: str, incarnation: int) -> Any:
        return Line(lambda: self.alive(replica_id, incarnation), replica_id)

    def kill(self, replica_id: str, incarnation: int, *, notice: bool = True) -> None:
        """End a life at once, as SIGKILL would: no last words."""
        life = self.lives[replica_id, incarnation]
        for line in life.lines.values():
            line.is_cut = True
        assert life.task is not None
        life.task.cancel()
        life.task = None
        if notice:
            self._loops.create_task(self.manager.lost(replica_id, incarnation, "killed"))

    def current(self, replica_id: str) -> int:
        """Incarnation of the life that is on."""
        return max(inc for rid, inc in self.lives if rid == replica_id)

    async def train(self) -> None:
        """Sample, take `train_s`, publish; to the last step."""
        await self._publish(0)
        for step in range(1, self.settings.num_steps + 1):
            groups: tuple[ExperienceGroup, ...] = ()
            async with asyncio.timeout(3600):
                while not groups:
                    groups = await self.shard.sample(step, 0, self.settings.groups_per_step, 5.0)
            await asyncio.sleep(self.settings.train_s)
            self.trained += groups
            await self._publish(step)
            await self.shard.commit(step)

    def audit(self) -> AuditReport:
        with self.journal.rows() as rows:
            return audit_rows(rows)

    def facts(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events.events if event["kind"] == kind]

    async def until(self, condition: Callable[[], Any], within_s: float = 600.0) -> None:
        """Let the world go on until the condition holds."""
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - looks at a world that has no events for tests
                await asyncio.sleep(0.01)

    async def _publish(self, version: int) -> None:
        await self.link.publish(version, {"w": torch.full((4,), float(version))})
        self.version = version
        await self.manager.published(version)

    async def _obey(self) -> None:
        while True:
            for order in await self.manager.orders(10.0):
                match order:
                    case StartOrder(replica_id=replica_id, incarnation=incarnation):
                        await asyncio.sleep(2.0)
                        self._start(replica_id, incarnation)
                    case KillOrder(replica_id=replica_id, incarnation=incarnation):
                        if self.alive(replica_id, incarnation):
                            self.kill(replica_id, incarnation, notice=False)

    def alive(self, replica_id: str, incarnation: int) -> Replica | None:
        """The replica, if this life of it is on."""
        life = self.lives.get((replica_id, incarnation))
        return life.replica if life is not None and life.task is not None else None

    def _start(self, replica_id: str, incarnation: int) -> None:
        s = self.settings
        limits = EpisodeLimits(max_new_tokens=s.max_new_tokens, max_turns=8, stop_token_ids=(STOP,))
        engine = ScriptedEngine(
            ScriptedEngineRules(max_running=64, kv_capacity_tokens=8192, token_s=0.01, vocab=VOCAB), lengths=s.lengths
        )
        lines = {
            "data": Line(lambda: self.shard, "data"),
            "manager": Line(lambda: self.manager, "manager"),
            "relay": RelayLine(lambda: self.link, "relay"),
        }
        replica = Replica(
            ReplicaRules(
                replica_id=replica_id,
                incarnation=incarnation,
                batch_trajectories=s.batch_trajectories,
                heartbeat_s=0.1,
                weights_deadline_s=60.0,
                port_deadline_s=60.0,
                engine_timeout_s=5.0,
                limits=limits,
                stream=StreamRules(every_tokens=64, every_s=0.5),
                sampling={"training": Sampling(), "evaluation": Sampling()},
            ),
            engine=engine,
            episodes=Episodes(
                limits=limits,
                tokenizer=Words(),
                grader=LengthGrader(),
                environments=InlineEnvironments(s.environments, s.act_timeout_s) if s.environments else None,
                waits=Waits(f"{replica_id}/{incarnation}", self.events),
            ),
            weights=lines["relay"],  # type: ignore[arg-type]
            data=lines["data"],  # type: ignore[arg-type]
            manager=lines["manager"],  # type: ignore[arg-type]
            events=self.events,
        )
        life = Life(replica, engine, lines)
        life.task = self._loops.create_task(self._live(replica_id, incarnation, replica))
        self.lives[replica_id, incarnation] = life

    async def _live(self, replica_id: str, incarnation: int, replica: Replica) -> None:
        """A life that ends by itself is told to the manager, as the cluster layer does."""
        with contextlib.suppress(BaseExceptionGroup):
            await replica.run()
        self.lives[replica_id, incarnation].task = None
        await self.manager.lost(replica_id, incarnation, "its loop ended")

    def _manager_rules(self) -> ManagerRules:
        s = self.settings
        return ManagerRules(
            fleet=FleetRules(
                suspect_after_s=1.0,
                dead_after_s=2.0,
                start_timeout_s=30.0,
                max_restarts=3,
                backoff_s=0.5,
                min_replicas=1,
                redirect_wait_s=20.0,
            ),
            repack=RepackRules(max_running=48, strict_idleness=s.strict_idleness) if s.repack else None,
            repack_every_s=0.25,
            tick_s=0.1,
            leases_every_s=2.0,
        )
