"""Facts about how benchmarks/quickstart.py turns runs into numbers."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def quickstart():
    spec = importlib.util.spec_from_file_location("benchmark_quickstart", BENCHMARKS / "quickstart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # msgspec looks annotations up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def step(quickstart, number, end_s, tokens_max=100.0):
    return quickstart.StepTime(
        step=number, end_s=end_s, wait_s=1.0, train_s=2.0, tokens_mean=20.0, tokens_max=tokens_max
    )


def trace(quickstart, accuracies, *, seed=0):
    """Steps of 3 s, an evaluation after every second one, known a second later."""
    return quickstart.Trace(
        seed=seed,
        startup_s=10.0,
        steps=[step(quickstart, number, 3.0 * number) for number in range(1, 2 * len(accuracies) - 1)],
        evaluations=[
            quickstart.Measured(step=2 * index, at_s=6.0 * index + 1, accuracy=accuracy)
            for index, accuracy in enumerate(accuracies)
        ],
    )


def test_the_target_is_reached_at_the_first_evaluation_at_or_above_it(quickstart):
    summary = quickstart.run_summary(trace(quickstart, [0.1, 0.79, 0.8, 0.7, 0.9]), 0.8)
    assert summary["to_target_s"] == 13.0
    assert summary["to_target_from_process_start_s"] == 23.0
    assert summary["to_weights_s"] == 12.0
    assert summary["to_target_steps"] == 4
    assert summary["seconds_per_step"] == 3.0


def test_a_target_reached_before_the_first_step_took_none(quickstart):
    summary = quickstart.run_summary(trace(quickstart, [0.9, 0.9]), 0.8)
    assert (summary["to_target_steps"], summary["to_weights_s"]) == (0, 0.0)


def test_a_run_without_evaluation_still_has_seconds_per_step(quickstart):
    quick = quickstart.Trace(seed=0, startup_s=1.0, steps=[step(quickstart, 1, 4.0)], evaluations=[])
    summary = quickstart.run_summary(quick, 0.8)
    assert summary["to_target_s"] is None
    assert summary["seconds_per_step"] == 4.0


def test_a_run_that_never_reaches_the_target_counts_as_infinitely_slow(quickstart):
    assert quickstart.median([3.0, None, 5.0]) == 5.0
    assert quickstart.median([3.0, None, None]) is None
    assert quickstart.median([3.0, None]) is None


def test_the_ratio_says_how_many_times_longer(quickstart):
    slow, fast = {"a": 30.0, "b": None, "c": 3.0}, {"a": 10.0, "b": 1.0, "c": None}
    assert quickstart.ratios(slow, fast) == {"a": 3.0, "b": None, "c": None}


def test_the_profile_averages_the_steps_just_before_an_accuracy(quickstart):
    long = trace(quickstart, [0.1, 0.2, 0.3, 0.4, 0.5])
    assert quickstart.profile(long, 0.9) is None
    assert quickstart.profile(long, 0.4) == {"wait_s": 1.0, "train_s": 2.0, "tokens_mean": 20.0, "tokens_max": 100.0}


def test_thread_counts_are_compared_per_token_of_the_longest_answer(quickstart):
    slow_but_long = [step(quickstart, 1, 30.0, tokens_max=300.0)]
    fast_but_short = [step(quickstart, 1, 15.0, tokens_max=100.0)]
    assert quickstart.seconds_per_longest_token(slow_but_long) < quickstart.seconds_per_longest_token(fast_but_short)


def test_laminars_clock_starts_with_the_first_training_prompts(quickstart):
    def event(t, kind, **fields):
        return {"t": t, "source": "test", "kind": kind, **fields}

    claim = {"lease_id": "replica-0/1/1", "version": 0, "num_trajectories": 64}
    times = {"wait_s": 2.0, "train_s": 1.0, "publish_s": 0.5}
    events = [
        event(100.0, "run_started", run_id="r", name="r", num_replicas=1, num_steps=1),
        event(108.0, "claimed", purpose="evaluation", **claim),
        event(110.0, "claimed", purpose="training", **claim),
        event(109.5, "evaluation", version=0, accuracy=0.1, num=64),
        event(117.0, "evaluation", version=1, accuracy=0.9, num=64),
        event(113.5, "step", step=1, response_tokens_mean=20.0, response_tokens_max=55, **times),
    ]
    told = quickstart.laminar_trace(events, seed=7, spawned_at=98.0)
    assert told == quickstart.Trace(
        seed=7,
        startup_s=12.0,
        steps=[
            quickstart.StepTime(step=1, end_s=3.5, wait_s=2.0, train_s=1.5, tokens_mean=20.0, tokens_max=55),
        ],
        evaluations=[
            quickstart.Measured(step=0, at_s=0.0, accuracy=0.1),
            quickstart.Measured(step=1, at_s=7.0, accuracy=0.9),
        ],
    )


def test_a_failed_run_ends_the_benchmark_with_its_log(quickstart, tmp_path):
    with pytest.raises(SystemExit, match="no such model"):
        quickstart.finish([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "run.log")


def test_only_the_peer_imports_trl():
    assert "trl" not in {
        line.split()[1].partition(".")[0]
        for line in (BENCHMARKS / "quickstart.py").read_text().splitlines()
        if line.startswith(("import ", "from "))
    }


def test_the_missing_peer_is_named_with_its_remedy(quickstart, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quickstart.py"])
    if importlib.util.find_spec("trl") is not None:
        pytest.skip("TRL is installed here")
    with pytest.raises(SystemExit):
        quickstart.arguments()
    assert "--skip-trl" in capsys.readouterr().err
