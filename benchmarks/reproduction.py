"""Simulate the published evaluation and write docs/reproduction.md with its pictures.

    python benchmarks/reproduction.py                    everything; an hour on two cores
    python benchmarks/reproduction.py --figures 10 15    only these anew, the rest from docs/reproduction/rows.json
    python benchmarks/reproduction.py --figures 11 --models 72B --schedules stream    only these bars of Fig. 11
    python benchmarks/reproduction.py --figures          only the page and the pictures anew

Prints one JSON line per figure: the time that it took.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from laminar.simulator import paper
from laminar.simulator.beyond import scale_rows, tail_rows
from laminar.simulator.paper_plots import plot_rows
from laminar.simulator.reproduction import FIGURES, MODELS, Row, figure_11
from laminar.simulator.reproduction_page import page

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "reproduction"
ROWS = FOLDER / "rows.json"

MAKERS = {**FIGURES, "scale": scale_rows, "tails": tail_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", nargs="*", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="of Fig. 11")
    parser.add_argument("--schedules", nargs="+", choices=list(paper.SYSTEMS), default=list(paper.SYSTEMS), help="same")
    parser.add_argument("--gpus", nargs="+", type=int, help="same")
    arguments = parser.parse_args()
    rows: dict[str, Any] = json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.exists() else {}
    FOLDER.mkdir(exist_ok=True)
    for name in arguments.figures:
        began_s = time.perf_counter()
        if name == "11":
            rows[name] = with_bars(rows.get(name, []), figure_11(arguments.models, arguments.schedules, arguments.gpus))
        else:
            rows[name] = MAKERS[name]()
        write(rows)
        print(json.dumps({"figure": name, "cores": os.cpu_count(), "wall_s": round(time.perf_counter() - began_s, 1)}))
    write(rows)


def with_bars(known: list[Row], fresh: list[Row]) -> list[Row]:
    """The bars of Fig. 11 that there are, with some of them replaced or added, in the order of the page."""
    bars = {(row["model"], row["gpus"], row["schedule"], row["floor"]): row for row in [*known, *fresh]}
    schedules = list(paper.SYSTEMS)
    return sorted(
        bars.values(),
        key=lambda row: (MODELS.index(row["model"]), row["gpus"], schedules.index(row["schedule"]), not row["floor"]),
    )


def write(rows: dict[str, Any]) -> None:
    """Rows, page and pictures."""
    ROWS.write_text("{\n" + ",\n".join(figure_text(name, rows[name]) for name in rows) + "\n}\n", encoding="utf-8")
    if "11" in rows:
        (DOCS / "reproduction.md").write_text(page(rows), encoding="utf-8")
    for name in set(rows) & {"9", "12", "15", "16", "table1"}:
        plot_rows(name, rows[name], FOLDER)
    for model in dict.fromkeys(row["model"] for row in rows.get("11", ())):
        mine = [row for row in rows["11"] if row["model"] == model]
        plot_rows("11", mine, FOLDER).replace(FOLDER / f"figure-11-{model}.png")


def figure_text(name: str, rows: list[dict[str, Any]]) -> str:
    """One row per line, so that a change is one line of a diff."""
    return f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"


if __name__ == "__main__":
    main()
