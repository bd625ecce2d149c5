"""Checkpoints are complete or not there, whatever happens while they are written."""

import errno
import hashlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laminar.config.training import CheckpointConfig
from laminar.schema.errors import RunFailed, UserError
from laminar.trainer.checkpoints import Checkpoints, export_hf, newest_step


def store(folder: Path, keep_last: int = 2) -> Checkpoints:
    return Checkpoints(folder, CheckpointConfig(keep_last=keep_last))


def write_state(text: str):
    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(text)
        (folder / "learner").write_text(text)

    return write


def test_the_newest_complete_checkpoint_is_found_and_old_ones_are_deleted(tmp_path):
    checkpoints = store(tmp_path / "run" / "checkpoints")
    assert checkpoints.newest() is None
    assert newest_step(tmp_path / "run" / "checkpoints") is None
    for step in (1, 2, 10, 200):
        path = checkpoints.save(step, write_state(str(step)))
        assert checkpoints.newest() == (step, path)
    assert newest_step(tmp_path / "run" / "checkpoints") == 200
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["step-000010", "step-000200"]
    assert (path / "learner").read_text() == "200"


def test_a_step_that_is_saved_again_replaces_its_checkpoint(tmp_path):
    store(tmp_path).save(5, write_state("old"))
    path = store(tmp_path).save(5, write_state("new"))
    assert (path / "learner").read_text() == "new"
    assert os.listdir(tmp_path) == ["step-000005"]


def test_what_a_killed_writer_left_is_ignored_and_removed_by_the_next_save(tmp_path):
    store(tmp_path).save(5, write_state("whole"))
    write_half = tmp_path / ".tmp-step-000006"
    write_half.mkdir()
    (write_half / "learner").write_text("ha")
    assert store(tmp_path).newest().step == 5
    store(tmp_path).save(6, write_state("whole"))
    assert sorted(os.listdir(tmp_path)) == ["step-000005", "step-000006"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing_behind(tmp_path):
    def write(folder: Path) -> None:
        (folder / "half").write_text("ha")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoints = store(tmp_path)
    checkpoints.save(5, write_state("whole"))
    with pytest.raises(RunFailed, match=r"step 6 .*No space left on device; .*that of step 5 is complete"):
        checkpoints.save(6, write)
    assert os.listdir(tmp_path) == ["step-000005"]


def test_a_write_that_fails_for_another_reason_leaves_nothing_behind_either(tmp_path):
    def write(folder: Path) -> None:
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        store(tmp_path).save(6, write)
    assert os.listdir(tmp_path) == []


def test_an_export_is_a_copy_of_the_model_and_never_overwrites(tmp_path):
    path = store(tmp_path / "checkpoints").save(5, write_state("whole"))
    export_hf(path, tmp_path / "out")
    assert (tmp_path / "out" / "weights").read_text() == "whole"
    with pytest.raises(UserError, match="exists already"):
        export_hf(path, tmp_path / "out")


SAVE_FOR_EVER = """
import hashlib, itertools, os, sys
from pathlib import Path
from laminar.config.training import CheckpointConfig
from laminar.trainer.checkpoints import Checkpoints, newest_step

folder = Path(sys.argv[1])

def write(folder):
    (folder / "model").mkdir()
    for name in ("model/a", "model/b", "c"):
        data = os.urandom(200_000)
        (folder / name).write_bytes(data)
        (folder / f"{name}.sha").write_text(hashlib.sha256(data).hexdigest())

print("ready", flush=True)
for step in itertools.count((newest_step(folder) or 0) + 1):
    Checkpoints(folder, CheckpointConfig(keep_last=2)).save(step, write)
"""


def test_after_a_kill_at_any_instant_the_newest_checkpoint_is_whole(tmp_path):
    rng = random.Random(0)
    last = 0
    for _ in range(8):
        with subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, tmp_path], stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            time.sleep(rng.uniform(0, 0.15))
            child.send_signal(signal.SIGKILL)
        newest = store(tmp_path).newest()
        if newest is None:
            continue
        assert newest.step >= last
        last = newest.step
        for name in ("model/a", "model/b", "c"):
            digest = hashlib.sha256((newest.path / name).read_bytes()).hexdigest()
            assert digest == (newest.path / f"{name}.sha").read_text()
    assert last > 0


def test_a_file_that_cannot_grow_is_a_full_disk_too(tmp_path):
    """A real failing write, by a limit of the kernel on file sizes."""

    def write(folder: Path) -> None:
        (folder / "big").write_bytes(b"x" * 100_000)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(RunFailed, match="step 1 could not be written"):
            store(tmp_path).save(1, write)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == []
