"""Rows of the reproduction as pictures: ours solid, the paper's dashed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = dict[str, Any]


def plot_rows(figure: str, rows: Sequence[Row], folder: Path) -> Path:
    """Draw a figure of the reproduction into a folder; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    drawing = PLOTS[figure](rows)
    path = folder / f"figure-{figure}.png"
    drawing.savefig(path, dpi=150)
    return path


def _throughput(rows: Sequence[Row]) -> Figure:
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = _panels(len(models))
    for axes, model in zip(panels, models, strict=True):
        for number, schedule in enumerate(dict.fromkeys(row["schedule"] for row in rows)):
            mine = [row for row in rows if row["model"] == model and row["schedule"] == schedule]
            with_floor = [row for row in mine if row["floor"]] or mine
            gpus = [row["gpus"] for row in with_floor]
            color = f"C{number}"
            axes.plot(gpus, [row["tokens_per_s"] for row in with_floor], "o-", color=color, label=schedule)
            axes.plot(gpus, [row["paper_tokens_per_s"] for row in with_floor], "x--", color=color, alpha=0.6)
            without = [row for row in mine if not row["floor"]] if len(mine) > len(with_floor) else []
            axes.plot([r["gpus"] for r in without], [r["tokens_per_s"] for r in without], ":", color=color)
        axes.set(xscale="log", yscale="log", title=model, xlabel="GPUs", ylabel="tokens / s")
        axes.legend(fontsize=7, title="x: paper, dotted: no step floor", title_fontsize=7)
    return figure


def _staleness(rows: Sequence[Row]) -> Figure:
    figure, panels = _panels(len(rows))
    for axes, row in zip(panels, rows, strict=True):
        ours, theirs = row["percent"], row["paper_percent"]
        axes.bar([age - 0.2 for age in range(len(ours))], ours, 0.4, label="simulated")
        axes.bar([age + 0.2 for age in range(len(theirs))], theirs, 0.4, label="paper")
        buffer = "bounded" if row["bounded"] else "unbounded"
        title = f"{row['gpus']} GPUs, batch {row['batch_trajectories']}, {buffer}"
        axes.set_title(title, fontsize=8)
        axes.set(xlabel="staleness", ylabel="%")
        axes.legend(fontsize=7)
    return figure


def _columns(x: str, ours: Sequence[str], theirs: Sequence[str]) -> Callable[[Sequence[Row]], Figure]:
    """A plot of columns over another one; the models of a figure share it."""

    def draw(rows: Sequence[Row]) -> Figure:
        figure, (axes,) = _panels(1)
        for model in dict.fromkeys(row.get("model", "") for row in rows):
            mine = [row for row in rows if row.get("model", "") == model]
            for style, names in (("o-", ours), ("x--", theirs)):
                for name in names:
                    points = [(row[x], row[name]) for row in mine if row[name] is not None]
                    axes.plot([at for at, _ in points], [value for _, value in points], style, label=f"{model} {name}")
        axes.set(xlabel=x)
        axes.legend(fontsize=7)
        return figure

    return draw


def _repack(rows: Sequence[Row]) -> Figure:
    names = ("generated_per_s", "kv_use", "latency_mean_s", "latency_max_s")
    figure, panels = _panels(len(names))
    for axes, name in zip(panels, names, strict=True):
        for offset, column, label in ((-0.2, name, "simulated"), (0.2, f"paper_{name}", "paper")):
            axes.bar([number + offset for number in range(len(rows))], [row[column] for row in rows], 0.4, label=label)
        axes.set_xticks(range(len(rows)), ["repack" if row["repack"] else "none" for row in rows])
        axes.set(title=name)
        axes.legend(fontsize=7)
    return figure


def _panels(number: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4.2 * number, 3.6), layout="constrained")
    return figure, [figure.add_subplot(1, number, place + 1) for place in range(number)]


PLOTS: dict[str, Callable[[Sequence[Row]], Figure]] = {
    "9": _columns("second", ("num_waiting", "kv_percent"), ("paper_num_waiting", "paper_kv_percent")),
    "10": _staleness,
    "11": _throughput,
    "12": _throughput,
    "14": _columns("rollout_gpus", ("replica_wait_s",), ("paper_replica_wait_mean_s", "paper_global_sync_s")),
    "15": _columns("end_s", ("trained_per_s", "generated_per_s"), ()),
    "16": _columns(
        "minute",
        ("generated_per_s_repack", "generated_per_s_none"),
        ("paper_generated_per_s_repack", "paper_generated_per_s_none"),
    ),
    "18": _columns("machines", ("broadcast_s",), ("paper_broadcast_s",)),
    "table1": _repack,
}
