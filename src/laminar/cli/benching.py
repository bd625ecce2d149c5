"""`laminar bench`: measure this machine and this installation."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from laminar.schema.errors import UserError


def recovery(recipe: Path, overrides: Sequence[str], *, repeats: int, as_json: bool) -> None:
    """Kill, freeze and resume a job, and print medians."""
    from laminar.chaos.bench import bench_recovery
    from laminar.config.loading import load_recipe

    if not recipe.is_file():
        raise UserError(f"{recipe} is not there; name a recipe, e.g. laminar bench recovery recipes/gcd.yaml")
    load_recipe(recipe, overrides)
    result = bench_recovery(recipe, overrides, repeats, lambda line: _say(sys.stderr, line))
    if as_json:
        _say(sys.stdout, json.dumps(result))
        return
    for name, medians in result["faults"].items():
        told = f"noticed after {medians['detected_s']:.2f} s, works again after {medians['working_s']:.2f} s"
        _say(sys.stdout, f"{name:<16} {told}, {medians['steps_meanwhile']:.0f} steps meanwhile")
    resumed_s = result["whole_job"]["first_step_after_resume_s"]
    _say(sys.stdout, f"{'whole job':<16} a step {resumed_s:.1f} s after its resume began")


def _say(stream: object, line: str) -> None:
    print(line, file=stream, flush=True)  # type: ignore[call-overload]
