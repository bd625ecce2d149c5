"""`laminar bench engine`: this machine as the simulator's accelerator."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from laminar.cli.main import app
from laminar.config.loading import load_simulation
from laminar.engines import benchmark
from laminar.schema.errors import ConfigError, UserError
from laminar.simulator import rules

TINY: dict[str, Any] = benchmark.DEFAULT_MODEL | {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model, and little to read and multiply: what is measured is not the point here."""
    monkeypatch.setitem(benchmark.LARGE, "cpu", (1 << 20, 64))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "engine", *arguments])


def test_what_is_measured_is_a_preset_that_the_simulator_takes(model: Path, tmp_path: Path):
    out = tmp_path / "machine.yaml"
    told = bench(str(model), "--out", str(out), "--json")
    assert told.exit_code == 0, told.output
    report = json.loads(told.stdout)
    config = load_simulation(out, ["emulation.kv_capacity_tokens=20000"])
    assert config.cluster.hardware == "this machine"
    assert config.emulation.latency_factor == report["emulation"]["latency_factor"] > 0
    assert [step["batch"] for step in report["steps"]] == [1, 8, 32]
    assert all(step["measured_s"] > 0 and step["formula_s"] > 0 for step in report["steps"])
    pace = rules.pace_of(config)
    weight_bytes = 15.2e9
    expected_s = config.emulation.latency_factor * weight_bytes / report["cluster"]["machine"]["bandwidth_bytes_per_s"]
    assert pace.weights_s == pytest.approx(expected_s)


def test_the_table_names_the_machine_and_says_how_to_go_on(model: Path, tmp_path: Path):
    told = bench(str(model), "--out", str(tmp_path / "machine.yaml"))
    assert "one thread of" in told.stdout
    assert "emulation.latency_factor" in told.stdout
    assert f"laminar simulate {tmp_path / 'machine.yaml'}" in told.stdout.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--dtype", "int8"], "--dtype int8 is not known"),
        (["--device", "tpu"], "--device tpu is not known"),
        (["--device", "cuda:99"], "--device cuda:99 is not on this machine"),
        (["nowhere"], "nowhere has no config.json"),
        (["--out", __file__], "exists already"),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments: list[str], sentence: str):
    error = bench(*arguments).exception
    assert isinstance(error, UserError)
    assert sentence in str(error)


def test_this_machine_and_its_numbers_go_together():
    with pytest.raises(ConfigError, match="laminar bench engine --out FILE"):
        load_simulation(None, ["cluster.hardware=this machine"])
    with pytest.raises(ConfigError, match="go together"):
        load_simulation(None, ["cluster.machine={flops_per_s: 1, bandwidth_bytes_per_s: 1, memory_bytes: 1}"])
