"""Small worlds under random faults, one per seed, each watched by the checker from its first to its last event."""

import asyncio
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from laminar.config.run_config import ManagerConfig, RepackConfig
from laminar.config.simulation import (
    ClusterConfig,
    EmulationConfig,
    LogNormalLengths,
    SimulationConfig,
    WorkConfig,
)
from laminar.data.journal import MemoryJournal
from laminar.data.rows import Row
from laminar.data.shard import DataShard
from laminar.schema.schedule import ScheduleName
from laminar.schema.trajectories import ExperienceGroup, Update
from laminar.simulator import clock, rules
from laminar.simulator.checker import Checker, Violation
from laminar.simulator.faults import FaultRules, Trouble, Weather
from laminar.simulator.learner import EmulatedLearner
from laminar.simulator.lines import Host
from laminar.simulator.recorder import Recorder
from laminar.simulator.task import EmulatedPrompts
from laminar.simulator.world import KEEP_VERSIONS, World

FAULTS_UNTIL_S = 40.0
"""Virtual time in which things break; a run without faults takes about as long."""

DEADLINE_S = 1_500.0
"""A run that is not over so long after its start, which is long after the last fault, makes no progress."""


class CheckedJournal(MemoryJournal):
    """Shows every operation to the checker."""

    def __init__(self, journal: MemoryJournal, checker: Checker) -> None:
        super().__init__()
        self._take_over(journal)
        self._checker = checker

    def write(self, rows: tuple[Row, ...]) -> None:
        super().write(rows)
        self._checker.wrote(rows)

    def _take_over(self, journal: MemoryJournal) -> None:
        with journal.rows() as rows:
            self._rows = rows  # type: ignore[assignment]


class CheckedShard(DataShard):
    """Tells the checker which calls come in."""

    checker: Checker

    async def stream(self, lease_id: str, updates: tuple[Update, ...]) -> tuple[str, ...]:
        fenced = [update.trajectory_id for update in updates if not self.checker.may_report(lease_id, update)]
        self.checker.begin_call()
        answer = super().stream(lease_id, updates)
        told = await answer
        self.checker.end_call(fenced)
        return told

    async def sample(self, step: int, part: int, num_groups: int, wait_s: float) -> tuple[ExperienceGroup, ...]:
        self.checker.sampled(step)
        return await super().sample(step, part, num_groups, wait_s)

    async def rewind(self, step: int) -> None:
        self.checker.rewound(step)
        await super().rewind(step)


class CheckedLearner(EmulatedLearner):
    """Tells the checker what is trained."""

    checker: Checker

    def step(self, groups: Sequence[ExperienceGroup]) -> dict[str, float]:
        self.checker.learns(groups)
        return super().step(groups)

    def save(self, folder: Path) -> None:
        self.checker.saved()
        super().save(folder)


class CheckedWorld(World):
    """A world whose every part is watched."""

    def __init__(self, config: SimulationConfig, recorder: Recorder, weather: Weather) -> None:
        super().__init__(config, recorder, weather)
        mixes_versions = rules.schedule_of(config).interrupts
        self.checker = Checker(self.relays, self.relay_of, mixes_versions=mixes_versions, keep_versions=KEEP_VERSIONS)
        recorder.observers.append(self.checker.saw)

    def start_data(self) -> None:
        self.data_host = Host("data")
        self.checker.restarted(self.journal)
        self.journal = CheckedJournal(self.journal, self.checker)
        prompts = EmulatedPrompts(rules.ids(self.config, self.config.work.prompt_tokens))
        shard = CheckedShard(self.journal, prompts, rules.data_rules(self.config), self.recorder.source("data"))
        shard.checker = self.checker
        self.shard = shard

    def learner(self) -> EmulatedLearner:
        self.checker.restored()
        learner = CheckedLearner(rules.learner_pace(self.config), self.config.emulation.tokens_per_id)
        learner.checker = self.checker
        return learner


