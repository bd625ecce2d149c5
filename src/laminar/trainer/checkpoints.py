"""Durable states of the learner: a folder `step-000010` is complete, or it is not there.

Invariant: a checkpoint is written into a hidden folder, forced to the disk and then renamed; so at any instant, also
after a kill or a power cut, the newest `step-...` folder is whole. Nothing here knows what is inside, but for its
`model/`, a folder in Hugging Face format.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from laminar.config.training import CheckpointConfig
from laminar.schema.errors import RunFailed, UserError
from laminar.trainer.ports import Checkpoint

MODEL_FOLDER = "model"
"""Part of a checkpoint that is a model in Hugging Face format."""

_COMPLETE = re.compile(r"step-(\d{6,})")
_HIDDEN = ".tmp-"


def complete_checkpoints(folder: Path) -> list[Checkpoint]:
    """All complete ones, the oldest first."""
    if not folder.is_dir():
        return []
    matches = ((_COMPLETE.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(Checkpoint(step=int(match[1]), path=path) for match, path in matches if match)


def newest_step(folder: Path) -> int | None:
    """Step of the newest complete checkpoint in a run's folder of checkpoints."""
    found = complete_checkpoints(folder)
    return found[-1].step if found else None


def model_folder(folder: Path, step: int) -> Path | None:
    """The model of a complete checkpoint, in Hugging Face format; None if there is none of this step."""
    found = next((one for one in complete_checkpoints(folder) if one.step == step), None)
    return found.path / MODEL_FOLDER if found else None


class Checkpoints:
    """The checkpoints of one run; only one process writes them. Implements `ports.CheckpointStore`."""

    def __init__(self, folder: Path, rules: CheckpointConfig) -> None:
        self._folder = folder
        self._rules = rules

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint, if there is one."""
        found = complete_checkpoints(self._folder)
        return found[-1] if found else None

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Have `write` fill an empty folder, make it the checkpoint of `step`, and delete old ones."""
        final = self._folder / f"step-{step:06d}"
        with self._one_sentence_if_it_fails(step):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            with _atomic_folder(final) as hidden:
                write(hidden)
            for old in complete_checkpoints(self._folder)[: -self._rules.keep_last]:
                _delete(old.path)
        return final

    def _sweep(self) -> None:
        """Remove what a killed writer left."""
        for path in self._folder.glob(f"{_HIDDEN}*"):
            shutil.rmtree(path)

    @contextmanager
    def _one_sentence_if_it_fails(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            left = newest_step(self._folder)
            raise RunFailed(
                f"the checkpoint of step {step} could not be written to {self._folder}: {error.strerror or error}; "
                f"make room there and resume: {'no checkpoint' if left is None else f'that of step {left}'} is complete"
            ) from error


def export_hf(checkpoint: Path, folder: Path) -> None:
    """Copy the model of a checkpoint to a new folder that `AutoModelForCausalLM.from_pretrained` loads."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already; give a new folder for the exported model")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _atomic_folder(folder) as hidden:
            shutil.copytree(checkpoint / MODEL_FOLDER, hidden, dirs_exist_ok=True)
    except OSError as error:
        raise RunFailed(f"the model could not be exported to {folder}: {error.strerror or error}") from error


@contextmanager
def _atomic_folder(final: Path) -> Iterator[Path]:
    """A hidden folder to fill, which becomes `final` in one go if nothing goes wrong, and else disappears."""
    hidden = final.with_name(f"{_HIDDEN}{final.name}")
    hidden.mkdir()
    try:
        yield hidden
        for path in sorted(hidden.rglob("*"), reverse=True):
            _force_to_disk(path)
        _force_to_disk(hidden)
        if final.exists():
            _delete(final)
        hidden.rename(final)
        _force_to_disk(final.parent)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _delete(folder: Path) -> None:
    """Hide first, so that a half-deleted folder is never taken for a complete one."""
    hidden = folder.with_name(f"{_HIDDEN}old-{folder.name}")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _force_to_disk(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
