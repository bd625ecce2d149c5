"""The five schedules, simulated with the shipped services: each keeps what defines it."""

import pytest

from laminar.config.simulation import SimulationConfig
from laminar.schema.schedule import ScheduleName
from laminar.simulator.breaking import break_one, small_world
from laminar.simulator.recorder import Event
from laminar.simulator.running import Run, simulate

ALL: tuple[ScheduleName, ...] = ("laminar", "sync", "one_step", "stream", "partial")


def run_of(schedule: ScheduleName, **changes: object) -> Run:
    return simulate(small_world(schedule, seed=1).model_copy(update=changes), keep_all_events=True)


def events(run: Run, kind: str) -> list[Event]:
    return [event for event in run.recorder.events if event["kind"] == kind]


@pytest.mark.parametrize("schedule", ALL)
def test_every_schedule_trains_every_step_without_a_violation(schedule: ScheduleName):
    outcome, _ = break_one(small_world(schedule, seed=1), per_minute=0.0)
    assert outcome.violation is None


@pytest.mark.parametrize("schedule", ["sync", "one_step", "stream"])
def test_no_answer_is_begun_more_than_the_bound_before_its_step(schedule: ScheduleName):
    run = run_of(schedule)
    most = 0 if schedule == "sync" else 1
    assert max(step["consumed_staleness_max"] for step in events(run, "step")) <= most


def test_sync_generates_and_trains_in_turns():
    run = run_of("sync")
    steps, claims = events(run, "step"), events(run, "claimed")
    for step in steps:
        began_s = step["t"] - step["train_s"] - step["publish_s"]
        assert not [claim for claim in claims if began_s < claim["t"] < step["t"] - step["publish_s"]]


def test_one_step_trains_while_the_next_step_is_generated_and_only_whole_steps():
    run = run_of("one_step")
    first_draws = [taken for taken in events(run, "taken") if taken["part"] == 0]
    answers = events(run, "trajectory")
    per_step = 8 * 4
    for number, draw in enumerate(first_draws):
        assert sum(answer["t"] <= draw["t"] for answer in answers) >= per_step * (number + 1)


def test_stream_trains_a_mini_batch_before_its_step_is_generated():
    run = run_of("stream")
    first_draws = [taken for taken in events(run, "taken") if taken["part"] == 0]
    answers = events(run, "trajectory")
    early = [
        sum(answer["t"] <= draw["t"] for answer in answers) < 8 * 4 * (number + 1)
        for number, draw in enumerate(first_draws)
    ]
    assert any(early)


@pytest.mark.parametrize("schedule", ["one_step", "stream"])
def test_a_step_begins_only_when_the_one_before_is_generated(schedule: ScheduleName):
    run = run_of(schedule)
    per_step, num_claimed, num_finished = 8 * 4, 0, 0
    for event in run.recorder.events:
        if event["kind"] == "claimed":
            assert num_finished >= num_claimed // per_step * per_step
            num_claimed += event["num_trajectories"]
        elif event["kind"] == "trajectory":
            num_finished += 1


def test_stream_is_as_fast_as_one_step_where_generation_takes_longer_and_faster_where_training_does():
    def measured(schedule: ScheduleName, learner_s: float) -> tuple[float, float]:
        config = small_world(schedule, seed=1)
        emulation = config.emulation.model_copy(update={"learner_fixed_s": learner_s})
        work = config.work.model_copy(update={"warmup_steps": 4, "num_steps": 12})
        run = simulate(config.model_copy(update={"emulation": emulation, "work": work}))
        return run.measures.tokens_per_s, run.measures.simulated_s

    one_step, one_step_s = measured("one_step", 1.0)
    stream, stream_s = measured("stream", 1.0)
    assert stream == pytest.approx(one_step, rel=1e-9), "a step begins when the one before is generated, in both"
    assert stream_s < one_step_s, "but the last step is trained sooner after it was generated"
    assert measured("stream", 5.0)[0] > 1.02 * measured("one_step", 5.0)[0]


def test_partial_interrupts_answers_and_refills_replicas():
    run = run_of("partial")
    finished = events(run, "batch_done")
    assert any(batch["num_trajectories"] > 16 for batch in finished)
    assert len(events(run, "adopted")) > 20


def test_partial_keeps_to_its_bound():
    run = run_of("partial", max_lag=1)
    num_begun = 0
    for claim in events(run, "claimed"):
        num_begun += claim["num_trajectories"]
        assert num_begun <= 8 * 4 * (claim["version"] + 1 + 1)


def test_repack_off_changes_no_answer():
    """Trajectory contents follow from seed and version; with one version they are the same wherever they ran."""

    def answers(repack: bool) -> dict[str, tuple[int, float]]:
        config = small_world("laminar", seed=3)
        work = config.work.model_copy(update={"num_steps": 1, "groups_per_step": 24, "mini_batches": 1})
        manager = config.manager.model_copy(
            update={"repack": config.manager.repack.model_copy(update={"enabled": repack})}
        )
        run = simulate(
            config.model_copy(update={"work": work, "manager": manager, "max_groups_ahead": 24}), keep_all_events=True
        )
        assert bool(events(run, "repack")) == repack
        return {e["trajectory_id"]: (e["tokens"], e["reward"]) for e in events(run, "trajectory")}

    assert answers(True) == answers(False)


def test_a_dry_run_of_repack_tells_of_moves_and_makes_none():
    config = small_world("laminar", seed=3)
    manager = config.manager.model_copy(update={"repack": config.manager.repack.model_copy(update={"dry_run": True})})
    run = simulate(config.model_copy(update={"manager": manager}), keep_all_events=True)
    assert any(event["moves"] for event in events(run, "repack"))
    assert events(run, "released") == []
    assert run.measures.num_released == 0


def test_tool_calls_take_their_time():
    def latency(tool: bool) -> float:
        config = small_world("laminar", seed=2)
        work = config.work.model_copy(update={"num_steps": 3, "tool": tool, "max_calls": 2})
        return simulate(SimulationConfig.model_validate(config.model_dump() | {"work": work})).measures.latency_mean_s

    assert latency(True) > latency(False) + 10.0
