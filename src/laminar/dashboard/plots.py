"""Pictures of a run, drawn from its events: one function per picture, all into `plots/`.

Invariant: a picture shows what its title says or is not written; a run too short for one gets the others.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from laminar.dashboard import style
from laminar.dashboard.lanes import draw_lanes
from laminar.dashboard.summary import accuracy_curve
from laminar.dashboard.text import count, percent
from laminar.dashboard.timeline import build_timeline, without_downtime
from laminar.telemetry.files import EVENTS, PLOTS
from laminar.telemetry.reading import read_facts
from laminar.telemetry.vocabulary import Evaluation, Fact, Step, Trajectory, undone_by

SMOOTH_STEPS = 5
"""Curves of noisy per-step numbers are drawn with their mean over so many steps."""

THROUGHPUT_WINDOW_S = 10.0
"""Throughput is averaged over this time, or over a thirtieth of a longer run."""


def write_plots(run_folder: Path, facts: Sequence[Fact] | None = None) -> list[Path]:
    """Draw every picture that the run has data for; returns the files."""
    facts = without_downtime(read_facts(run_folder / EVENTS) if facts is None else facts)
    folder = run_folder / PLOTS
    folder.mkdir(exist_ok=True)
    written: list[Path] = []
    with style.applied():
        for name, draw in PICTURES.items():
            figure = draw(facts)
            if figure is not None:
                figure.savefig(folder / f"{name}.png", dpi=150)
                written.append(folder / f"{name}.png")
    return written


def accuracy(facts: Sequence[Fact]) -> Figure | None:
    """Held-out accuracy over wall time and over versions, with the training reward behind it."""
    curve, steps = accuracy_curve(facts), [step for step in steps_of(facts) if step.reward_mean is not None]
    if not curve and not steps:
        return None
    begin = facts[0].t
    title = f"Held-out accuracy: {curve[0].accuracy:.3f} to {curve[-1].accuracy:.3f}" if curve else "Training reward"
    figure, (by_time, by_version) = style.figure(1, 2, width=11, height=4.2, title=title, sharey=True)
    _accuracy_panel(by_time, "wall time [s]", [one.t - begin for one in curve], curve)
    _accuracy_panel(by_version, "weight version", [one.version for one in curve], curve)
    _reward_panel(by_time, [step.t - begin for step in steps], steps)
    _reward_panel(by_version, [step.step for step in steps], steps)
    for axes in (by_time, by_version):
        axes.set_xlim(left=0)
    by_time.set_ylabel("accuracy" if curve else "reward")
    entries = [("held-out accuracy", style.GREEN), (f"training reward, mean of {SMOOTH_STEPS} steps", style.BLUE)]
    style.legend(by_time, entries if curve else entries[1:], loc="lower right")
    return figure


def _accuracy_panel(axes: Axes, label: str, xs: Sequence[float], curve: Sequence[Evaluation]) -> None:
    axes.set_xlabel(label)
    axes.set_ylim(0, 1)
    looks: dict[str, Any] = {"color": style.GREEN, "lw": 2.2, "marker": "o", "ms": 5, "mec": "white"}
    axes.plot(xs, [one.accuracy for one in curve], zorder=4, clip_on=False, **looks)


def _reward_panel(axes: Axes, xs: Sequence[float], steps: Sequence[Step]) -> None:
    """The reward on the axis of the accuracy if it lies between 0 and 1 too, else on its own."""
    rewards = [step.reward_mean for step in steps if step.reward_mean is not None]
    if rewards and not 0 <= min(rewards) <= max(rewards) <= 1:
        axes = style.second_axis(axes, "reward", style.BLUE)
    axes.plot(xs, rewards, color=style.SOFT_BLUE, lw=0.8, zorder=2)
    axes.plot(xs, smoothed(rewards), color=style.BLUE, lw=1.6, zorder=3)


def staleness(facts: Sequence[Fact]) -> Figure | None:
    """How many versions passed while an answer was generated, over all answers and by their length."""
    answers = training_answers(facts)
    if not answers:
        return None
    values = [answer.staleness for answer in answers]
    mean = fmean(values)
    figure, (bars, by_length) = style.figure(
        1, 2, width=11, height=4.2, title=f"Inherent staleness: mean {mean:.2f}, max {max(values)}"
    )
    levels = range(max(values) + 1)
    shares = [values.count(level) / len(values) for level in levels]
    bars.bar(levels, shares, width=0.72, color=[style.staleness_colour(level) for level in levels])
    for level, share in zip(levels, shares, strict=True):
        bars.annotate(percent(share), (level, share), (0, 4), textcoords="offset points", ha="center", fontsize=9)
    bars.set_xticks(list(levels))
    bars.set_ylim(0, max(shares) * 1.15)
    bars.set_xlabel("versions published while the answer was generated")
    bars.set_ylabel("share of answers")
    bars.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    _staleness_by_length(by_length, answers)
    return figure


def _staleness_by_length(axes: Axes, answers: Sequence[Trajectory], num_bins: int = 10) -> None:
    """Bands of equal numbers of answers, from short to long, each split by staleness."""
    ordered = sorted(answers, key=lambda answer: answer.tokens)
    num_bins = min(num_bins, len(ordered))
    edges = [i * len(ordered) // num_bins for i in range(num_bins + 1)]
    bins = [ordered[a:b] for a, b in pairwise(edges)]
    bottoms = [0.0] * num_bins
    for level in range(max(answer.staleness for answer in answers) + 1):
        shares = [sum(answer.staleness == level for answer in band) / len(band) for band in bins]
        axes.bar(
            range(num_bins), shares, bottom=bottoms, width=0.9, color=style.staleness_colour(level), label=str(level)
        )
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    axes.set_xticks(range(num_bins), [count(band[-1].tokens) for band in bins])
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel("answers from short to long: longest of each tenth [tokens]")
    axes.set_ylabel("share of answers")
    axes.legend(title="staleness", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def lengths(facts: Sequence[Fact]) -> Figure | None:
    """Median and tail of answer lengths, by the step during which the answers were finished.

    Not by the version that generated them: of the newest versions only the short answers are finished.
    """
    by_step: dict[int, list[int]] = defaultdict(list)
    for answer in training_answers(facts):
        by_step[answer.version + answer.staleness + 1].append(answer.tokens)
    if not by_step:
        return None
    steps = sorted(by_step)
    pools = [
        [n for step in steps[max(0, i + 1 - SMOOTH_STEPS) : i + 1] for n in by_step[step]] for i in range(len(steps))
    ]
    p50, p90, p99 = ([quantile(pool, q) for pool in pools] for q in (0.5, 0.9, 0.99))
    title = f"Answer length: median {count(p50[0])} to {count(p50[-1])}, p99 {count(p99[0])} to {count(p99[-1])} tokens"
    figure, axes = style.figure(1, 1, width=8, height=4.2, title=title)
    axes.fill_between(steps, p50, p90, color=style.SOFT_BLUE, lw=0, alpha=0.7)
    axes.fill_between(steps, p90, p99, color=style.SOFT_ORANGE, lw=0, alpha=0.7)
    for values, colour, name in ((p99, style.ORANGE, "p99"), (p90, style.GREY, "p90"), (p50, style.BLUE, "median")):
        axes.plot(steps, values, color=colour, lw=1.8, label=name, marker="o" if len(steps) == 1 else None)
    axes.set_xlabel(f"step during which the answer was finished (pools of {SMOOTH_STEPS} steps)")
    axes.set_ylabel("answer length [tokens]")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    return figure


def throughput(facts: Sequence[Fact]) -> Figure | None:
    """Tokens per second, generated and trained, over wall time."""
    begin, wall_s = (facts[0].t, facts[-1].t - facts[0].t) if facts else (0.0, 0.0)
    generated = [(fact.t - begin, fact.tokens) for fact in facts if isinstance(fact, Trajectory)]
    if not generated or wall_s <= 0:
        return None
    window_s = max(THROUGHPUT_WINDOW_S, wall_s / 30)
    mean = sum(tokens for _, tokens in generated) / wall_s
    title = f"Throughput: {count(mean)} tokens/s generated on average"
    figure, axes = style.figure(1, 1, width=8, height=4.2, title=title)
    axes.axhline(mean, color=style.GREY, lw=1, ls=(0, (4, 4)))
    times, rates = rates_of(generated, wall_s, window_s)
    axes.plot(times, rates, color=style.BLUE, lw=1.8, label=f"generated, mean of {window_s:.0f} s")
    times, rates = step_rates([(step.t - begin, step.tokens) for step in steps_of(facts)])
    if any(rates):
        axes.plot(times, rates, color=style.ORANGE, lw=1.8, label=f"trained, mean of {SMOOTH_STEPS} steps")
    axes.set_xlabel("wall time [s]")
    axes.set_ylabel("tokens/s")
    axes.yaxis.set_major_formatter(lambda rate, _: count(rate))
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, wall_s)
    axes.legend(loc="lower right")
    return figure


def lanes(facts: Sequence[Fact]) -> Figure | None:
    """Who did what when: see `lanes.draw_lanes`."""
    timeline = build_timeline(facts)
    return draw_lanes(timeline) if timeline.batches else None


PICTURES: dict[str, Callable[[Sequence[Fact]], Figure | None]] = {
    "accuracy": accuracy,
    "staleness": staleness,
    "lanes": lanes,
    "lengths": lengths,
    "throughput": throughput,
}
"""Every picture by the name of its file; None: the run has no data for it."""


# ---- numbers behind the pictures


def training_answers(facts: Sequence[Fact]) -> list[Trajectory]:
    """Finished training trajectories."""
    return [fact for fact in facts if isinstance(fact, Trajectory) and fact.purpose == "training"]


def steps_of(facts: Sequence[Fact]) -> list[Step]:
    """Steps in order; of one that was done again after a resume, the last time."""
    steps: dict[int, Step] = {}
    for fact in facts:
        if isinstance(fact, Step):
            steps[fact.step] = fact
        elif (last := undone_by(fact)) is not None:
            steps = {number: step for number, step in steps.items() if number <= last}
    return [steps[number] for number in sorted(steps)]


def smoothed(values: Sequence[float], window: int = SMOOTH_STEPS) -> list[float]:
    """Mean of each value and the ones before it."""
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a share q of the values lies; of few values the nearest one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def rates_of(
    points: Sequence[tuple[float, int]], wall_s: float, window_s: float, num: int = 300
) -> tuple[list[float], list[float]]:
    """Amount per second in a window that ends at each of `num` times; points are (time, amount) in order of time."""
    times = [wall_s * (i + 1) / num for i in range(num)]
    rates: list[float] = []
    head = tail = amount = 0
    for t in times:
        while head < len(points) and points[head][0] <= t:
            amount += points[head][1]
            head += 1
        while tail < head and points[tail][0] <= t - window_s:
            amount -= points[tail][1]
            tail += 1
        rates.append(amount / min(window_s, t))
    return times, rates


def step_rates(steps: Sequence[tuple[float, float]], window: int = SMOOTH_STEPS) -> tuple[list[float], list[float]]:
    """Amount per second of each step and the ones before it; the first step has none, for its beginning is unknown."""
    times, rates = [], []
    for i in range(1, len(steps)):
        first = max(0, i - window)
        span_s = steps[i][0] - steps[first][0]
        if span_s > 0:
            times.append(steps[i][0])
            rates.append(sum(amount for _, amount in steps[first + 1 : i + 1]) / span_s)
    return times, rates
