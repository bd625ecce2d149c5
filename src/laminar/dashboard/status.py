"""`laminar status RUN`: where a live or finished run stands, as text.

Invariant: reads the run folder only, so it works while the run lives, after it died, and on a copy of the folder.
"""

import time
from pathlib import Path

from laminar.dashboard.plain import evaluation_text, step_text
from laminar.dashboard.state import ReplicaView, RunView, fold
from laminar.dashboard.text import count, elapsed, fixed, plural
from laminar.schema.errors import UserError
from laminar.telemetry.files import EVENTS
from laminar.telemetry.reading import read_facts
from laminar.telemetry.vocabulary import FINISHED
from laminar.telemetry.waits import Wait, closes, longest_chain

SILENT_AFTER_S = 30.0
"""Replicas report every few seconds at the most, so a run that says nothing for so long is dead or stuck."""


def status(run_folder: Path, now: float | None = None) -> str:
    """The whole status; raises `UserError` if the folder holds no events."""
    facts = read_facts(run_folder / EVENTS)
    if not facts:
        raise UserError(f"{run_folder} holds no run that has started ({EVENTS} is missing or empty)")
    return status_text(fold(RunView(), facts), time.time() if now is None else now)


def status_text(view: RunView, now: float) -> str:
    """The status of a view as it is at `now`."""
    lines = [_headline(view, now)]
    if view.last_step is not None:
        lines.append(f"  {step_text(view, view.last_step)}")
    if view.accuracies:
        lines.append(f"  {evaluation_text(view, view.accuracies[-1])}")
    lines.append(
        f"  {count(view.num_trajectories)} trajectories, {view.num_dropped} dropped; "
        f"staleness {fixed(view.staleness_mean)} mean, {max(view.staleness, default=0)} max"
    )
    lines.append(
        f"  {plural(view.num_repacks, 'repack')}, {plural(view.num_moved, 'trajectory')} moved; "
        f"{plural(view.num_pulls, 'pull')}, {view.num_pulls_after_repack} after a repack"
    )
    if view.exit_reason is None:
        lines += ["", "replicas", *(f"  {_replica_line(view, name, now)}" for name in sorted(view.replicas))]
        lines += ["", "longest chain of waits", *(f"  {line}" for line in chain_lines(view, now))]
    if view.notices:
        lines += ["", "last failures and recoveries"]
        lines += [f"  {elapsed(view.age_s(notice.t))}  {notice.text}" for notice in list(view.notices)[-8:]]
    return "\n".join(lines)


def chain_lines(view: RunView, now: float) -> list[str]:
    """Who waits for whom, from the first waiter down to the one that works, or is missing."""
    chain = longest_chain(view.waits.values())
    if not chain:
        return ["nobody has waited for more than a second"]
    lines = [f"{'  ' * depth}{_wait_text(wait, now)}" for depth, wait in enumerate(chain)]
    indent = "  " * len(chain)
    if closes(chain):
        return [*lines, f"{indent}which waits for {chain[0].waiter}: a deadlock"]
    waiters = {wait.waiter for wait in chain}
    busy = [
        replica
        for name, replica in sorted(view.replicas.items())
        if name not in waiters and {name, name.rpartition("-")[0]} & set(chain[-1].of)
    ]
    return [*lines, *(f"{indent}{_replica_text(replica, now)}" for replica in busy)]


def _headline(view: RunView, now: float) -> str:
    name = view.name or view.run_id or "run"
    steps = f"step {view.step} of {view.num_steps}"
    if view.exit_reason is not None:
        ended = "finished" if view.exit_reason == FINISHED else f"ended ({view.exit_reason})"
        return f"{name}: {ended}, {steps}, after {elapsed(view.age_s(view.now))}"
    silent_s = now - view.now
    alive = "running" if silent_s < SILENT_AFTER_S else f"silent for {elapsed(silent_s)}, perhaps dead"
    return f"{name}: {alive}, {steps}, {elapsed(view.age_s(view.now))} since its start"


def _wait_text(wait: Wait, now: float) -> str:
    of = f" from {' or '.join(wait.of)}" if wait.of else ""
    left_s = wait.deadline - now
    left = "" if left_s == float("inf") else f", {left_s:.0f} s to its deadline"
    return f"{wait.waiter} has waited {now - wait.since:.1f} s for {wait.what}{of}{left}"


def _replica_line(view: RunView, name: str, now: float) -> str:
    replica = view.replicas[name]
    where = f", on {replica.machine}" if len(view.machines) > 1 and replica.machine else ""
    return _replica_text(replica, now) + where


def _replica_text(replica: ReplicaView, now: float) -> str:
    version = "no version" if replica.version is None else f"version {replica.version}"
    running = replica.num_running + replica.num_acting
    text = f"{replica.replica_id}: {replica.state}, {version}, {running} running, {replica.num_waiting} waiting"
    text += f", KV {replica.kv_fraction:.0%}"
    if replica.num_restarts:
        text += f", {plural(replica.num_restarts, 'restart')}"
    return f"{text}, heard {now - replica.seen:.1f} s ago" if replica.seen else text
