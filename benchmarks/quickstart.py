"""Seconds to the same held-out accuracy: `laminar train recipes/gcd.yaml` and TRL's GRPOTrainer on the same machine.

Same model, task, prompts per step, group size, answer limit, loss, optimizer and evaluation prompts, all read from the
recipe; one run after the other, so that each has the machine to itself. Prints one JSON line. There is no
interpolation: a run has reached the target at its first evaluation at or above it, and `null` means that it never did.

    python benchmarks/quickstart.py                 # three seeds each
    python benchmarks/quickstart.py --quick         # a few steps: seconds per step only
    python benchmarks/quickstart.py --skip-trl --variants two_replicas,one_replica,no_repack

Two clocks: from the start of the process, and from the first training step, which is when the first answer is begun.
TRL's clock stands still during evaluation, which is ours; Laminar evaluates while it trains, and pays for it.
`to_target_s` ends when the accuracy is known, `to_weights_s` when the step that reached it was done.

`--give-up 5` stops a TRL run that has trained five times as long as Laminar's median took to the target; the ratio is
then a lower bound, `trl_over_laminar_at_least`, from the time that TRL trained without reaching it.

`load` is the load average before and after: numbers count only if the first is near 0. A step of TRL costs about as
much as its longest answer, so with --quick look at `tokens_max` in the profile of both before you believe the ratio.
"""

import argparse
import importlib.util
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from laminar.config.loading import load_recipe
from laminar.config.run_config import RunConfig
from laminar.dashboard.summary import accuracy_curve
from laminar.telemetry.metrics import metrics_rows
from laminar.telemetry.reading import Tail, read_events
from laminar.telemetry.vocabulary import Claimed, to_facts

TRL_PEER = Path(__file__).parent / "peers" / "trl_grpo.py"
NO_TRL = "TRL is not installed: pip install -c constraints.txt '.[bench]', or leave it out with --skip-trl"

VARIANTS = {
    "two_replicas": ("rollout.num_replicas=2",),
    "one_replica": ("rollout.num_replicas=1",),
    "no_repack": ("rollout.num_replicas=2", "manager.repack.enabled=false"),
}
"""Laminar with these settings on top of the recipe; the first one asked for is compared with TRL."""

THREAD_COUNTS = (1, 2)
"""TRL gets the better of these, found in a probe."""

PROBE_STEPS = 4
QUICK_STEPS = 10

PROFILE_AT = (0.4, 0.8)
"""Accuracies at which a step is looked at closely: answers grow as the model learns."""

PROFILE_STEPS = 5
"""So many steps before the accuracy was reached are averaged."""

POLL_S = 0.5
INTERRUPTED = 128 + signal.SIGINT
"""Exit code of `laminar train` after Ctrl-C."""


class StepTime(Struct, frozen=True, kw_only=True):
    """One step: its end, how long the learner had to wait for answers (TRL makes them then), how long it learned."""

    step: int
    end_s: float
    wait_s: float
    train_s: float
    tokens_mean: float
    tokens_max: float


class Measured(Struct, frozen=True, kw_only=True):
    """Held-out accuracy after a step, and when it was known."""

    step: int
    at_s: float
    accuracy: float


class Trace(Struct, frozen=True, kw_only=True):
    """A run: all times count from its first step, which began `startup_s` after its process."""

    seed: int
    startup_s: float
    steps: list[StepTime]
    evaluations: list[Measured]

    def reached(self, accuracy: float) -> Measured | None:
        """The first evaluation at or above it."""
        return next((one for one in self.evaluations if one.accuracy >= accuracy), None)

    @property
    def seconds_per_step(self) -> float | None:
        """Over the whole run; None if it was at its target from the start."""
        return self.steps[-1].end_s / len(self.steps) if self.steps else None


