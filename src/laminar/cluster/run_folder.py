"""The folder of a run: what lies where, and who may write.

    config.yaml    the resolved configuration       events.jsonl   every fact, of all processes here
    run.json       run id, recipe folder            metrics.jsonl  one line per training step
    journal.sqlite prompts, trajectories, ledger    checkpoints/   durable learner states
    summary.json   what came out                    export/        the trained model, Hugging Face format
    plots/         pictures                         trace.json     for Perfetto
    events.M.jsonl the same of another machine M

Invariant: at most one live process trains in a folder.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from laminar.config.loading import dump_config
from laminar.config.run_config import RunConfig
from laminar.schema.errors import UserError

CHECKPOINTS = "checkpoints"
EXPORT = "export"


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a resumed run must know besides its configuration."""

    run_id: str
    recipe: str
    module_path: tuple[str, ...]


def create(folder: Path, recipe: Path, config: RunConfig, *, overwrite: bool) -> RunFacts:
    """Make a fresh run folder; an existing run is refused unless `overwrite`."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "run.json").is_file():
            raise UserError(f"--out {folder} is not empty and holds no run; give a new folder")
        if not overwrite:
            raise UserError(f"--out {folder} holds a run; go on with --resume {folder}, or replace it with --overwrite")
        with locked(folder):
            shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    module_path = (str(recipe.resolve().parent), str(Path.cwd()))
    facts = RunFacts(
        run_id=f"{folder.name}-{secrets.token_hex(4)}", recipe=str(recipe.resolve()), module_path=module_path
    )
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    (folder / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=2) + b"\n")
    return facts


def read_facts(folder: Path) -> RunFacts:
    """What `create` wrote; raises `UserError` if this is no run."""
    try:
        return msgspec.json.decode((folder / "run.json").read_bytes(), type=RunFacts)
    except FileNotFoundError:
        raise UserError(
            f"{folder} holds no run (run.json is missing); give the --out folder of an earlier run"
        ) from None
    except (msgspec.DecodeError, OSError) as error:
        raise UserError(f"{folder / 'run.json'} cannot be read: {error}") from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the kernel lets go when the process ends, however it ends."""
    fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder} is in use by a run that is still alive") from None
        yield
    finally:
        os.close(fd)
