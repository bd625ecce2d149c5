"""`laminar train`: check everything that can be checked, then start processes."""

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from laminar.cli import exporting, watching
from laminar.config.loading import dump_config, load_recipe
from laminar.config.run_config import RunConfig
from laminar.schema.errors import UserError

if TYPE_CHECKING:
    from laminar.cluster.run_folder import RunFacts


def train(
    recipe: Path | None,
    overrides: Sequence[str],
    *,
    out: Path | None,
    resume: Path | None,
    overwrite: bool,
    explain: bool,
    plain: bool,
) -> None:
    """Train from a recipe, or go on with a run."""
    if resume is not None:
        _resume(resume, ([str(recipe)] if recipe else []) + list(overrides), out, plain)
        return
    if recipe is None:
        raise UserError("give a recipe, e.g. laminar train recipes/gcd.yaml, or --resume RUN")
    config = load_recipe(recipe, overrides)
    _extend_module_path((str(recipe.resolve().parent), str(Path.cwd())))
    _check(config)
    if explain:
        _explain(config)
        return
    from laminar.cluster import instance, run_folder

    instance.check(config.cluster.address)
    folder = out or Path("runs") / recipe.stem
    facts = run_folder.create(folder, recipe, config, overwrite=overwrite)
    _run(config, folder, facts, None, plain)


def _resume(folder: Path, overrides: list[str], out: Path | None, plain: bool) -> None:
    from laminar.cluster import instance, run_folder
    from laminar.trainer.checkpoints import newest_step

    if out is not None:
        raise UserError("--resume goes on in its own folder; leave --out away")
    facts = run_folder.read_facts(folder)
    config = load_recipe(folder / "config.yaml", overrides)
    _extend_module_path(facts.module_path)
    _check(config)
    instance.check(config.cluster.address)
    with run_folder.locked(folder):
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    # Without a checkpoint the run begins anew at step 0, with the prompts that it had drawn.
    _run(config, folder, facts, newest_step(folder / run_folder.CHECKPOINTS) or 0, plain)


def _run(config: RunConfig, folder: Path, facts: "RunFacts", resume_step: int | None, plain: bool) -> None:
    from laminar.cluster import run_folder
    from laminar.cluster.training_run import train as train_run
    from laminar.dashboard.watching import watch

    since = time.time()

    async def show(over: asyncio.Event) -> None:
        await watch(folder, over, live=False if plain else None, since=since, keep_metrics=True)

    with run_folder.locked(folder):
        try:
            train_run(config, folder, facts, resume_step, show)
            exporting.export(folder, folder / run_folder.EXPORT, replace=True)
        finally:
            watching.report(folder)


def _extend_module_path(entries: Sequence[str]) -> None:
    """A task or rule of the user's lies beside the recipe or in the working directory."""
    sys.path[:0] = [entry for entry in entries if entry not in sys.path]


def _check(config: RunConfig) -> None:
    """Everything that a process would trip over later, in one sentence now."""
    from laminar.config.explain import model_facts
    from laminar.tasks.loading import build_task
    from laminar.tasks.tokenizer import load_tokenizer

    model_facts(config.model.path)
    load_tokenizer(config.model.path)
    task = build_task(config.task.path, config.task.options)
    if not task.problems("train"):
        raise UserError(f"task.path: {config.task.path} has no problems to train on")
    if config.evaluation.num_prompts and not task.problems("heldout"):
        raise UserError(f"task.path: {config.task.path} has no held-out problems; set evaluation.num_prompts=0")


def _explain(config: RunConfig) -> None:
    from laminar.config.explain import explain, model_facts

    sys.stdout.write(explain(config, model_facts(config.model.path)) + "\n")