def laminar_trace(events: Sequence[dict[str, Any]], *, seed: int, spawned_at: float) -> Trace:
    """A Laminar run from its events; the first step begins when the first prompts of training are claimed."""
    facts = sorted(to_facts(events), key=lambda fact: fact.t)
    begun_at = next(fact.t for fact in facts if isinstance(fact, Claimed) and fact.purpose == "training")
    return Trace(
        seed=seed,
        startup_s=begun_at - spawned_at,
        steps=[
            StepTime(
                step=row["step"],
                end_s=row["t"] - begun_at,
                wait_s=row["wait_s"],
                train_s=row["train_s"] + row["publish_s"],
                tokens_mean=row["response_tokens_mean"],
                tokens_max=row["response_tokens_max"],
            )
            for row in metrics_rows(events)
        ],
        evaluations=[
            Measured(step=one.version, at_s=max(0.0, one.t - begun_at), accuracy=one.accuracy)
            for one in accuracy_curve(facts)
        ],
    )


def run_summary(trace: Trace, target: float) -> dict[str, Any]:
    """One run in numbers."""
    reached = trace.reached(target)
    return {
        "seed": trace.seed,
        "to_target_s": reached and rounded(reached.at_s),
        "to_target_from_process_start_s": reached and rounded(trace.startup_s + reached.at_s),
        "to_weights_s": reached and rounded(_step(trace, reached.step).end_s),
        "to_target_steps": reached and reached.step,
        "startup_s": rounded(trace.startup_s),
        "trained_s": rounded(trace.steps[-1].end_s) if trace.steps else 0.0,
        "steps": len(trace.steps),
        "seconds_per_step": trace.seconds_per_step and rounded(trace.seconds_per_step),
        "accuracy_start": trace.evaluations[0].accuracy if trace.evaluations else None,
        "accuracy_end": trace.evaluations[-1].accuracy if trace.evaluations else None,
        "profile": {str(mark): profile(trace, mark) for mark in PROFILE_AT} | {"all": step_means(trace.steps)},
    }


def profile(trace: Trace, accuracy: float) -> dict[str, float] | None:
    """What a step took in the last steps before this accuracy was measured; None if it never was."""
    reached = trace.reached(accuracy)
    if reached is None:
        return None
    return step_means([one for one in trace.steps if reached.step - PROFILE_STEPS < one.step <= reached.step])


