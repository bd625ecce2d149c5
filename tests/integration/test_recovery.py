"""Parts of a running job die and freeze while the others go on, and nothing is lost."""

import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import run_kit as kit

from laminar.chaos.faults import Fault, FaultKind
from laminar.chaos.session import ChaosSession, Story

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PARTS = ["replica-0", "relay", "manager", "data", "trainer"]

ENDLESS = (*kit.SMALL, "trainer.num_steps=100000", "trainer.checkpoint.every_steps=5", "evaluation.num_prompts=0")
"""Whatever is done to it takes as long as it takes on this machine; then it is told to stop."""


def strike_all(run: Path, log: Path, process: subprocess.Popen[bytes], kind: FaultKind) -> list[Story]:
    """Each part in turn, once the one before works again and a step was made since."""
    session = ChaosSession(run)
    stories = []
    for part in PARTS:
        steps = kit.last_step(run)
        kit.wait_for("a further step", lambda steps=steps: kit.last_step(run) != steps, process, log)
        fault = Fault(kind=kind, target=part)
        stories.append(session.follow(fault, *session.strike(fault), deadline_s=kit.DEADLINE_S))
    return stories


def stop_well(run: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    """The job still makes steps; it is stopped, and its ledger is sound."""
    steps = len(kit.events(run, "step"))
    kit.wait_for("further steps", lambda: len(kit.events(run, "step")) >= steps + 3, process, log)
    process.terminate()
    assert process.wait(kit.DEADLINE_S) == 128 + signal.SIGTERM, log.read_text()
    report = kit.audit(run)
    assert report["problems"] == []
    assert report["counts"]["trained"] > 0


def test_each_part_is_killed_and_comes_back_while_the_others_go_on(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    with kit.training(str(kit.RECIPE), *ENDLESS, "--out", str(run), log=log) as process:
        kit.wait_for("a checkpoint", lambda: kit.events(run, "checkpoint"), process, log)
        newest, versions = relay_status(run)
        assert newest == max(versions)
        stories = strike_all(run, log, process, FaultKind.KILL)
        stop_well(run, process, log)
    assert all(story.recovery.detected_s is not None for story in stories)
    trainer = stories[PARTS.index("trainer")]
    assert 0 <= trainer.recovery.steps_redone <= 5, "it goes on from the newest checkpoint"
    lives = [event["incarnation"] for event in kit.events(run, "service_ready") if event["service"] == "relay"]
    assert lives == [1, 2]
    published = [event["version"] for event in kit.events(run, "published")]
    assert len(published) - len(set(published)) <= 1, "only the restarted relay gets a version again"
    check_second_life(kit.events(run), "replica-0")


def check_second_life(events: list[dict[str, Any]], replica: str) -> None:
    """It loaded the newest weights before it got work."""
    second_life = [e for e in events if e.get("replica_id") == replica and e.get("incarnation") == 2]
    started = next(e["t"] for e in second_life if e["kind"] == "replica_started")
    published = max(e["version"] for e in events if e["kind"] == "published" and e["t"] < started)
    pulled = next(e for e in second_life if e["kind"] == "pulled")
    claimed = next(e for e in events if e["kind"] == "claimed" and e["lease_id"].startswith(f"{replica}/2/"))
    assert pulled["version"] >= published
    assert pulled["t"] < claimed["t"]
    assert claimed["version"] >= pulled["version"]


def test_each_part_freezes_and_is_replaced_within_the_time_that_the_recipe_gives_it(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    patience = ("manager.suspect_after_s=1.5", "manager.dead_after_s=3")
    with kit.training(str(kit.RECIPE), *ENDLESS, *patience, "--out", str(run), log=log) as process:
        kit.wait_for("a checkpoint", lambda: kit.events(run, "checkpoint"), process, log)
        stories = strike_all(run, log, process, FaultKind.FREEZE)
        stop_well(run, process, log)
    for story in stories:
        assert story.recovery.detected_s is not None
        assert story.recovery.detected_s > 2.0, f"{story.victim.name} was given up too soon"


def relay_status(run: Path) -> tuple[int, list[int]]:
    """The newest version that `laminar relay status` names, and all versions in its table."""
    asked = subprocess.run(kit.laminar("relay", "status", str(run)), capture_output=True, text=True, timeout=60)
    assert asked.returncode == 0, asked.stderr
    newest, *_ = re.findall(r"^newest version (\d+)", asked.stdout)
    return int(newest), [int(line.split()[0]) for line in asked.stdout.splitlines()[2:]]


ENGINE = '''
import os
from pathlib import Path
from laminar.engines.rules import ScriptedEngineRules
from laminar.engines.scripted_engine import ScriptedEngine


class OnlyOneStarts(ScriptedEngine):
    """Whoever makes the file first works; every other process fails at its start."""

    def __init__(self, model_path, folder):
        super().__init__(ScriptedEngineRules(max_running=16, kv_capacity_tokens=8192, vocab=12))
        self._folder = Path(folder)

    async def start(self):
        try:
            os.close(os.open(self._folder / "taken", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            raise RuntimeError("this accelerator is broken") from None
        await super().start()
'''


def test_a_replica_that_fails_at_every_start_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    (tmp_path / "broken_engine.py").write_text(ENGINE)
    recipe = tmp_path / "broken.yaml"
    recipe.write_text(kit.RECIPE.read_text().replace("path: gcd/model", f"path: {kit.RECIPE.parent / 'gcd' / 'model'}"))
    engine = "{kind: custom, path: 'broken_engine:OnlyOneStarts', options: {folder: '" + str(tmp_path) + "'}}"
    broken = ("manager.max_restarts=2", "manager.backoff_s=0.1", "manager.repack.enabled=false")
    settings = (*ENDLESS, *broken, f"rollout.engine={engine}")
    with kit.training(str(recipe), *settings, "--out", str(run), log=log) as process:
        kit.wait_for("a replica given up", lambda: kit.events(run, "replica_retired"), process, log)
        stop_well(run, process, log)
    (retired,) = kit.events(run, "replica_retired")
    assert "3 failures in a row" in retired["reason"]
    assert "this accelerator is broken" in retired["reason"]
