"""The live view: one screen that says where a run stands, drawn from a RunView.

Invariant: drawing costs about a millisecond; lines are laid out by hand, because measuring a table costs ten times that
and the machine has better things to do.
"""

from collections import Counter
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from laminar.dashboard.state import ReplicaView, RunView
from laminar.dashboard.text import bar, count, elapsed, fixed, percent, plural, sparkline
from laminar.telemetry.vocabulary import FINISHED

MIN_WIDTH = 60
"""Narrower terminals cut lines off at the right."""

NUM_NOTICES = 4
"""Newest failures and recoveries shown."""

_STATE_STYLES = {
    "generating": "green",
    "loading": "cyan",
    "idle": "dim",
    "starting": "yellow",
    "suspect": "yellow",
    "lost": "bold red",
    "retired": "red",
}


class LiveScreen:
    """A region of the terminal that is drawn over and over; close it to leave the last picture standing."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()

    def show(self, view: RunView, now: float) -> None:
        """Draw the view as it is at `now`."""
        size = self._console.size
        self._live.update(draw(view, now, width=size.width, height=size.height), refresh=True)

    def close(self) -> None:
        """Give the terminal back."""
        self._live.stop()


def draw(view: RunView, now: float, *, width: int, height: int) -> Text:
    """The whole picture as one block of text."""
    width = max(MIN_WIDTH, width)
    lines = [
        *_head(view, now, width),
        Text(),
        _accuracy(view, width),
        _reward(view, width),
        _speed(view),
        _staleness(view, width),
        _trainer(view, now),
        Text(),
    ]
    foot = [Text(), _counts(view), *_notices(view)]
    lines += _replicas(view, max_rows=max(2, height - len(lines) - len(foot) - 2))
    picture = Text("\n", no_wrap=True, overflow="ellipsis").join([*lines, *foot])
    picture.no_wrap, picture.overflow = True, "ellipsis"
    return picture


def _head(view: RunView, now: float, width: int) -> list[Text]:
    end = view.now if view.exit_reason is not None else now
    head = Text.assemble((" laminar ", "bold reverse"), "  ", (view.name or "waiting for the run to start", "bold"))
    head.append(f"   step {view.step}/{view.num_steps}")
    head.append(f"   {elapsed(view.age_s(end))}", "dim")
    if view.exit_reason is not None:
        head.append(f"   {view.exit_reason}", "bold green" if view.exit_reason == FINISHED else "bold red")
    elif view.seconds_left is not None:
        head.append(f"   about {elapsed(view.seconds_left)} left", "dim")
    done = round((width - 2) * view.step / max(1, view.num_steps))
    return [head, Text.assemble(" ", ("━" * done, "green"), ("━" * (width - 2 - done), "bright_black"))]


def _label(name: str) -> Text:
    return Text().append(f" {name:<10}", "dim")


def _accuracy(view: RunView, width: int) -> Text:
    line = _label("held-out")
    if not view.accuracies:
        return line.append("no evaluation yet", "dim")
    first, last = view.accuracies[0], view.accuracies[-1]
    line.append(f"{last.accuracy:.3f} ", "bold")
    line.append(
        f"{sparkline([one.accuracy for one in view.accuracies], _curve(width), low=0):<{_curve(width)}}", "green"
    )
    return line.append(f"  at version {last.version}, from {first.accuracy:.3f} at version {first.version}", "dim")


def _reward(view: RunView, width: int) -> Text:
    line = _label("reward")
    if not view.rewards:
        return line.append("no step yet", "dim")
    line.append(f"{view.rewards[-1]:.3f} ", "bold")
    line.append(sparkline(list(view.rewards), _curve(width)).ljust(_curve(width)), "blue")
    return line.append(f"  {min(view.rewards):.2f} to {max(view.rewards):.2f} per step", "dim")


def _curve(width: int) -> int:
    return max(10, min(40, width - 66))


def _speed(view: RunView) -> Text:
    line = _label("speed").append(f"{count(view.tokens_per_s)} tokens/s", "bold")
    if view.last_step is not None:
        line.append(f"   {fixed(view.last_step.response_tokens_mean, 0)} tokens/answer", "dim")
    return line


def _staleness(view: RunView, width: int) -> Text:
    line = _label("staleness")
    total = view.staleness.total()
    if not total:
        return line.append("no answer yet", "dim")
    line.append(f"{fixed(view.staleness_mean)}", "bold").append(" mean", "dim")
    cell = max(4, min(12, width // 12))
    for value in sorted(view.staleness)[:5]:
        share = view.staleness[value] / total
        line.append(f"   {value} ", "dim").append(bar(share, cell).rstrip(), "magenta").append(
            f" {percent(share)}", "dim"
        )
    return line


def _trainer(view: RunView, now: float) -> Text:
    line = _label("trainer")
    waits = view.waits_of("trainer")
    if waits and view.exit_reason is None:
        line.append(f"waits {now - waits[0].since:.0f} s for {waits[0].what}", "yellow")
    elif view.last_step is None:
        line.append("no step yet", "dim")
    if view.last_step is not None:
        step = view.last_step
        text = f"wait {step.wait_s:.2f} s, train {step.train_s:.2f} s, publish {step.publish_s:.2f} s"
        line.append(f"{'   ' if waits else ''}last step: {text}", "dim")
    return line


def _replicas(view: RunView, max_rows: int) -> list[Text]:
    replicas = [view.replicas[name] for name in sorted(view.replicas, key=lambda name: (len(name), name))]
    head = f" {'replica':<12}{'version':<9}{'phase':<12}{'KV cache':<17}"
    head += f"{'running':>8}{'waiting':>9}{'done':>8}{'restarts':>10}"
    shown = replicas if len(replicas) <= max_rows else replicas[: max_rows - 1]
    lines = [Text(head, "dim"), *(_replica(replica, view.version) for replica in shown)]
    if len(shown) < len(replicas):
        states = Counter(replica.state for replica in replicas[len(shown) :])
        text = ", ".join(f"{num} {state}" for state, num in states.most_common())
        lines.append(Text(f" and {len(replicas) - len(shown)} more: {text}", "dim"))
    return lines


def _replica(replica: ReplicaView, newest: int | None) -> Text:
    lag = newest - replica.version if newest is not None and replica.version is not None else 0
    version = "–" if replica.version is None else f"{replica.version}{f' (-{lag})' if lag > 0 else ''}"
    kv_style = "red" if replica.kv_fraction > 0.95 else "green"
    return Text.assemble(
        f" {replica.replica_id:<12}{version:<9}",
        (f"{replica.state:<12}", _STATE_STYLES.get(replica.state, "")),
        (bar(replica.kv_fraction, 10), kv_style),
        f" {replica.kv_fraction:>4.0%}  ",
        f"{replica.num_running + replica.num_acting:>8}{replica.num_waiting:>9}{count(replica.num_finished):>8}",
        (f"{replica.num_restarts:>10}", "yellow" if replica.num_restarts else "dim"),
    )


def _counts(view: RunView) -> Text:
    parts = [
        f"{plural(view.num_repacks, 'repack')}, {plural(view.num_moved, 'trajectory')} moved",
        f"{plural(view.num_pulls, 'pull')}, {view.num_pulls_after_repack} after a repack",
        f"{view.num_dropped} dropped",
    ]
    if view.last_checkpoint is not None:
        parts.append(f"checkpoint at step {view.last_checkpoint}")
    return Text(" " + "   ".join(parts), "dim")


def _notices(view: RunView) -> list[Text]:
    return [
        Text(f" {elapsed(view.age_s(notice.t))}  {notice.text}", "red" if notice.is_failure else "green")
        for notice in list(view.notices)[-NUM_NOTICES:]
    ]
