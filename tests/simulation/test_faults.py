"""Worlds under random faults: no invariant breaks, equal seeds do equal things, and planted bugs are found."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from laminar.data.ledger import Trajectory
from laminar.data.partial_pool import PartialPool
from laminar.data.shard import DataShard
from laminar.scheduling import repack
from laminar.scheduling.repack import Move, RepackCandidate, RepackRules
from laminar.schema.errors import RunFailed
from laminar.simulator.breaking import Outcome, break_one, small_world, world_of_seed
from laminar.simulator.relays import MachineRelay, Relays
from laminar.simulator.running import simulate
from laminar.simulator.world import World

PER_MINUTE = 20.0

ALL = ("laminar", "sync", "one_step", "stream", "partial")


def outcomes(seeds: Sequence[int], per_minute: float = PER_MINUTE) -> list[Outcome]:
    return [break_one(world_of_seed(seed, ALL), per_minute)[0] for seed in seeds]


@pytest.mark.parametrize("seed", range(25))
def test_no_fault_breaks_an_invariant(seed: int):
    (outcome,) = outcomes([seed])
    assert outcome.violation is None, outcome
    assert outcome.num_checks > 1_000


def test_faults_of_every_kind_are_drawn():
    kinds = set()
    for seed in range(5):
        _, log = break_one(small_world("laminar", seed), 90.0)
        kinds |= {line.split(b'"what":"')[1].split(b'"')[0] for line in log.splitlines() if b'"kind":"fault"' in line}
    assert len(kinds) == 16, kinds


def test_a_manager_that_is_lost_takes_up_the_fleet_that_it_finds():
    """Replicas go on meanwhile; the manager that follows starts none of them again, and repacks as the first did."""
    config = small_world("laminar", seed=1)

    async def lose(world: World) -> None:
        await asyncio.sleep(8.0)
        await world.manager_lost()

    run = simulate(config, keep_all_events=True, trouble=lose)
    events = run.recorder.events
    back_s = next(e["t"] for e in events if e["kind"] == "service_started" and e["service"] == "manager")
    assert [e for e in events if e["kind"] == "replica_lost"] == []
    assert len([e for e in events if e["kind"] == "replica_started"]) == config.num_replicas
    assert any(e["kind"] == "repack" and e["t"] > back_s for e in events)
    assert run.measures.num_steps == config.work.num_steps
    assert run.measures.num_dropped == 0


def test_a_replica_that_ends_while_there_is_no_manager_is_replaced_by_another():
    config = small_world("laminar", seed=1)

    async def lose_both(world: World) -> None:
        await asyncio.sleep(8.0)
        first = world.lives["replica-0"]
        world.end_life(first, "killed")
        await world.manager_lost()

    run = simulate(config, keep_all_events=True, trouble=lose_both)
    began = [e["replica_id"] for e in run.recorder.events if e["kind"] == "replica_started"]
    assert len(began) == config.num_replicas + 1
    assert run.measures.num_steps == config.work.num_steps


def test_a_run_whose_engines_fail_at_every_start_ends_with_one_sentence():
    config = small_world("laminar", seed=1)

    async def break_all(world: World) -> None:
        world.broken_replicas |= {f"replica-{number}" for number in range(100)}

    manager = config.manager.model_copy(update={"max_restarts": 1})
    with pytest.raises(RunFailed, match="replicas left: 0"):
        simulate(config.model_copy(update={"manager": manager}), trouble=break_all)


def test_equal_seeds_give_equal_logs_and_other_seeds_others():
    logs = [break_one(small_world("laminar", seed), PER_MINUTE)[1] for seed in (4, 4, 5)]
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]


def test_another_process_gives_the_same_log():
    """Nothing may hang on the order of sets of strings, which differs from process to process."""
    code = (
        "from laminar.simulator.breaking import break_one, small_world;"
        f"print(break_one(small_world('partial', 9), {PER_MINUTE})[0].digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


# ---- planted bugs: the one place where our own code is replaced, to see whether that is noticed


def found(per_minute: float, seeds: Sequence[int] = range(0, 20, 5)) -> Iterator[str]:
    """Violations, one world after the other for as long as somebody asks."""
    for seed in seeds:
        (outcome,) = outcomes([seed], per_minute)
        if outcome.violation:
            yield outcome.violation


def test_the_checker_finds_a_dropped_fence(monkeypatch: pytest.MonkeyPatch):
    def anybody(pool: PartialPool, lease_id: str, trajectory: Trajectory | None, attempt: int) -> Trajectory | None:
        return trajectory

    monkeypatch.setattr(PartialPool, "holder_of", anybody)
    assert any("fenced" in violation or "went from" in violation for violation in found(PER_MINUTE))


def test_the_checker_finds_a_lease_that_is_never_returned(monkeypatch: pytest.MonkeyPatch):
    async def forget(shard: DataShard) -> tuple[()]:
        return ()

    monkeypatch.setattr("laminar.simulator.breaking.DEADLINE_S", 300.0)
    monkeypatch.setattr(DataShard, "leases", forget)
    monkeypatch.setattr("laminar.scheduling.fleet_orphans.orphan_all_of", lambda draft, replica: None)
    monkeypatch.setattr("laminar.scheduling.fleet_lives.orphan_all_of", lambda draft, replica: None)
    whole_steps = [1, 2, 3]  # schedules that cannot go on without any one group
    assert any("not made its last step" in violation for violation in found(PER_MINUTE, whole_steps))


def test_the_checker_finds_a_version_that_is_shown_before_it_is_complete(monkeypatch: pytest.MonkeyPatch):
    async def at_once(relays: Relays, relay: MachineRelay, version: int, after_s: float) -> None:
        reservation = relay.begin(version)
        relay.arrives_s[version] = asyncio.get_running_loop().time() + after_s
        relay.complete(reservation)

    monkeypatch.setattr(Relays, "_deliver", at_once)
    monkeypatch.setattr(Relays, "pull", lambda relays: asyncio.sleep(0))
    assert any("serves version" in violation for violation in found(0.0))


def test_the_checker_finds_a_destination_that_is_released(monkeypatch: pytest.MonkeyPatch):
    plan_group = repack._plan_group

    def without_guard(group: list[RepackCandidate], rules: RepackRules) -> list[Move]:
        moves = plan_group(group, rules)
        for move in moves[:1]:
            other = next(c for c in group if c.replica_id == move.destination)
            moves.append(
                Move(
                    source=other.replica_id,
                    destination=move.source,
                    version=other.version,
                    lease_id=other.lease_id,
                    num_trajectories=other.num_trajectories,
                    reprefill_tokens=other.kv_used_tokens,
                )
            )
        return moves

    monkeypatch.setattr(repack, "_plan_group", without_guard)
    assert any("which it moves others to" in violation for violation in found(0.0))


def test_the_checker_finds_experience_that_is_trained_twice(monkeypatch: pytest.MonkeyPatch):
    sample: Callable[..., Any] = DataShard.sample
    first: list[Any] = []

    async def always_the_first(shard: DataShard, step: int, part: int, num_groups: int, wait_s: float) -> Any:
        groups = await sample(shard, step, part, num_groups, wait_s)
        first.extend(groups if not first else ())
        return tuple(first) if groups else groups

    monkeypatch.setattr(DataShard, "sample", always_the_first)
    assert any("trained twice" in violation for violation in found(0.0, seeds=[0]))


def test_the_checker_finds_a_wrong_staleness(monkeypatch: pytest.MonkeyPatch):
    learner_is_at: Callable[..., None] = DataShard._learner_is_at
    monkeypatch.setattr(DataShard, "_learner_is_at", lambda shard, version: learner_is_at(shard, version + 1))
    assert any("has staleness" in violation for violation in found(0.0, seeds=[0]))
