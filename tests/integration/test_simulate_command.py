"""`laminar simulate` as a user meets it: every flag has an effect, every mistake one sentence and exit code 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.cli.main import main

SMALL = (
    "work.num_steps=2",
    "work.warmup_steps=1",
    "work.groups_per_step=16",
    "work.mini_batches=4",
    "cluster.train_gpus=4",
    "cluster.rollout_gpus=4",
    "batch_trajectories=64",
)


def simulate(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "laminar.cli.main", "simulate", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def measures(*args: str) -> dict[str, float]:
    result = simulate(*SMALL, *args, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["measures"]


def test_a_run_prints_what_it_achieved_and_writes_what_a_real_run_writes(tmp_path: Path):
    out = tmp_path / "run"
    result = simulate(*SMALL, "--out", str(out))
    assert result.returncode == 0, result.stderr
    assert "tokens per second" in result.stdout
    assert {path.name for path in out.iterdir()} >= {"events.jsonl", "simulation.yaml", "trace.json", "plots"}
    again = simulate(str(out / "simulation.yaml"), "--out", str(tmp_path / "again"))
    assert again.returncode == 0, again.stderr
    assert (out / "events.jsonl").read_bytes() == (tmp_path / "again" / "events.jsonl").read_bytes()
    assert simulate(*SMALL, "--out", str(out)).returncode == 2

    traced = measures("--trace", str(out))
    assert traced["tokens_per_s"] == pytest.approx(measures()["tokens_per_s"], rel=0.3)


def test_settings_change_the_result():
    assert measures("seed=1")["tokens_per_s"] != measures()["tokens_per_s"]
    assert measures("schedule=sync", "batch_trajectories=null")["staleness_max"] == 0


def test_a_dry_run_of_repack_prints_moves_and_makes_none():
    result = simulate(*SMALL, "--dry-run-repack")
    assert "would move replica-" in result.stdout
    assert "0   replicas freed" in result.stdout


def test_a_published_figure_comes_as_rows_and_as_a_picture(tmp_path: Path):
    rows = json.loads(simulate("paper", "--figure", "18", "--json").stdout)
    assert {row["machines"] for row in rows} == {4, 8, 16, 32, 64, 128}
    assert all(0.9 < row["ratio"] < 1.1 for row in rows)
    result = simulate("paper", "--figure", "18", "--out", str(tmp_path))
    assert "paper_broadcast_s" in result.stdout
    assert (tmp_path / "figure-18.png").stat().st_size > 10_000


def test_faults_name_what_they_did_and_keep_the_log_of_one_seed(tmp_path: Path):
    result = simulate("--faults", "20", "--seeds", "3:5")
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("nothing violated") == 2
    only = simulate("--faults", "20", "--seeds", "3:4", "--schedule", "laminar", "--out", str(tmp_path / "seed"))
    assert "laminar" in only.stdout
    assert (tmp_path / "seed" / "trace.json").is_file()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["work.numsteps=3"], "work.numsteps is not a known key; did you mean num_steps?"),
        (["cluster.rollout_gpus=9", "cluster.tensor_parallel=2"], "not a multiple of cluster.tensor_parallel"),
        (["max_lag=2"], "max_lag goes with schedule: partial"),
        (["cluster.model=72B"], "raise cluster.tensor_parallel"),
        (["nowhere.yaml"], "nowhere.yaml does not exist"),
        (["paper"], "needs --figure"),
        (["paper", "--figure", "7"], "needs --figure"),
        (["paper", "--figure", "18", "seed=3"], "takes no override"),
        (["paper", "--figure", "18", "--model", "7B"], "--model does not go with this figure"),
        (["paper", "--figure", "11", "--model", "8B"], "--model 8B is not one of"),
        (["--faults", "20", "--seeds", "5:2"], "--seeds 5:2 must look like"),
        (["--faults", "20", "--seeds", "0:1", "seed=3"], "takes no override"),
        (["--faults", "20", "--seeds", "0:2", "--out", "x"], "keeps the events of one seed"),
        (["--faults", "-1"], "must be 0 or more"),
        (["--trace", "nowhere"], "nowhere has no finished trajectory"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(
    args: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["laminar", "simulate", *args])
    with pytest.raises(SystemExit) as left:
        main()
    told = capsys.readouterr()
    assert left.value.code == 2
    assert sentence in told.err
    assert told.err.count("\n") == 1