def step_means(steps: Sequence[StepTime]) -> dict[str, float] | None:
    """Means over these steps."""
    if not steps:
        return None
    names = ("wait_s", "train_s", "tokens_mean", "tokens_max")
    return {name: rounded(statistics.fmean(getattr(one, name) for one in steps)) for name in names}


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Medians over the seeds; a run that never reached the target counts as infinitely slow."""
    names = ("to_target_s", "to_target_from_process_start_s", "to_weights_s", "to_target_steps", "seconds_per_step")
    return {name: median(run[name] for run in runs) for name in names}


def median(values: Iterable[float | None]) -> float | None:
    """None stands for infinity."""
    middle = statistics.median(float("inf") if value is None else value for value in values)
    return None if middle == float("inf") else rounded(middle)


def ratios(slow: dict[str, float | None], fast: dict[str, float | None]) -> dict[str, float | None]:
    """How many times longer; None where one of the two never got there."""
    return {
        name: rounded(over / under) if over is not None and (under := fast[name]) else None
        for name, over in slow.items()
    }


def seconds_per_longest_token(steps: Sequence[StepTime]) -> float:
    """What makes steps of different lengths comparable: TRL pads every answer of a step to the longest one."""
    return steps[-1].end_s / sum(one.tokens_max for one in steps)


def rounded(value: float) -> float:
    """Four digits are more than repeat."""
    return float(f"{value:.4g}")


def _step(trace: Trace, step: int) -> StepTime:
    nothing = StepTime(step=0, end_s=0.0, wait_s=0.0, train_s=0.0, tokens_mean=0.0, tokens_max=0.0)
    return next((one for one in trace.steps if one.step == step), nothing)


class Bench:
    """Starts the runs, each in a process of its own and one after the other; `folder` keeps their logs."""

    def __init__(self, recipe: Path, folder: Path, *, target: float, max_steps: int, evaluates: bool) -> None:
        self._recipe, self._folder = recipe, folder
        self._target, self._max_steps, self._evaluates = target, max_steps, evaluates

    def laminar(self, variant: str, seed: int) -> Trace:
        """`laminar train`; stopped at the target."""
        out = self._folder / f"laminar-{variant}-{seed}"
        overrides = [f"seed={seed}", f"trainer.num_steps={self._max_steps}", *VARIANTS[variant]]
        if not self._evaluates:
            overrides.append("evaluation.num_prompts=0")
        command = [sys.executable, "-m", "laminar.cli.main", "train", str(self._recipe), *overrides]
        events = out / "events.jsonl"
        spawned_at = time.time()
        finish([*command, "--out", str(out), "--plain"], out.with_suffix(".log"), until=self._at_target(events))
        return self._told("laminar", variant, laminar_trace(read_events(events), seed=seed, spawned_at=spawned_at))

    def trl(self, seed: int, *, threads: int, give_up_after_s: float) -> Trace:
        """GRPOTrainer; stops itself at the target, or after so long."""
        trace = self._trl(seed, threads, self._max_steps, self._evaluates, give_up_after_s)
        return self._told("trl", f"{threads} threads", trace)

    def probe_threads(self, seed: int) -> dict[int, float]:
        """TRL's seconds per token of the longest answer with each number of threads."""
        return {
            threads: rounded(seconds_per_longest_token(self._trl(seed, threads, PROBE_STEPS, evaluates=False).steps))
            for threads in THREAD_COUNTS
        }

    def _trl(
        self, seed: int, threads: int, max_steps: int, evaluates: bool, give_up_after_s: float = math.inf
    ) -> Trace:
        out = self._folder / f"trl-{seed}-{threads}-{max_steps}.json"
        settings = {"recipe": self._recipe, "out": out, "seed": seed, "threads": threads, "max-steps": max_steps}
        command = [sys.executable, str(TRL_PEER), *(f"--{name}={value}" for name, value in settings.items())]
        command += [f"--target={self._target}"] if evaluates else ["--no-evaluation"]
        command += [f"--give-up-after-s={give_up_after_s}"]
        spawned_at = time.time()
        finish(command, out.with_suffix(".log"), env=os.environ | {"OMP_NUM_THREADS": str(threads)})
        told = json.loads(out.read_text())
        return msgspec.convert({"seed": seed, "startup_s": told.pop("first_step_at") - spawned_at, **told}, Trace)

    def _at_target(self, events: Path) -> Callable[[], bool]:
        tail, target = Tail(events), self._target
        return lambda: any(e["kind"] == "evaluation" and e["accuracy"] >= target for e in tail.read_new())

    def _told(self, framework: str, variant: str, trace: Trace) -> Trace:
        reached = trace.reached(self._target)
        outcome = f"target after {reached.at_s:.0f} s" if reached else "no target"
        pace = f"{len(trace.steps)} steps of {trace.seconds_per_step or 0:.2f} s"
        line = f"{framework}, {variant}, seed {trace.seed}: {outcome}, {pace}"
        print(line, file=sys.stderr, flush=True)
        return trace


