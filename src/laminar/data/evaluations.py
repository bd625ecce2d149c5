"""Held-out accuracy of a weight version, while training goes on.

Invariant: an evaluation is answered under one version. If its lease is lost and the rest runs under another version,
the answers that are there already are drawn anew.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from laminar.data.journal import Rows
from laminar.data.ledger import Group, Ledger, Trajectory
from laminar.data.ports import DataRules, Events, Prompts
from laminar.data.prompt_pool import too_long
from laminar.data.rows import EvaluationRow


class EvaluationResult(Struct, frozen=True, kw_only=True):
    """Mean reward over the `num` held-out prompts that could be graded, None if none could; `version` answered them."""

    version: int
    asked_version: int
    accuracy: float | None
    num: int
    mean_tokens: float | None


@dataclass(slots=True, eq=False)
class Evaluation:
    """One that is not done; its groups have one member each."""

    row: EvaluationRow
    groups: list[Group] = field(default_factory=list)

    def members(self) -> list[Trajectory]:
        return [group.members[0] for group in self.groups]


class Evaluations:
    """All evaluations of a run."""

    def __init__(self, ledger: Ledger, prompts: Prompts, rules: DataRules, events: Events) -> None:
        self._ledger = ledger
        self._prompts = prompts
        self._rules = rules
        self._events = events
        self._rows: dict[int, list[EvaluationRow]] = {}
        self._pending: dict[int, Evaluation] = {}

    def restore(self, rows: Rows) -> None:
        """Take up the evaluations of an earlier process."""
        for row in rows.evaluations():
            self._rows.setdefault(row.asked_version, []).append(row)
            if not (row.done or row.void):
                self._pending[row.asked_version] = Evaluation(row)
        for group in self._ledger.groups.values():
            if group.row.asked_version is not None:
                self._pending[group.row.asked_version].groups.append(group)

    def request(self, version: int) -> None:
        """Issue the held-out prompts, unless this was asked before or there are none."""
        rounds = self._rows.setdefault(version, [])
        if (rounds and not rounds[-1].void) or not self._prompts.num_heldout:
            return
        row = EvaluationRow(asked_version=version, round=len(rounds))
        rounds.append(row)
        self._ledger.record(row)
        self._pending[version] = evaluation = Evaluation(row)
        name = f"eval{version}.{row.round}" if row.round else f"eval{version}"
        for index in range(self._prompts.num_heldout):
            evaluation.groups.append(self._issue(name, version, index))
        self._finish_if_complete(evaluation)

    def claim(self, version: int) -> list[Trajectory]:
        """All that waits of the oldest evaluation which a replica at `version` may answer; empty if there is none."""
        for asked_version in sorted(self._pending):
            evaluation = self._pending[asked_version]
            states = {member.row.state for member in evaluation.members()}
            if asked_version <= version and "waiting" in states and "running" not in states:
                self._pin(evaluation, version)
                return [member for member in evaluation.members() if member.row.state == "waiting"]
        return []

    def member_done(self, group: Group) -> None:
        """A member was graded or dropped: the evaluation may be complete."""
        asked_version = group.row.asked_version
        if asked_version is not None and asked_version in self._pending:
            self._finish_if_complete(self._pending[asked_version])

    def result(self, asked_version: int) -> EvaluationResult | None:
        """The result, once there is one; at once if there is nothing to evaluate on."""
        if not self._prompts.num_heldout:
            return _result(EvaluationRow(asked_version=asked_version, round=0, version=asked_version))
        rounds = self._rows.get(asked_version)
        return _result(rounds[-1]) if rounds and rounds[-1].done and not rounds[-1].void else None

    def void_after(self, step: int, drop: Callable[[Trajectory], None]) -> None:
        """Versions after `step` are gone: what they scored is void, and who would score them is dropped."""
        for asked_version, rounds in self._rows.items():
            if asked_version > step and not rounds[-1].void:
                self._change(rounds[-1], void=True)
                self._give_up(self._pending.pop(asked_version, None), drop)

    def give_up_all(self, drop: Callable[[Trajectory], None]) -> None:
        """Nobody will answer any more."""
        for evaluation in list(self._pending.values()):
            self._change(evaluation.row, void=True)
            self._give_up(evaluation, drop)
        self._pending.clear()

    def _issue(self, name: str, version: int, index: int) -> Group:
        prompt = self._prompts.prompt("heldout", index)
        group = self._ledger.issue(
            f"{name}-{prompt.prompt_id}",
            prompt,
            prompt_index=index,
            position=-1 - index,
            num_members=1,
            purpose="evaluation",
            asked_version=version,
        )
        num_tokens, most = len(prompt.token_ids), self._rules.max_prompt_tokens
        if num_tokens > most:
            self._ledger.drop(group.members[0], too_long(num_tokens, most))
        return group

    def _give_up(self, evaluation: Evaluation | None, drop: Callable[[Trajectory], None]) -> None:
        for group in evaluation.groups if evaluation else ():
            for member in group.in_state("waiting", "running"):
                drop(member)
            self._ledger.settle(group)

    def _pin(self, evaluation: Evaluation, version: int) -> None:
        """From now on this version answers; what another one answered is drawn anew."""
        if evaluation.row.version not in (None, version):
            for member in evaluation.members():
                if member.row.state == "evaluated":
                    self._ledger.draw_anew(member)
        evaluation.row = self._change(evaluation.row, version=version)

    def _finish_if_complete(self, evaluation: Evaluation) -> None:
        rows = [member.row for member in evaluation.members()]
        if any(row.state in ("waiting", "running") for row in rows):
            return
        graded = [row for row in rows if row.state == "evaluated"]
        num = len(graded)
        row = self._change(
            evaluation.row,
            done=True,
            num=num,
            accuracy=sum(row.reward or 0.0 for row in graded) / num if num else None,
            mean_tokens=sum(row.num_generated for row in graded) / num if num else None,
        )
        del self._pending[row.asked_version]
        for group in evaluation.groups:
            self._ledger.settle(group)
        if row.accuracy is not None:
            self._events.emit("evaluation", version=row.version, accuracy=row.accuracy, num=num)

    def _change(self, row: EvaluationRow, **changes: Any) -> EvaluationRow:
        changed = replace(row, **changes)
        self._rows[row.asked_version][row.round] = changed
        self._ledger.record(changed)
        return changed


def _result(row: EvaluationRow) -> EvaluationResult:
    return EvaluationResult(
        version=row.asked_version if row.version is None else row.version,
        asked_version=row.asked_version,
        accuracy=row.accuracy,
        num=row.num,
        mean_tokens=row.mean_tokens,
    )
