"""`laminar inspect RUN audit | prompt ID | trajectory ID | dropped`: what became of each trajectory.

Reads the journal of a live or a dead run without touching it.
"""

import sys
from pathlib import Path

import msgspec
import yaml

from laminar.cli.views import View
from laminar.data.audit import AuditReport, GroupStory, TrajectoryStory
from laminar.data.rows import TrajectoryRow
from laminar.scheduling.schedules import SCHEDULES
from laminar.schema.errors import UserError
from laminar.telemetry.files import JOURNAL

FAILED_AUDIT = 1


def inspect(run: Path, view: View, which: str | None, *, as_json: bool) -> int:
    """Print one view; returns the exit code, which is 1 if an audit finds problems."""
    from laminar.data import audit

    journal = run / JOURNAL
    if not journal.is_file():
        raise UserError(f"{run} holds no journal ({JOURNAL} is missing); give the --out folder of a run")
    if (which is None) == (view in {View.PROMPT, View.TRAJECTORY}):
        raise UserError(f"inspect RUN {view} takes {'an id' if which is None else 'no id'}")
    match view:
        case View.AUDIT:
            report = audit.audit(journal, mixes_versions=_mixes_versions(run))
            _show(report, _audit_lines(report), as_json)
            return 0 if report.is_sound else FAILED_AUDIT
        case View.PROMPT:
            groups = audit.describe_prompt(journal, which or "")
            _show(groups, [line for group in groups for line in _group_lines(group)], as_json)
        case View.TRAJECTORY:
            story = audit.describe_trajectory(journal, which or "")
            _show(story, _trajectory_lines(story), as_json)
        case View.DROPPED:
            rows = audit.dropped(journal)
            _show(rows, [_row_line(row) for row in rows] or ["nothing was dropped"], as_json)
    return 0


def _mixes_versions(run: Path) -> bool:
    """Whether the schedule of this run lets an answer have tokens of several versions."""
    config = run / "config.yaml"
    values = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return SCHEDULES[values.get("schedule", "laminar")].interrupts


def _show(value: object, lines: list[str], as_json: bool) -> None:
    text = msgspec.json.encode(value, enc_hook=str).decode() if as_json else "\n".join(lines)
    sys.stdout.write(text + "\n")


def _audit_lines(report: AuditReport) -> list[str]:
    lines = [f"{report.num_issued} trajectories issued"]
    lines += [f"  {state:<10} {count}" for state, count in sorted(report.counts.items())]
    lines += [f"  dropped because {reason}: {count}" for reason, count in sorted(report.drop_reasons.items())]
    for name, fate in (("trained", report.trained), ("dropped", report.dropped)):
        if fate.num:
            lines.append(
                f"{name}: mean {_number(fate.mean_tokens)} tokens, mean reward {_number(fate.mean_reward)}, answers to "
                f"{fate.num_prompts} prompts"
            )
    if report.dropped.num:
        lines.append("dropped most: " + ", ".join(f"{name} ({num})" for name, num in report.dropped.prompts.items()))
    lines += [f"PROBLEM {problem}" for problem in report.problems]
    lines.append("the ledger is sound" if report.is_sound else f"{report.num_problems} problems")
    return lines


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def _group_lines(group: GroupStory) -> list[str]:
    return [f"group {group.row.group_id}", *(f"  {_row_line(story.row)}" for story in group.trajectories)]


def _trajectory_lines(story: TrajectoryStory) -> list[str]:
    lines = [f"prompt {story.prompt_id}, for {story.purpose}", _row_line(story.row)]
    for stint in story.stints:
        ended = "goes on" if stint.ended_s is None else f"{stint.end} at {stint.ended_s:.2f} s"
        lines.append(
            f"  attempt {stint.attempt} on {stint.lease_id}, version {stint.version}, from token {stint.num_tokens}, "
            f"began at {stint.began_s:.2f} s, {ended}"
        )
    return lines


def _row_line(row: TrajectoryRow) -> str:
    facts = {"version": row.version, "reward": row.reward, "tokens": row.num_generated, "reason": row.reason}
    told = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    return f"{row.trajectory_id}: {row.state}" + (f" ({told})" if told else "")
