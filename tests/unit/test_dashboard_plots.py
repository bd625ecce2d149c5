from pathlib import Path

import matplotlib
import pytest
from test_dashboard_synthetic import Replica, Run, synthetic_events, write_events

from laminar.dashboard import style
from laminar.dashboard.lanes import MAX_BATCHES, MAX_LANES, busy_share
from laminar.dashboard.plots import PICTURES, quantile, rates_of, smoothed, step_rates, write_plots
from laminar.dashboard.timeline import build_timeline
from laminar.telemetry.vocabulary import to_facts


@pytest.fixture(scope="module")
def plots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_events(tmp_path_factory.mktemp("run"), synthetic_events())
    write_plots(folder)
    return folder / "plots"


def test_every_picture_is_drawn(plots: Path):
    assert sorted(path.stem for path in plots.iterdir()) == sorted(PICTURES)
    for path in plots.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG"), path
        assert path.stat().st_size > 10_000, path


def test_a_run_without_events_has_no_pictures(tmp_path: Path):
    assert write_plots(tmp_path) == []


@pytest.mark.parametrize("num_events", [1, 2, 10, 90])
def test_a_run_that_has_just_begun_gets_the_pictures_it_has_data_for(num_events: int):
    facts = list(to_facts(synthetic_events()))[:num_events]
    for draw in PICTURES.values():
        draw(facts)


def test_rewards_outside_zero_and_one_get_an_axis_of_their_own():
    events = [event | {"reward_mean": -3.0} if event["kind"] == "step" else event for event in synthetic_events()]
    figure = PICTURES["accuracy"](list(to_facts(events)))
    assert [axes.get_ylabel() for axes in figure.axes] == ["accuracy", "", "reward", "reward"]
    assert figure.axes[0].get_ylim() == (0, 1)


def test_lanes_show_every_batch_move_and_death_of_a_short_run():
    timeline = build_timeline(to_facts(synthetic_events()))
    (axes,) = PICTURES["lanes"](list(to_facts(synthetic_events()))).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["trainer", *timeline.replicas]
    bars = [patch for patch in axes.patches if hasattr(patch, "get_width")]
    assert len(bars) == len(timeline.batches) + 2 * sum(part.phase == "train" for part in timeline.trainer)
    arrows = [patch for patch in axes.patches if not hasattr(patch, "get_width")]
    assert len(arrows) == len(timeline.moves)


def test_lanes_of_a_long_run_with_many_replicas_stay_legible():
    run = Run(1, num_steps=60)
    run.replicas = {f"replica-{i}": Replica(f"replica-{i}") for i in range(30)}
    facts = list(to_facts(sorted(run.play(), key=lambda event: event["t"])))
    figure = PICTURES["lanes"](facts)
    assert f"{MAX_LANES} of 30 replicas" in figure.get_suptitle()
    timeline = build_timeline(facts)
    busiest = max(sum(b.replica_id == r for b in timeline.batches) for r in timeline.replicas)
    assert ("the last" in figure.get_suptitle()) == (busiest > MAX_BATCHES)


def test_the_busy_share_is_the_time_with_a_batch():
    timeline = build_timeline(to_facts(synthetic_events()))
    for replica_id in timeline.replicas:
        assert 0.7 < busy_share(timeline, replica_id) < 1
    assert busy_share(timeline, "replica-9") == 0


def test_pictures_leave_the_settings_of_matplotlib_alone():
    before = dict(matplotlib.rcParams)
    with style.applied():
        assert PICTURES["lengths"](list(to_facts(synthetic_events()[:300]))) is not None
        assert dict(matplotlib.rcParams) != before
    assert dict(matplotlib.rcParams) == before


def test_numbers_behind_the_pictures():
    assert smoothed([1, 2, 3, 4], window=2) == [1, 1.5, 2.5, 3.5]
    assert [quantile([5, 1, 3], q) for q in (0, 0.5, 0.99)] == [1, 3, 5]
    times, rates = rates_of([(1, 10), (2, 10), (9, 10)], wall_s=10, window_s=5, num=10)
    assert times == list(range(1, 11))
    assert rates == [10, 10, 20 / 3, 5, 4, 2, 0, 0, 2, 2]
    assert step_rates([(1, 99), (3, 10), (5, 30)], window=5) == ([3, 5], [5, 10])
    assert step_rates([(1, 99)]) == ([], [])