def finish(
    command: Sequence[str], log: Path, *, until: Callable[[], bool] | None = None, env: dict[str, str] | None = None
) -> None:
    """Run to the end, or interrupt it once `until` holds; the end of its log is shown if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    interrupted = False
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, env=env) as process:
        try:
            while process.poll() is None:
                if until is not None and not interrupted and until():
                    process.send_signal(signal.SIGINT)
                    interrupted = True
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
    if process.returncode != 0 and not (interrupted and process.returncode == INTERRUPTED):
        end = log.read_text(errors="replace")[-2_000:]
        raise SystemExit(f"{end}\nquickstart: exit code {process.returncode} of {' '.join(command)}; log: {log}")


def setting(config: RunConfig, options: argparse.Namespace) -> dict[str, Any]:
    """What both do."""
    optimizer, algorithm = config.trainer.optimizer, config.trainer.algorithm
    return {
        "recipe": str(options.recipe),
        "target": None if options.quick else options.target,
        "max_steps": options.max_steps,
        "prompts_per_step": config.trainer.groups_per_step,
        "group_size": config.data.group_size,
        "max_new_tokens": config.rollout.max_new_tokens,
        "temperature": config.rollout.sampling.temperature,
        "lr": optimizer.lr,
        "beta2": optimizer.beta2,
        "clip": [algorithm.clip_low, algorithm.clip_high],
        "loss": algorithm.loss,
        "kl_coefficient": algorithm.kl_coefficient,
        "evaluation_prompts": config.evaluation.num_prompts,
        "evaluation_every_steps": config.evaluation.every_steps,
    }


def machine() -> str:
    """Where this was measured."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{platform.machine()}, {name}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """All runs; those of the fast side first, so that a broken set-up is known early."""
    results: dict[str, Any] = {"laminar": {}}
    for variant in options.variants:
        runs = [run_summary(bench.laminar(variant, seed), options.target) for seed in options.seeds]
        results["laminar"][variant] = {"runs": runs, "median": medians(runs)}
    if not options.skip_trl:
        ours = results["laminar"][options.variants[0]]["median"]
        results["trl"] = measure_trl(
            bench, options, give_up_after_s=(ours["to_target_s"] or math.inf) * options.give_up
        )
        results["trl_over_laminar"] = ratios(results["trl"]["median"], ours)
        if ours["to_target_s"]:
            longest = statistics.median(run["trained_s"] for run in results["trl"]["runs"])
            results["trl_over_laminar_at_least"] = rounded(longest / ours["to_target_s"])
    return results


def measure_trl(bench: Bench, options: argparse.Namespace, *, give_up_after_s: float) -> dict[str, Any]:
    """The peer with its better number of threads."""
    probe = bench.probe_threads(options.seeds[0])
    threads = min(probe, key=lambda count: probe[count])
    traces = [bench.trl(seed, threads=threads, give_up_after_s=give_up_after_s) for seed in options.seeds]
    runs = [run_summary(trace, options.target) for trace in traces]
    probed = {"seconds_per_longest_token": probe, "used": threads}
    return {"threads": probed, "runs": runs, "median": medians(runs)}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path(__file__).parents[1] / "recipes" / "gcd.yaml")
    parser.add_argument("--seeds", default="0,1,2", help="numbers with commas between")
    parser.add_argument("--target", type=float, default=0.8, help="held-out accuracy")
    parser.add_argument("--max-steps", type=int, default=None, help="give up after so many (default 100)")
    parser.add_argument("--skip-trl", action="store_true", help="Laminar alone")
    parser.add_argument("--variants", default="two_replicas", help=f"of Laminar, from {','.join(VARIANTS)}")
    parser.add_argument("--give-up", type=float, default=math.inf, help="stop TRL after so many times Laminar's median")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps of one seed, without evaluation")
    parser.add_argument("--folder", type=Path, default=None, help="keep runs and logs here")
    options = parser.parse_args()
    options.seeds = [int(seed) for seed in options.seeds.split(",")][: 1 if options.quick else None]
    options.variants = options.variants.split(",")
    options.max_steps = options.max_steps or (QUICK_STEPS if options.quick else 100)
    if unknown := set(options.variants) - set(VARIANTS):
        parser.error(f"--variants: {', '.join(sorted(unknown))} is not one of {', '.join(VARIANTS)}")
    if not options.skip_trl and importlib.util.find_spec("trl") is None:
        parser.error(NO_TRL)
    return options


def main() -> None:
    """Measure and print."""
    options = arguments()
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # as an exception: it ends the run under way
    packages = ["torch", "transformers", "ray", *([] if options.skip_trl else ["trl"])]
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(
            options.recipe,
            options.folder or Path(scratch),
            target=options.target,
            max_steps=options.max_steps,
            evaluates=not options.quick,
        )
        results = measure(bench, options)
    result = {
        "benchmark": "quickstart",
        "machine": machine(),
        "load": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "versions": {package: version(package) for package in packages},
        "setting": setting(load_recipe(options.recipe, []), options),
        **results,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
