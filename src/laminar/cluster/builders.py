"""Build each service of a run inside its own process, with the ports to its neighbours.

Each builder is an async context manager: what it opened is closed when its service ends, however it ends. Heavy imports
happen here, on use, so that a process that needs no torch does not load it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from laminar.cluster.ports import RELAY, ActorReplicas, AllRelays, port_to, replica_name
from laminar.cluster.run_folder import CHECKPOINTS
from laminar.cluster.shell import Place, Service, Spec
from laminar.schema.fleet import KnownFleet
from laminar.tasks.environments import EnvironmentPool, EnvironmentRules
from laminar.tasks.grading import AnyGrader
from laminar.tasks.loading import build_task
from laminar.tasks.protocol import InteractiveTask
from laminar.telemetry.events import EventLog
from laminar.telemetry.files import JOURNAL
from laminar.telemetry.waits import Waits
from laminar.trainer.ports import WeightSink

FLUSH_EVENTS_S = 0.2
"""What a killed process did not write is at most so old."""


@asynccontextmanager
async def relay(spec: Spec) -> AsyncIterator[Service]:
    """The process that holds weights in host memory."""
    from laminar.cluster.relays import ChainedRelay
    from laminar.relay.address import RelayAddress, write_address
    from laminar.relay.member import ChainMember, ChainRules
    from laminar.relay.service import RelayService

    source = spec.chain.relay_id if spec.chain else RELAY
    async with _events(spec.place, source) as events:
        service = RelayService(
            socket_path=relay_socket(spec.place),
            secret=spec.place.secret,
            keep_versions=spec.config.relay.keep_versions,
            events=events,
        )
        if spec.chain is None:
            address = RelayAddress(secret=spec.place.secret, socket_path=str(relay_socket(spec.place)))
            write_address(spec.place.folder, address)
            yield service
        else:
            rules = ChainRules(
                relay_id=spec.chain.relay_id,
                machine=spec.chain.machine,
                host=spec.chain.address,
                keeper_host=spec.chain.keeper[0],
                keeper_port=spec.chain.keeper[1],
                near_learner=spec.chain.near_learner,
                deadline_s=spec.chain.deadline_s,
            )
            yield ChainedRelay(service, ChainMember(service, spec.place.secret, rules, events))


@asynccontextmanager
async def data(spec: Spec) -> AsyncIterator[Service]:
    """Prompt pool, partial response pool, experience buffer and their journal."""
    from laminar.cluster.prompts import TaskPrompts
    from laminar.cluster.wiring import data_rules
    from laminar.data.shard import DataShard
    from laminar.data.sqlite_journal import SqliteJournal
    from laminar.tasks.loading import build_task
    from laminar.tasks.tokenizer import load_tokenizer

    config = spec.config
    task = build_task(config.task.path, config.task.options)
    prompts = TaskPrompts(task, load_tokenizer(config.model.path), num_heldout=config.evaluation.num_prompts)
    async with _events(spec.place, "data") as events:
        journal = SqliteJournal(spec.place.folder / JOURNAL, flush_s=config.data.flush_s)
        async with DataShard.open(journal, prompts, data_rules(config), events, spec.resume_step) as shard:
            yield shard


@asynccontextmanager
async def manager(spec: Spec) -> AsyncIterator[Service]:
    """The watcher of the fleet."""
    from laminar.cluster.wiring import manager_rules
    from laminar.manager.manager import Manager

    namespace = spec.place.run_id
    async with _events(spec.place, "manager") as events:
        yield Manager(
            manager_rules(spec.config),
            fleet=spec.fleet or KnownFleet(num_replicas=spec.config.rollout.num_replicas),
            replicas=ActorReplicas(namespace),
            data=port_to(namespace, "data"),
            relay=AllRelays(namespace) if spec.chain else port_to(namespace, RELAY),
            events=events,
        )


@asynccontextmanager
async def trainer(spec: Spec) -> AsyncIterator[Service]:
    """Learner, optimizer, checkpoints."""
    from laminar.trainer.checkpoints import Checkpoints
    from laminar.trainer.learner import TorchLearner
    from laminar.trainer.loop import TrainerLoop

    config, namespace = spec.config, spec.place.run_id
    async with AsyncExitStack() as stack:
        events = await stack.enter_async_context(_events(spec.place, "trainer"))
        learner = await asyncio.to_thread(
            lambda: TorchLearner(
                config.model.path,
                config.trainer,
                config.seed,
                temperature=config.rollout.sampling.temperature or 1.0,
            )
        )
        yield TrainerLoop(
            config.trainer,
            evaluate_every=config.evaluation.every_steps if config.evaluation.num_prompts else None,
            learner=learner,
            buffer=port_to(namespace, "data"),
            sink=await stack.enter_async_context(_sink(spec)),
            manager=port_to(namespace, "manager"),
            checkpoints=Checkpoints(spec.place.folder / CHECKPOINTS, config.trainer.checkpoint),
            events=events,
        )


@asynccontextmanager
async def replica(spec: Spec) -> AsyncIterator[Service]:
    """One life of a rollout worker."""
    from laminar.cluster.engines import build_engine
    from laminar.cluster.wiring import replica_rules
    from laminar.relay.fallback import CheckpointedWeights
    from laminar.relay.reader import WeightReader
    from laminar.rollout.episodes import Episodes
    from laminar.rollout.replica import Replica
    from laminar.tasks.tokenizer import load_tokenizer
    from laminar.trainer.checkpoints import model_folder

    config, namespace = spec.config, spec.place.run_id
    tokenizer = load_tokenizer(config.model.path)
    rules = replica_rules(config, spec.replica_id, spec.incarnation, tokenizer.stop_token_ids)
    async with AsyncExitStack() as stack:
        events = await stack.enter_async_context(_events(spec.place, replica_name(spec.replica_id, spec.incarnation)))
        yield Replica(
            rules,
            engine=build_engine(config),
            episodes=Episodes(
                limits=rules.limits,
                tokenizer=tokenizer,
                grader=await stack.enter_async_context(_grader(spec)),
                environments=await stack.enter_async_context(_environments(spec)),
                waits=Waits(replica_name(spec.replica_id, spec.incarnation), events),
            ),
            weights=CheckpointedWeights(
                await stack.enter_async_context(WeightReader(relay_socket(spec.place), spec.place.secret)),
                lambda version: model_folder(spec.place.folder / CHECKPOINTS, version),
                config.relay.dtype,
            ),
            data=port_to(namespace, "data"),
            manager=port_to(namespace, "manager"),
            events=events,
        )


@asynccontextmanager
async def machine(spec: Spec) -> AsyncIterator[Service]:
    """The agent of one machine; its folder of sockets, and what is left there of the run, end with it."""
    from laminar.cluster.agent import MachineAgent
    from laminar.cluster.instance import scratch_folder

    with scratch_folder(is_launcher=False) as scratch:
        yield MachineAgent(spec.place, scratch)


def relay_socket(place: Place) -> Path:
    """Where the relay listens for the processes of its machine."""
    return place.sockets / "relay"


@asynccontextmanager
async def _events(place: Place, source: str) -> AsyncIterator[EventLog]:
    """This process's voice in the event file of its machine."""
    with EventLog(place.folder / place.events, source) as events:
        flusher = asyncio.ensure_future(events.run_flusher(FLUSH_EVENTS_S))
        try:
            yield events
        finally:
            flusher.cancel()
            await asyncio.wait([flusher])


