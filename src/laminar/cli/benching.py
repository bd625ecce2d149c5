"""`laminar bench`: measure this machine and this installation."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml
from msgspec.structs import asdict

from laminar.schema.errors import UserError

if TYPE_CHECKING:
    from laminar.engines.benchmark import MachineReport

DEVICE: Final = re.compile(r"cpu|cuda(:\d+)?")


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
        step = f"the longest step meanwhile took {medians['longest_step_s']:.1f} s"
        _say(sys.stdout, f"{name:<16} {told}; {step}")
    _say(sys.stdout, f"{'undisturbed':<16} a step takes {result['undisturbed_step_s']:.1f} s")
    resumed_s = result["whole_job"]["first_step_after_resume_s"]
    _say(sys.stdout, f"{'whole job':<16} a step {resumed_s:.1f} s after its resume began")


def engine(model: Path | None, *, device: str, dtype: str, out: Path | None, as_json: bool) -> None:
    """Measure this machine and print it; with `out` also write it as settings of a simulation."""
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"--dtype {dtype} is not known; it is float32 or bfloat16")
    if not DEVICE.fullmatch(device):
        raise UserError(f"--device {device} is not known; it is cpu, cuda or cuda:N")
    if model is not None and not (model / "config.json").is_file():
        raise UserError(f"{model} has no config.json; give the folder of a model")
    if out is not None and out.exists():
        raise UserError(f"{out} exists already; give --out a file that is to be made")
    from laminar.engines import benchmark

    if device != "cpu" and not benchmark.has_cuda(device):
        raise UserError(f"--device {device} is not on this machine")
    report = benchmark.measure_machine(model, device=device, dtype="bfloat16" if dtype == "bfloat16" else "float32")
    settings = _simulation_of(report)
    if as_json:
        steps = [{**asdict(step), "factor": step.factor} for step in report.steps]
        _say(sys.stdout, json.dumps({"machine": report.described, **settings, "steps": steps}))
    else:
        _say(sys.stdout, _engine_table(report))
    if out is not None:
        text = yaml.safe_dump(settings, sort_keys=False)
        out.write_text(f"# Measured by laminar bench engine on {report.described}.\n{text}", encoding="utf-8")
        if not as_json:
            _say(sys.stdout, f"simulate it with: laminar simulate {out}")


def _simulation_of(report: "MachineReport") -> dict[str, Any]:
    machine = asdict(report.hardware)
    return {
        "cluster": {"hardware": "this machine", "machine": machine},
        "emulation": {"latency_factor": round(report.latency_factor, 2)},
    }


def _engine_table(report: "MachineReport") -> str:
    hardware = report.hardware
    lines = [
        report.described,
        f"  products         {hardware.flops_per_s / 1e12:>10.3f} TFLOP/s",
        f"  reading memory   {hardware.bandwidth_bytes_per_s / 1e9:>10.1f} GB/s",
        f"  memory           {hardware.memory_bytes / 1e9:>10.1f} GB",
    ]
    for step in report.steps:
        times = f"{1e3 * step.measured_s:.2f} ms, by the formula {1e3 * step.formula_s:.2f} ms"
        lines.append(f"  step of {step.batch:<3} sequences: {times}, {step.factor:.2f} times as long")
    return "\n".join([*lines, f"  emulation.latency_factor: {report.latency_factor:.2f}"])


def _say(stream: object, line: str) -> None:
    print(line, file=stream, flush=True)  # type: ignore[call-overload]
