"""The picture that explains the system: one lane per replica, coloured by weight version, and one for the trainer.

Not drawn: single trajectories, and events within a batch; see trace.json for those.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch

from laminar.dashboard import style
from laminar.dashboard.text import elapsed
from laminar.dashboard.timeline import BatchSlice, Timeline

LANE = 0.62
"""Height of a bar; lanes are 1 apart."""

MAX_LANES = 24
"""Of more replicas the first so many are drawn; more would be thinner than a line of text."""

MAX_BATCHES = 50
"""Of a longer run the end is drawn, with so many batches in the busiest lane; more could not be told apart."""

LABEL_SHARE = 0.0095
"""A bar that is narrower than this share of the picture carries no number."""


def draw_lanes(timeline: Timeline) -> Figure:
    """The whole picture."""
    replicas = timeline.replicas[:MAX_LANES]
    rows = {replica_id: i + 1 for i, replica_id in enumerate(replicas)}
    start = _start_of_window(timeline)
    span_s = max(1e-9, timeline.end - start)
    title = _title(timeline, start)
    figure, axes = style.figure(1, 1, width=14, height=2.2 + 0.55 * (len(rows) + 1), title=title)
    _draw_publishes(axes, timeline, len(rows))
    _draw_trainer(axes, timeline, start, span_s)
    for batch in timeline.batches:
        if batch.replica_id in rows and batch.end > start:
            _draw_batch(axes, batch, rows[batch.replica_id], timeline.begin, span_s)
    _draw_pulls(axes, timeline, rows, start)
    _draw_moves(axes, timeline, rows, start)
    _draw_deaths(axes, timeline, rows)
    axes.set_yticks([0, *rows.values()], ["trainer", *rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) + 0.6, -0.6)
    axes.set_xlim(start - timeline.begin, timeline.end - timeline.begin)
    axes.set_xlabel("wall time [s]")
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    _draw_legend(figure)
    return figure


def _start_of_window(timeline: Timeline) -> float:
    """The beginning of the run, or as late as the busiest lane demands."""
    starts: dict[str, list[float]] = defaultdict(list)
    for batch in timeline.batches:
        starts[batch.replica_id].append(batch.start)
    return max([timeline.begin, *(times[-MAX_BATCHES] for times in starts.values() if len(times) > MAX_BATCHES)])


def busy_share(timeline: Timeline, replica_id: str) -> float:
    """Share of the run in which a replica had a batch."""
    span_s = timeline.end - timeline.begin
    busy_s = sum(batch.end - batch.start for batch in timeline.batches if batch.replica_id == replica_id)
    return busy_s / span_s if span_s > 0 else 0.0


def _title(timeline: Timeline, start: float) -> str:
    shares = [busy_share(timeline, replica_id) for replica_id in timeline.replicas]
    title = f"Who did what when: replicas busy {sum(shares) / len(shares):.0%} of the time"
    notes = []
    if len(timeline.replicas) > MAX_LANES:
        notes.append(f"{MAX_LANES} of {len(timeline.replicas)} replicas")
    if start > timeline.begin:
        notes.append(f"the last {elapsed(timeline.end - start)} of {elapsed(timeline.end - timeline.begin)}")
    return f"{title} ({', '.join(notes)})" if notes else title


def _draw_publishes(axes: Axes, timeline: Timeline, num_rows: int) -> None:
    """A faint line through all lanes at each new version."""
    times = [published.t - timeline.begin for published in timeline.publishes]
    axes.vlines(times, -LANE / 2, num_rows + LANE / 2, color=style.FAINT, lw=0.7, zorder=0)


def _draw_trainer(axes: Axes, timeline: Timeline, begin: float, span_s: float) -> None:
    for part in timeline.trainer:
        if part.end <= begin:
            continue
        start, width = part.start - timeline.begin, part.end - part.start
        if part.phase == "train":
            # The colour is that of the version which this step makes.
            colour = style.version_colour(part.step)
            edge = _edge_width(width, span_s)
            axes.barh(0, width, left=start, height=LANE, color=colour, ec="white", lw=edge, zorder=2)
            _label(axes, start, width, 0, str(part.step), span_s)
        elif part.phase == "publish":
            axes.barh(0, width, left=start, height=LANE, color=style.INK, lw=0, zorder=3)


def _draw_batch(axes: Axes, batch: BatchSlice, row: int, begin: float, span_s: float) -> None:
    start, width = batch.start - begin, batch.end - batch.start
    evaluation = batch.purpose == "evaluation"
    axes.barh(
        row,
        width,
        left=start,
        height=LANE,
        color=style.version_colour(batch.version),
        ec="white",
        lw=_edge_width(width, span_s),
        hatch="////" if evaluation else None,
        alpha=0.55 if batch.outcome == "lost" else 1.0,
        zorder=2,
    )
    backed = style.version_colour(batch.version) if evaluation else None
    _label(axes, start, width, row, str(batch.version), span_s, backed)


def _edge_width(width: float, span_s: float) -> float:
    """Bars are set apart by a white edge, unless they are so narrow that nothing else would be seen."""
    return 0.6 if width > 0.004 * span_s else 0.0


def _label(
    axes: Axes, start: float, width: float, row: int, text: str, span_s: float, backed: str | None = None
) -> None:
    if width > LABEL_SHARE * span_s * (0.6 + 0.4 * len(text)):
        looks: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5, "color": "white", "weight": "bold"}
        box = {"fc": backed, "ec": "none", "pad": 1.5} if backed else None
        axes.text(start + width / 2, row, text, clip_on=True, zorder=4, bbox=box, **looks)


def _draw_pulls(axes: Axes, timeline: Timeline, rows: dict[str, int], begin: float) -> None:
    """A tick below the lane where new weights were taken; filled after a repack."""
    for freed, face in ((False, "white"), (True, style.INK)):
        drawn = [pull for pull in timeline.pulls if pull.replica_id in rows and pull.t >= begin]
        pulls = [pull for pull in drawn if pull.freed_by_repack == freed]
        xs = [pull.t - timeline.begin for pull in pulls]
        ys = [rows[pull.replica_id] + LANE / 2 + 0.09 for pull in pulls]
        axes.scatter(xs, ys, marker="^", s=22, color=face, ec=style.INK, lw=0.8, zorder=5, clip_on=False)


def _draw_moves(axes: Axes, timeline: Timeline, rows: dict[str, int], begin: float) -> None:
    for move in timeline.moves:
        if move.arrived < begin or not {move.source, move.target} <= rows.keys() or move.source == move.target:
            continue
        colour = style.RED if move.after_failure else style.INK
        down = 1 if rows[move.target] > rows[move.source] else -1
        departs = (move.departed - timeline.begin, rows[move.source] + down * LANE / 2)
        arrives = (move.arrived - timeline.begin, rows[move.target] - down * LANE / 2)
        arrow = FancyArrowPatch(
            departs, arrives, arrowstyle="-|>", mutation_scale=9, lw=1.3, color=colour, shrinkA=0, shrinkB=0, zorder=6
        )
        axes.add_patch(arrow)
        # Below a lane stand the marks of pulls, the next of them usually just right of the arrow.
        beside: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7, "color": colour, "va": "center"}
        offset = (9 if down > 0 else 4, 0)
        axes.annotate(str(move.num_trajectories), (departs[0], departs[1] + down * 0.14), offset, **beside)


def _draw_deaths(axes: Axes, timeline: Timeline, rows: dict[str, int]) -> None:
    """A cross at each death, and a red dotted line until the next life."""
    for replica_id, row in rows.items():
        marks = [mark for mark in timeline.marks if mark.replica_id == replica_id]
        for i, mark in enumerate(marks):
            if mark.what == "started":
                continue
            x = mark.t - timeline.begin
            until = next((later.t for later in marks[i + 1 :] if later.what == "started"), timeline.end)
            axes.scatter([x], [row], clip_on=True, marker="x", s=70, color=style.RED, lw=2.4, zorder=7)
            if mark.what == "lost":
                axes.hlines(row, x, until - timeline.begin, color=style.RED, lw=1.4, ls=(0, (1, 1.6)), zorder=1)
                if until < timeline.end:
                    axes.scatter([until - timeline.begin], [row], marker="|", s=140, color=style.RED, lw=2, zorder=7)


def _draw_legend(figure: Figure) -> None:
    handles: Sequence[Patch | Line2D] = (
        Patch(fc=style.VERSION_COLOURS[0], label="batch, coloured by its weight version"),
        Patch(fc=style.VERSION_COLOURS[0], hatch="////", ec="white", label="evaluation"),
        Line2D([], [], marker="^", ls="", ms=5, mfc="white", mec=style.INK, label="took new weights"),
        Line2D([], [], marker="^", ls="", ms=5, mfc=style.INK, mec=style.INK, label="… after a repack"),
        Line2D([], [], marker=r"$\rightarrow$", ls="", ms=11, color=style.INK, label="repack (trajectories moved)"),
        Line2D([], [], marker=r"$\rightarrow$", ls="", ms=11, color=style.RED, label="… after a failure"),
        Line2D([], [], marker="x", ls="", ms=7, mew=2, color=style.RED, label="lost"),
        Line2D([], [], color=style.GREY, lw=0.8, label="version published"),
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=8, columnspacing=1.4)