@asynccontextmanager
async def _sink(spec: Spec) -> AsyncIterator[WeightSink]:
    """Where the trainer's weights go: into the memory of its machine's relay, or to whichever relay leads the chain."""
    from laminar.relay.keeper import ChainWatch
    from laminar.relay.publisher import WeightPublisher
    from laminar.relay.pushing import ChainPublisher

    dtype, secret = spec.config.relay.dtype, spec.place.secret
    async with WeightPublisher(relay_socket(spec.place), secret, dtype) as local:
        if spec.chain is None:
            yield local
            return
        watch = ChainWatch(*spec.chain.keeper, secret)
        watching = asyncio.ensure_future(watch.run())
        try:
            yield ChainPublisher(watch, secret, dtype, local=local, local_id=spec.chain.relay_id)
        finally:
            watching.cancel()
            await asyncio.wait([watching])


@asynccontextmanager
async def _grader(spec: Spec) -> AsyncIterator[AnyGrader]:
    """Reward workers of this replica."""
    from laminar.cluster.wiring import worker_memory
    from laminar.tasks.grading import Grader, GradingRules

    task = spec.config.task
    rules = GradingRules(
        timeout_s=task.grade_timeout_s, num_workers=task.grade_workers, memory_bytes=worker_memory(spec.config)
    )
    grader = Grader(task.path, task.options, sys_path=spec.place.module_path, rules=rules)
    await grader.start()
    try:
        yield grader
    finally:
        await grader.close()


@asynccontextmanager
async def _environments(spec: Spec) -> AsyncIterator[EnvironmentPool | None]:
    """Processes for environments, if the task's problems are played in some."""
    from laminar.cluster.wiring import worker_memory

    task = spec.config.task
    if not isinstance(build_task(task.path, task.options), InteractiveTask):
        yield None
        return
    rules = EnvironmentRules(
        timeout_s=task.act_timeout_s, num_workers=task.environment_workers, memory_bytes=worker_memory(spec.config)
    )
    pool = EnvironmentPool(task.path, task.options, sys_path=spec.place.module_path, rules=rules)
    try:
        yield pool
    finally:
        await pool.close()
