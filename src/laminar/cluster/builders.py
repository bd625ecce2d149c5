"""Build each service of a run inside its own process, with the ports to its neighbours.

Each builder is an async context manager: what it opened is closed when its service ends, however it ends. Heavy imports
happen here, on use, so that a process that needs no torch does not load it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from laminar.cluster.ports import ActorPort, ActorReplicas, replica_name
from laminar.cluster.shell import Place, Service, Spec
from laminar.telemetry.events import EventLog


@asynccontextmanager
async def relay(spec: Spec) -> AsyncIterator[Service]:
    """The process that holds weights in host memory."""
    from laminar.relay.service import RelayService

    async with _events(spec.place, "relay") as events:
        yield RelayService(
            socket_path=relay_socket(spec.place),
            secret=spec.place.secret,
            keep_versions=spec.config.relay.keep_versions,
            events=events,
        )


@asynccontextmanager
async def data(spec: Spec) -> AsyncIterator[Service]:
    """Prompt pool, partial response pool, experience buffer and their journal."""
    from laminar.cluster.prompts import TaskPrompts
    from laminar.data.shard import DataShard
    from laminar.data.sqlite_journal import SqliteJournal
    from laminar.tasks.loading import build_task
    from laminar.tasks.tokenizer import load_tokenizer

    config = spec.config
    task = build_task(config.task.path, config.task.options)
    prompts = TaskPrompts(task, load_tokenizer(config.model.path), num_heldout=config.evaluation.num_prompts)
    async with _events(spec.place, "data") as events:
        journal = SqliteJournal(spec.place.folder / "journal.sqlite", flush_s=config.data.flush_s)
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
            manager_rules(spec.config, spec.config.rollout.num_replicas),
            num_replicas=spec.config.rollout.num_replicas,
            replicas=ActorReplicas(namespace),
            data=ActorPort(namespace, "data"),
            relay=ActorPort(namespace, "relay"),
            events=events,
        )


@asynccontextmanager
async def replica(spec: Spec) -> AsyncIterator[Service]:
    """One life of a rollout worker."""
    from laminar.cluster.wiring import replica_rules
    from laminar.relay.reader import WeightReader
    from laminar.rollout.episodes import Episodes
    from laminar.rollout.replica import Replica
    from laminar.tasks.tokenizer import load_tokenizer

    config, namespace = spec.config, spec.place.run_id
    tokenizer = load_tokenizer(config.model.path)
    rules = replica_rules(config, spec.replica_id, spec.incarnation, tokenizer.stop_token_ids)
    async with AsyncExitStack() as stack:
        events = await stack.enter_async_context(_events(spec.place, replica_name(spec.replica_id, spec.incarnation)))
        grader = await stack.enter_async_context(_grader(spec))
        yield Replica(
            rules,
            engine=_engine(spec),
            episodes=Episodes(
                limits=rules.limits,
                tokenizer=tokenizer,
                grader=grader,
                environments=_environments(spec),
                act_timeout_s=config.task.grade_timeout_s,
            ),
            weights=WeightReader(relay_socket(spec.place), spec.place.secret),
            data=ActorPort(namespace, "data"),
            manager=ActorPort(namespace, "manager"),
            events=events,
        )
