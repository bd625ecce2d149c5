"""A run as plain lines, for logs and pipes: a line per step, evaluations, repacks in sum, failures always.

Invariant: the number of lines grows with steps, evaluations and failures, never with trajectories or time.
"""

from laminar.dashboard.state import RunView
from laminar.dashboard.text import count, elapsed, fixed, plural
from laminar.telemetry.vocabulary import FINISHED, Checkpoint, Evaluation, Fact, Repack, RunFinished, RunStarted, Step

REPACK_LINE_EVERY_S = 10.0
"""Repacks may come every second; one line sums up those of so long."""

LONG_WAIT_S = 30.0
"""A wait this long is worth a line; shorter ones are the normal course of things."""


class PlainLines:
    """Turns events into lines; feed it each event right after the view has folded it."""

    def __init__(self) -> None:
        self._repacks_told = self._moved_told = self._notices_told = 0
        self._repacks_told_at = 0.0
        self._waits_told: set[str] = set()

    def lines(self, view: RunView, fact: Fact) -> list[str]:
        """Lines to print for one event; usually none."""
        texts = self._new_notices(view)
        match fact:
            case RunStarted():
                replicas = plural(fact.num_replicas, "replica")
                texts.insert(0, f"run {fact.name} started: {plural(fact.num_steps, 'step')}, {replicas}")
            case Step():
                texts.append(step_text(view, fact))
            case Evaluation():
                texts.append(evaluation_text(view, fact))
            case Checkpoint():
                texts.append(f"checkpoint of step {fact.step} written in {fact.seconds:.1f} s: {fact.path}")
            case Repack() if fact.t >= self._repacks_told_at + REPACK_LINE_EVERY_S:
                texts += self._repacks(view, fact.t)
            case RunFinished():
                texts = [*self._repacks(view, fact.t), *texts]
                texts += ["run finished"] if fact.reason == FINISHED else []
        return [_stamped(view, fact.t, text) for text in texts]

    def waiting(self, view: RunView, now: float) -> list[str]:
        """A line for every wait that has become long; once each."""
        long = [w for w in view.waits.values() if now - w.since > LONG_WAIT_S and w.wait_id not in self._waits_told]
        self._waits_told = {wait_id for wait_id in self._waits_told if wait_id in view.waits}
        self._waits_told |= {wait.wait_id for wait in long}
        return [
            _stamped(view, now, f"{wait.waiter} has waited {now - wait.since:.0f} s for {wait.what}") for wait in long
        ]

    def _new_notices(self, view: RunView) -> list[str]:
        num_new = min(view.num_notices - self._notices_told, len(view.notices))
        self._notices_told = view.num_notices
        return [notice.text for notice in list(view.notices)[len(view.notices) - num_new :]]

    def _repacks(self, view: RunView, t: float) -> list[str]:
        num, moved = view.num_repacks - self._repacks_told, view.num_moved - self._moved_told
        self._repacks_told, self._moved_told, self._repacks_told_at = view.num_repacks, view.num_moved, t
        return [f"{plural(num, 'repack')}: {plural(moved, 'trajectory')} moved"] if num else []


def step_text(view: RunView, step: Step) -> str:
    """One step: what it learned from, how fast, and where its time went."""
    parts = [
        f"step {step.step}/{view.num_steps}",
        f"reward {fixed(step.reward_mean, 3)}",
        f"{fixed(step.response_tokens_mean, 0)} tokens/answer",
        f"{count(view.tokens_per_s)} tokens/s",
        f"staleness {fixed(step.staleness_mean)} (max {fixed(step.staleness_max, 0)})",
        f"wait {step.wait_s:.2f} s, train {step.train_s:.2f} s, publish {step.publish_s:.2f} s",
    ]
    return "  ".join(parts)


def evaluation_text(view: RunView, evaluation: Evaluation) -> str:
    """One evaluation, and how far that is from the start."""
    first = view.accuracies[0]
    text = f"held-out accuracy {evaluation.accuracy:.3f} at version {evaluation.version}"
    if evaluation.num:
        text += f" ({evaluation.num} prompts)"
    return text if first is evaluation else f"{text}, from {first.accuracy:.3f} at version {first.version}"


def _stamped(view: RunView, t: float, text: str) -> str:
    return f"[{elapsed(view.age_s(t))}] {text}"
