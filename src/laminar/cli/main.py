"""The command line.

Invariant: importing this module loads neither torch nor ray; `--help` answers in under half a second.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from laminar.chaos.faults import FaultKind
from laminar.cli.views import View
from laminar.schema.errors import LaminarError, UserError

app = typer.Typer(
    help="RL post-training in which every trajectory runs at its own pace.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich takes longer than all the rest
)
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, live or finished.")]


@app.command()
def train(
    recipe: Annotated[Path | None, typer.Argument(metavar="[RECIPE]", help="YAML file; not with --resume.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="E.g. trainer.num_steps=10.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder to make; default: runs/ and the recipe's name.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with a run that ended early.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a run that --out holds already.")] = False,
    explain: Annotated[bool, typer.Option(help="Print derived sizes and exit.")] = False,
    plain: Annotated[bool, typer.Option(help="Plain lines instead of the live view.")] = False,
) -> None:
    """Post-train a model."""
    from laminar.cli import training

    training.train(recipe, overrides or [], out=out, resume=resume, overwrite=overwrite, explain=explain, plain=plain)


@app.command()
def status(
    run: RunFolder,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep showing until the run ends.")] = False,
) -> None:
    """Show where a run stands: steps, accuracy, fleet, and what waits for what."""
    from laminar.cli import watching

    watching.status(run, follow=follow)


@app.command()
def plot(run: RunFolder) -> None:
    """Draw the plots and the Perfetto trace of a run anew."""
    from laminar.cli import watching

    watching.plot(run)


@app.command()
def export(run: RunFolder, folder: Annotated[Path, typer.Argument(help="New folder.")]) -> None:
    """Write the newest checkpoint's model in Hugging Face format."""
    from laminar.cli import exporting

    exporting.export(run, folder)


@app.command()
def inspect(
    run: RunFolder,
    view: Annotated[View, typer.Argument(help="What to show.")],
    which: Annotated[str | None, typer.Argument(metavar="[ID]", help="With prompt and trajectory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value instead of lines.")] = False,
) -> None:
    """Show what became of each prompt and trajectory."""
    from laminar.cli import inspecting

    sys.exit(inspecting.inspect(run, view, which, as_json=as_json))


@app.command()
def scale(run: RunFolder, replicas: Annotated[int, typer.Option(min=1, help="How many there shall be.")]) -> None:
    """Add or remove replicas of a live run."""
    from laminar.cli import scaling

    scaling.scale(run, replicas)


@app.command()
def chaos(
    run: RunFolder,
    fault: Annotated[FaultKind | None, typer.Argument(help="What to do.")] = None,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="To whom: relay, data, manager, trainer, replica-0, ...")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="How long to freeze or slow; see the docs.")] = None,
    at_random: Annotated[bool, typer.Option("--random", help="Many faults, drawn from --seed.")] = False,
    seed: Annotated[int, typer.Option(help="With --random.")] = 0,
    faults: Annotated[int, typer.Option(min=1, help="With --random: how many.")] = 10,
    every: Annotated[float, typer.Option(min=0.1, help="With --random: mean seconds between two.")] = 10.0,
) -> None:
    """Break a live run on purpose and tell how it recovers."""
    from laminar.cli import chaos as commands

    if not at_random:
        commands.one_fault(run, fault, name, seconds)
    elif fault is not None or seconds is not None:
        raise UserError("--random chooses the faults itself; leave fault, name and --seconds away")
    else:
        commands.random_faults(run, seed=seed, num=faults, every_s=every)


bench = typer.Typer(help="Measure this machine and this installation.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")


@bench.command("recovery")
def bench_recovery(
    recipe: Annotated[Path, typer.Argument(help="YAML file.")] = Path("recipes/gcd.yaml"),
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="E.g. rollout.num_replicas=3.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Medians are over so many.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value instead of lines.")] = False,
) -> None:
    """Kill, freeze and resume a real job: how soon each failure is noticed and mended."""
    from laminar.cli import benching

    benching.recovery(recipe, overrides or [], repeats=repeats, as_json=as_json)


@bench.command("engine")
def bench_engine(
    model: Annotated[
        Path | None, typer.Argument(help="Folder with a config.json; default: a model of fifty million weights.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    out: Annotated[Path | None, typer.Option(help="Settings file to write for `laminar simulate`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value instead of lines.")] = False,
) -> None:
    """Measure memory, products and decode steps: the simulator's preset "this machine"."""
    from laminar.cli import benching

    benching.engine(model, device=device, dtype=dtype, out=out, as_json=as_json)


relay_app = typer.Typer(help="Weights in host memory.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(relay_app, name="relay")


@relay_app.command("status")
def relay_status(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="Folder of a live run.")] = None,
    keeper: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Of a chain, instead of a run.")] = None,
    secret_file: Annotated[Path | None, typer.Option(help="With --keeper: file with the chain's secret.")] = None,
) -> None:
    """Show versions, ages, sizes and readers; of a chain its order, and the rate of each hop."""
    from laminar.cli import relaying

    relaying.status(run, keeper, secret_file)


@bench.command("relay")
def bench_relay(
    mib: Annotated[int, typer.Option(min=1, help="Size of the large model.")] = 1024,
    repeat: Annotated[int, typer.Option(min=1, help="Versions to measure.")] = 9,
    threads: Annotated[int | None, typer.Option(min=1, help="Copy threads of the publisher.")] = None,
) -> None:
    """Publish and read weights over one relay, beside plain copies of as many bytes."""
    from laminar.cli import relaying

    relaying.bench(mib, repeat, threads)


@app.command()
def simulate(
    what: Annotated[
        str | None, typer.Argument(metavar="[SETTINGS | paper]", help="YAML file, or `paper` for --figure.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="E.g. cluster.rollout_gpus=64.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to make for events, plots and trace.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="RUN", help="Take answer lengths from this real run.")] = None,
    dry_run_repack: Annotated[bool, typer.Option(help="Print what repack would move, and move nothing.")] = False,
    faults: Annotated[float | None, typer.Option(help="Small worlds under so many random faults per minute.")] = None,
    seeds: Annotated[str, typer.Option(metavar="A:B", help="With --faults: seeds A to B - 1.")] = "0:20",
    figure: Annotated[str | None, typer.Option(help="With `paper`: 9, 10, 11, 12, 14, 15, 16, 18 or table1.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="With figure 11: only 7B, 32B or 72B.")] = None,
    schedule: Annotated[list[str] | None, typer.Option(help="With figures 11 and 12: only these.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value instead of lines.")] = False,
) -> None:
    """Run the real services on a virtual clock: a thousand GPUs on a laptop."""
    from laminar.cli import simulating

    settings, values = simulating.settings_and_overrides(what, overrides or [])
    if what == "paper":
        simulating.reproduce(figure, values, models=model or [], schedules=schedule or [], out=out, as_json=as_json)
    elif faults is not None:
        if settings is not None:
            values = [str(settings), *values]
        sys.exit(
            simulating.break_things(
                values, rate=faults, seeds=seeds, schedules=schedule or [], out=out, as_json=as_json
            )
        )
    else:
        simulating.run(settings, values, out=out, trace=trace, dry_run=dry_run_repack, as_json=as_json)


def main() -> None:
    """Entry point: what the user can mend exits with 2, what failed with 1, each with one sentence."""
    try:
        app()
    except UserError as error:
        _fail(str(error), 2)
    except LaminarError as error:
        _fail(str(error), int(vars(error).get("exit_code", 1)))


def _fail(sentence: str, code: int) -> None:
    sys.stderr.write(f"laminar: {sentence}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
