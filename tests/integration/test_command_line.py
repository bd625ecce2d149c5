"""The command line in processes of its own: what the user got wrong is one sentence and exit code 2, soon."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import run_kit as kit

MODEL = kit.RECIPE.parent / "gcd" / "model"


def run(*args: str, timeout_s: float = 60.0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(kit.laminar(*args), capture_output=True, text=True, timeout=timeout_s, cwd=cwd)


def mistake(*args: str, cwd: Path | None = None) -> str:
    """The one sentence of a command that must fail with exit code 2."""
    done = run(*args, cwd=cwd)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    (sentence,) = done.stderr.strip().splitlines()
    assert sentence.startswith("laminar: ")
    return sentence


def test_help_comes_at_once_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nsys.argv = ['laminar', '--help']\nfrom laminar.cli.main import app\n"
        "try:\n    app()\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'ray', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([kit.laminar()[0], "-c", code], capture_output=True, text=True, timeout=60)
    assert "Post-train a model" in done.stdout
    assert done.stdout.strip().endswith("[]")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trainer.num_step=3", "trainer.num_step is not a known key; did you mean num_steps?"),
        ("trainer.num_steps=-1", "trainer.num_steps"),
        ("data.max_groups_ahead=2", "data.max_groups_ahead is 2"),
        ("model.path=elsewhere", "elsewhere has no config.json"),
        ("task.path=laminar.tasks.gcd:GcdTasks", "GcdTasks"),
        ("task.path=no_such_module:Task", "no_such_module"),
        ("task.options={largest: 3}", "largest"),
        ("rollout.engine.kind=torchh", "rollout.engine"),
        ("cluster.address=127.0.0.1:1", "no Ray cluster answers at"),
        ("nonsense", "must look like"),
    ],
)
def test_a_mistake_in_the_recipe_is_named_before_any_process_starts(override: str, told: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert told in mistake("train", str(kit.RECIPE), override, "--out", str(out))
    assert not out.exists()


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert "no.yaml does not exist" in mistake("train", str(tmp_path / "no.yaml"))
    bare = tmp_path / "model"
    bare.mkdir()
    (bare / "config.json").write_text((MODEL / "config.json").read_text())
    assert "safetensors" in mistake("train", str(kit.RECIPE), f"model.path={bare}", "--out", str(tmp_path / "run"))
    assert "run.json" in mistake("train", "--resume", str(tmp_path))
    assert "journal" in mistake("inspect", str(tmp_path), "audit")
    assert "events.jsonl" in mistake("status", str(tmp_path))
    assert "checkpoint" in mistake("export", str(tmp_path), str(tmp_path / "out"))


def test_a_run_folder_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    assert "holds no run" in mistake("train", str(kit.RECIPE), "--out", str(out), "--overwrite")
    (out / "run.json").write_text("{}")
    assert "--overwrite" in mistake("train", str(kit.RECIPE), "--out", str(out))
    assert (out / "thesis.tex").exists()


def test_explain_prints_derived_sizes_and_starts_nothing(tmp_path: Path) -> None:
    done = run("train", str(kit.RECIPE), "--explain", "rollout.num_replicas=5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "5 replicas" in done.stdout
    assert list(tmp_path.iterdir()) == []


BROKEN_REWARD = """
def reward(fields, answer):
    raise ZeroDivisionError("no such unit")
"""


@pytest.mark.slow
def test_a_reward_that_always_raises_ends_the_run_with_its_text(tmp_path: Path) -> None:
    (tmp_path / "broken_reward.py").write_text(BROKEN_REWARD)
    prompts = [json.dumps({"id": str(n), "prompt": f"{n},2:"}) for n in range(10, 60)]
    (tmp_path / "train.jsonl").write_text("\n".join(prompts))
    recipe = tmp_path / "broken.yaml"
    recipe.write_text(
        f"model: {{path: {MODEL}}}\n"
        "task: {path: 'laminar.tasks.prompt_files:PromptFileTask', "
        f"options: {{train: {tmp_path}/train.jsonl, reward: 'broken_reward:reward'}}}}\n"
        "data: {group_size: 8}\nrollout: {num_replicas: 1, batch_trajectories: 64, max_new_tokens: 32}\n"
        "evaluation: {num_prompts: 0}\n"
    )
    started_s = time.monotonic()
    done = run("train", str(recipe), "--out", str(tmp_path / "run"), "--plain", timeout_s=kit.DEADLINE_S)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "no such unit" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert time.monotonic() - started_s < kit.DEADLINE_S


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["scale", "nowhere", "--replicas", "2"], "nowhere is not a run that is alive"),
        (["chaos", "nowhere", "kill", "relay"], "nowhere is not a run that is alive"),
        (["chaos", "nowhere"], "give what to do and to whom"),
        (["chaos", "nowhere", "kill", "relay", "--seconds", "3"], "--seconds goes with freeze and slow"),
        (["chaos", "nowhere", "kill", "relay", "--random"], "--random chooses the faults itself"),
        (["bench", "recovery", "nowhere.yaml"], "nowhere.yaml is not there"),
    ],
)
def test_commands_for_live_runs_say_what_is_missing(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    assert sentence in mistake(*arguments, cwd=tmp_path)


SMALL_SHM = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && fallocate -l 63m /dev/shm/filler && exec "$@"'


def may_mount() -> bool:
    """Whether this user can have a mount namespace, and with it a small /dev/shm, of its own."""
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "--mount", "true"], capture_output=True).returncode == 0


FULL_DISK = """
set -u; run=$1; shift
mount -t tmpfs -o size=9m tmpfs "$run"
"$@" train RECIPE SETTINGS --out "$run" --plain; echo "first: $?"
mount -o remount,size=1g "$run"
"$@" train --resume "$run" --plain; echo "second: $?"
"$@" inspect "$run" audit; echo "audit: $?"
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not may_mount(), reason="needs the right to mount a small disk of its own")
def test_a_full_disk_ends_the_run_with_a_sentence_and_with_room_it_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    settings = " ".join([*kit.SMALL, "trainer.num_steps=8", "trainer.checkpoint.every_steps=1"])
    script = FULL_DISK.replace("RECIPE", str(kit.RECIPE)).replace("SETTINGS", settings)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(run), *kit.laminar()],
        capture_output=True,
        text=True,
        timeout=2 * kit.DEADLINE_S,
    )
    codes = [line for line in done.stdout.splitlines() if line.startswith(("first", "second", "audit"))]
    assert codes == ["first: 1", "second: 0", "audit: 0"], done.stdout + done.stderr
    (sentence,) = done.stderr.strip().splitlines()
    assert "No space left on device" in sentence or "disk is full" in sentence
    assert "make room" in sentence


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount a small /dev/shm of its own")
def test_a_full_dev_shm_is_one_sentence_that_says_how_much_is_needed(tmp_path: Path) -> None:
    command = kit.laminar("train", str(kit.RECIPE), "--out", str(tmp_path / "run"), "--plain")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", SMALL_SHM, "sh", *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert "/dev/shm has 1 MiB free but Ray's object store needs" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "run").exists(), "nothing was half-written"
