"""`laminar simulate`: a run on a virtual clock, the published evaluation, or runs under random faults."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from laminar.config.loading import dump_config, load_simulation
from laminar.config.simulation import SimulationConfig
from laminar.schema.errors import UserError
from laminar.schema.schedule import ScheduleName
from laminar.simulator.running import Run, simulate
from laminar.telemetry.files import EVENTS

if TYPE_CHECKING:
    from laminar.simulator.breaking import Outcome

SCHEDULE_NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)

CONFIG = "simulation.yaml"
"""The settings, beside the events."""


def settings_and_overrides(what: str | None, overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The first argument may be a file, `paper`, or the first override."""
    if what is None or what == "paper":
        return None, list(overrides)
    if "=" in what:
        return None, [what, *overrides]
    return Path(what), list(overrides)


def run(
    settings: Path | None,
    overrides: Sequence[str],
    *,
    out: Path | None,
    trace: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Simulate one run and print what it achieved; with `out` write its events, plots and trace, too."""
    overrides = list(overrides)
    if trace is not None:
        overrides += ["work.lengths.kind=recorded", f"work.lengths.run={trace}"]
    if dry_run:
        overrides.append("manager.repack.dry_run=true")
    config = load_simulation(settings, overrides)
    if out is not None and out.exists():
        raise UserError(f"{out} exists already; give --out a folder that is to be made")
    finished = simulate(config, keep_all_events=out is not None)
    if as_json:
        _print_json({"measures": finished.measures, "wall_s": finished.wall_s, "peak_bytes": finished.peak_bytes})
    else:
        sys.stdout.write(_summary(finished))
    if dry_run:
        _print_planned_moves(finished)
    if out is not None:
        _write(finished, out)


def reproduce(
    figure: str | None,
    overrides: Sequence[str],
    *,
    models: Sequence[str],
    schedules: Sequence[str],
    out: Path | None,
    as_json: bool,
) -> None:
    """Print our numbers beside those of one published figure; with `out` plot them, too."""
    from laminar.simulator.reproduction import FIGURES

    if figure not in FIGURES:
        raise UserError(f"simulate paper needs --figure, one of {', '.join(FIGURES)}")
    if overrides:
        raise UserError(f"simulate paper takes no override such as {overrides[0]}; its settings are the paper's")
    chosen: dict[str, Any] = {}
    if models:
        chosen["models"] = _known("--model", models, ("7B", "32B", "72B"), figure in ("11",))
    if schedules:
        chosen["schedules"] = _known("--schedule", schedules, SCHEDULE_NAMES, figure in ("11", "12"))
    rows = FIGURES[figure](**chosen)
    if as_json:
        _print_json(rows)
    else:
        sys.stdout.write(table(rows))
    if out is not None:
        from laminar.simulator.paper_plots import plot_rows

        sys.stdout.write(f"plot  {plot_rows(figure, rows, out)}\n")


def _known(flag: str, given: Sequence[str], known: Sequence[str], applies: bool) -> tuple[str, ...]:
    if not applies:
        raise UserError(f"{flag} does not go with this figure")
    wrong = [name for name in given if name not in known]
    if wrong:
        raise UserError(f"{flag} {wrong[0]} is not one of {', '.join(known)}")
    return tuple(given)


def break_things(
    overrides: Sequence[str],
    *,
    rate: float,
    seeds: str,
    schedules: Sequence[str],
    out: Path | None,
    as_json: bool,
) -> int:
    """Run small worlds under random faults; returns the exit code, which is 1 if something was violated."""
    from laminar.simulator.breaking import break_one, world_of_seed

    if overrides:
        raise UserError(f"simulate --faults takes no override such as {overrides[0]}; its worlds are fixed")
    if rate < 0:
        raise UserError(f"--faults is {rate:g}; it must be 0 or more faults per minute")
    names = tuple(name for name in SCHEDULE_NAMES if name in _known("--schedule", schedules, SCHEDULE_NAMES, True))
    numbers = _seed_range(seeds)
    if out is not None and len(numbers) != 1:
        raise UserError("--out keeps the events of one seed; give --seeds N:M with M = N + 1")
    outcomes = []
    for seed in numbers:
        outcome, log = break_one(world_of_seed(seed, names or SCHEDULE_NAMES), rate)
        outcomes.append(outcome)
        if not as_json:
            sys.stdout.write(_outcome_line(outcome, rate, schedules))
        if out is not None:
            _write_log(out, log)
    if as_json:
        _print_json(outcomes)
    return int(any(outcome.violation for outcome in outcomes))


def _seed_range(seeds: str) -> range:
    first, _, end = seeds.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise UserError(f"--seeds {seeds} must look like 0:20, the first seed and the one after the last")
    return range(int(first), int(end))


def _outcome_line(outcome: "Outcome", rate: float, schedules: Sequence[str]) -> str:
    line = (
        f"seed {outcome.seed}  {outcome.schedule:<8}  {outcome.num_faults} faults, {outcome.num_events} events, "
        f"{outcome.num_checks} checks in {outcome.simulated_s:.0f} s: {outcome.violation or 'nothing violated'}\n"
    )
    if outcome.violation is None:
        return line
    chosen = "".join(f" --schedule {name}" for name in schedules)
    seeds = f"{outcome.seed}:{outcome.seed + 1}"
    return line + f"  replay: laminar simulate --faults {rate:g} --seeds {seeds}{chosen} --out seed-{outcome.seed}\n"


def _write_log(out: Path, log: bytes) -> None:
    from laminar.cli.watching import report

    _make(out)
    (out / EVENTS).write_bytes(log)
    report(out)


def _make(out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} exists already; give --out a folder that is to be made")
    out.mkdir(parents=True)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as aligned columns."""
    names = list(rows[0]) if rows else []
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + "\n" for line in cells
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _summary(finished: Run) -> str:
    config, m = finished.config, finished.measures
    shares = ", ".join(f"{age}: {share:.1%}" for age, share in enumerate(m.staleness_shares))
    lines = [
        f"{config.schedule}, {config.cluster.model} on {config.cluster.train_gpus} + {config.cluster.rollout_gpus} "
        f"{config.cluster.hardware}, {config.num_replicas} replicas",
        f"tokens per second      {m.tokens_per_s:12,.0f}   consumed by the trainer, prompts included",
        f"generated per second   {m.generated_per_s:12,.0f}   tokens of finished answers",
        f"iteration              {m.iteration_s:12,.1f} s {m.trainer_wait_fraction:.1%} of it the trainer waits",
        f"KV use                 {m.kv_use:12.1%}   replicas generate {m.busy_fraction:.1%} of the time",
        f"answer                 {m.latency_mean_s:12,.1f} s mean from claim to end, {m.latency_max_s:,.1f} s at most",
        f"inherent staleness     {m.staleness_mean:12.2f}   mean, {m.staleness_max} at most ({shares})",
        f"repack                 {m.num_released:12,d}   replicas freed, {m.moved_tokens:,d} tokens computed again",
        f"dropped                {m.num_dropped:12,d}   trajectories",
        f"simulated {m.simulated_s:,.0f} s in {finished.wall_s:.1f} s, {finished.peak_bytes / 2**20:,.0f} MiB",
    ]
    return "\n".join(lines) + "\n"


def _print_planned_moves(finished: Run) -> None:
    for event in finished.recorder.events:
        if event["kind"] == "repack":
            moves = ", ".join(
                f"{m['source']} -> {m['target']} ({m['num_trajectories']} trajectories)" for m in event["moves"]
            )
            sys.stdout.write(f"{event['t']:10.1f} s  version {event['version']}: would move {moves}\n")


def _write(finished: Run, out: Path) -> None:
    from laminar.cli.watching import report

    config: SimulationConfig = finished.config
    _make(out)
    (out / CONFIG).write_text(dump_config(config), encoding="utf-8")
    (out / EVENTS).write_bytes(finished.recorder.lines())
    report(out)


def _print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