class Outcome(Struct, frozen=True, kw_only=True):
    """One world: its violation, if any, and how much was looked at. `digest` is that of the event log."""

    seed: int
    schedule: ScheduleName
    violation: str | None
    num_faults: int
    num_checks: int
    num_events: int
    simulated_s: float
    digest: str


def small_world(schedule: ScheduleName, seed: int) -> SimulationConfig:
    """Six replicas on three machines, answers of some 40 tokens with a tail of 400, twenty iterations of a second."""
    whole_steps = schedule in ("sync", "one_step", "stream")
    return SimulationConfig(
        seed=seed,
        schedule=schedule,
        max_lag=3 if schedule == "partial" else None,
        batch_trajectories=None if whole_steps else 16,
        work=WorkConfig(
            lengths=LogNormalLengths(median_tokens=40, p99_over_median=8),
            max_new_tokens=400,
            prompt_tokens=4,
            group_size=4,
            groups_per_step=8,
            mini_batches=2,
            num_steps=20,
            warmup_steps=0,
        ),
        cluster=ClusterConfig(
            train_gpus=2,
            rollout_gpus=6,
            gpus_per_machine=2,
            start_s=1.0,
            machine_replace_s=5.0,
            relay_restart_s=1.0,
            trainer_restart_s=2.0,
            data_restart_s=1.0,
            manager_restart_s=1.0,
        ),
        emulation=EmulationConfig(
            latency_factor=3.0,
            max_running=12,
            kv_capacity_tokens=1_500,
            learner_fixed_s=1.0,
            learner_per_gpu_s=0.0,
            checkpoint_s=0.2,
            tokens_per_id=1,
            stream_every_s=0.5,
            claim_wait_s=0.5,
        ),
        manager=ManagerConfig(
            heartbeat_s=0.25,
            suspect_after_s=0.8,
            dead_after_s=1.6,
            start_timeout_s=10.0,
            max_restarts=50,
            backoff_s=0.2,
            redirect_wait_s=10.0,
            repack=RepackConfig(every_s=0.3, max_running=12),
        ),
    )


def break_one(config: SimulationConfig, per_minute: float, until_s: float = FAULTS_UNTIL_S) -> tuple[Outcome, bytes]:
    """Run one world; returns its outcome and its event log."""
    recorder = Recorder(config.emulation.tokens_per_id)
    rng = random.Random(config.seed)
    weather = Weather(rng)
    world = CheckedWorld(config, recorder, weather)
    trouble = Trouble(world, weather, FaultRules(per_minute=per_minute, until_s=until_s), rng)
    violation: str | None = None
    try:
        clock.run(_run(world, trouble if per_minute else None))
    except* Violation as found:
        violation = _first_line(found)
    except* Exception as found:  # noqa: BLE001 - whatever a service raises, no fault may bring it about
        violation = f"the run failed: {_first_line(found)}"
    log = recorder.lines()
    outcome = Outcome(
        seed=config.seed,
        schedule=config.schedule,
        violation=violation,
        num_faults=sum(event["kind"] == "fault" for event in recorder.events),
        num_checks=world.checker.num_checks,
        num_events=recorder.num_emitted,
        simulated_s=recorder.events[-1]["t"] if recorder.events else 0.0,
        digest=hashlib.sha256(log).hexdigest(),
    )
    return outcome, log


async def _run(world: CheckedWorld, trouble: Trouble | None) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S), world.open():
            disturbing = asyncio.ensure_future(trouble.run()) if trouble else None
            await world.train()
            if disturbing is not None:
                disturbing.cancel()
                await asyncio.wait([disturbing])
    except TimeoutError:
        raise Violation(f"the trainer has not made its last step {DEADLINE_S:g} s after the start") from None
    work = world.config.work
    world.checker.check_end(world.journal, work.num_steps, work.groups_per_step)


def _first_line(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{error}" if isinstance(error, Violation) else f"{type(error).__name__}: {error}"


def world_of_seed(seed: int, schedules: Sequence[ScheduleName]) -> SimulationConfig:
    """The small world of a seed; the schedules take turns."""
    return small_world(schedules[seed % len(schedules)], seed)
