"""What must hold in every world whatever breaks, checked at every operation of the data shard and at every event.

Sources are independent of the shard's own memory: the rows that its journal is given, the calls that reach it, the
events of all services, and the speed of the links.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from laminar.data.audit import audit_rows
from laminar.data.journal import MemoryJournal
from laminar.data.rows import ForgetTokens, LeaseRow, PieceRow, Row, State, TrajectoryRow
from laminar.schema.trajectories import ExperienceGroup, Update
from laminar.simulator.recorder import Event
from laminar.simulator.relays import MachineRelay, Relays

LEGAL: Final[dict[State | None, frozenset[State]]] = {
    None: frozenset({"waiting"}),
    "waiting": frozenset({"waiting", "running", "dropped"}),
    "running": frozenset({"running", "waiting", "finished", "dropped"}),
    "finished": frozenset({"taken", "dropped"}),
    "taken": frozenset({"finished", "trained"}),
    "trained": frozenset(),
    "dropped": frozenset(),
}
"""From which state to which a trajectory may go; None: it is not issued yet."""

SPARE_SLOTS = 2
"""Slots of a relay beyond those of versions that are kept, pinned or read: one that fills, one that is spare."""

SAME_S = 1e-6
"""Times closer than this are equal: events are rounded."""


class Violation(Exception):
    """Something that must never happen has happened; the text says what."""


class Checker:
    """Raises `Violation` at the first thing that is wrong."""

    def __init__(
        self,
        relays: Relays,
        relay_of: Callable[[str, int], MachineRelay | None],
        *,
        mixes_versions: bool,
        keep_versions: int,
    ) -> None:
        self._relays = relays
        self._relay_of = relay_of
        self._mixes_versions = mixes_versions
        self._keep_versions = keep_versions
        self._rows: dict[int, TrajectoryRow] = {}
        self._numbers: dict[str, int] = {}
        self._leases: dict[int, str] = {}
        self._versions: dict[int, set[int]] = defaultdict(set)
        self._touched: list[int] = []
        self._learner_version = 0
        self._untrained: list[str] = []
        self._trained: set[str] = set()
        self.num_checks = 0

    # ---- the journal

    def wrote(self, operation: Sequence[Row]) -> None:
        """One operation of the data shard."""
        for row in operation:
            self.num_checks += 1
            match row:
                case TrajectoryRow():
                    self._moved(row)
                case PieceRow(trajectory=trajectory, piece=piece):
                    self._touched.append(trajectory)
                    if piece.generated:
                        self._versions[trajectory].add(piece.version)
                    if len(self._versions[trajectory]) > 1 and not self._mixes_versions:
                        raise Violation(f"trajectory {trajectory} has versions {sorted(self._versions[trajectory])}")
                case ForgetTokens(trajectory=trajectory):
                    self._versions.pop(trajectory, None)
                case LeaseRow(num=num, lease_id=lease_id):
                    self._leases[num] = lease_id

    def _moved(self, row: TrajectoryRow) -> None:
        before = self._rows.get(row.num)
        state = before.state if before else None
        if row.state not in LEGAL[state]:
            raise Violation(f"trajectory {row.trajectory_id} went from {state} to {row.state}")
        if before and row.attempt < before.attempt:
            raise Violation(f"trajectory {row.trajectory_id} went from attempt {before.attempt} to {row.attempt}")
        if row.state == "running" and before and before.state == "running" and row.attempt == before.attempt:
            raise Violation(f"trajectory {row.trajectory_id} changed hands without a new attempt")
        self._rows[row.num] = row
        self._numbers[row.trajectory_id] = row.num
        self._touched.append(row.num)

    def restarted(self, journal: MemoryJournal) -> None:
        """The data shard lost what its disk had not confirmed: what is left is what counts."""
        self._rows.clear()
        self._numbers.clear()
        self._versions.clear()
        with journal.rows() as rows:
            for row in rows.trajectories():
                self._rows[row.num] = row
                self._numbers[row.trajectory_id] = row.num
            for piece in rows.pieces():
                if piece.piece.generated:
                    self._versions[piece.trajectory].add(piece.piece.version)
            self._learner_version = rows.position().learner_version

    # ---- calls to the data shard

    def may_report(self, lease_id: str, update: Update) -> bool:
        """Whether a report is of the present holder of its trajectory; all others are fenced."""
        num = self._numbers.get(update.trajectory_id)
        row = self._rows.get(num) if num is not None else None
        if row is None or row.state != "running" or row.lease is None:
            return False
        return row.attempt == update.attempt and self._leases.get(row.lease) == lease_id

    def begin_call(self) -> None:
        """A report comes in: note what it touches."""
        self._touched.clear()

    def end_call(self, fenced: Sequence[str]) -> None:
        """A report was taken in; `fenced` are trajectories that it had no right to."""
        touched = set(self._touched)
        for trajectory_id in fenced:
            if self._numbers.get(trajectory_id) in touched:
                raise Violation(f"a fenced report changed trajectory {trajectory_id}")

    def sampled(self, step: int) -> None:
        """The trainer asks for experience of a step."""
        self._learner_version = max(self._learner_version, step - 1)

    def rewound(self, step: int) -> None:
        """The trainer goes back to a step."""
        self._learner_version = step

    # ---- the learner

    def learns(self, groups: Sequence[ExperienceGroup]) -> None:
        """A mini-batch is trained."""
        for group in groups:
            for member in group.members:
                if member.trajectory_id in self._trained or member.trajectory_id in self._untrained:
                    raise Violation(f"trajectory {member.trajectory_id} is trained twice")
                versions = {piece.version for piece in member.pieces if piece.generated}
                if len(versions) != 1 and not self._mixes_versions:
                    raise Violation(f"trajectory {member.trajectory_id} is trained with versions {sorted(versions)}")
                self._untrained.append(member.trajectory_id)

    def saved(self) -> None:
        """What was trained until now is durable."""
        self._trained.update(self._untrained)
        self._untrained.clear()

    def restored(self) -> None:
        """A new learner knows only what was durable."""
        self._untrained.clear()

    # ---- events

    def saw(self, event: Event) -> None:
        """One event of any service."""
        self.num_checks += 1
        match event["kind"]:
            case "trajectory":
                self._check_staleness(event)
            case "pulled":
                self._check_pull(event)
            case "repack":
                self._check_plan(event)
            case "published":
                self._check_memory()

    def _check_staleness(self, event: Event) -> None:
        staleness = max(0, self._learner_version - event["version"])
        if event["staleness"] != staleness:
            raise Violation(
                f"trajectory {event['trajectory_id']} of version {event['version']} has staleness "
                f"{event['staleness']}, but finished when the learner was at {self._learner_version}"
            )

    def _check_pull(self, event: Event) -> None:
        version, replica_id = event["version"], event["replica_id"]
        relay = self._relay_of(replica_id, event["incarnation"])
        if relay is None or version not in relay.arrives_s:
            raise Violation(f"{replica_id} serves version {version}, which its relay never got")
        if event["t"] + SAME_S < relay.arrives_s[version]:
            raise Violation(
                f"{replica_id} serves version {version} at {event['t']:.6f} s; its last byte is at "
                f"{relay.host.name} at {relay.arrives_s[version]:.6f} s"
            )

    def _check_plan(self, event: Event) -> None:
        sources = {move["source"] for move in event["moves"]}
        both = sources & {move["target"] for move in event["moves"]}
        if both:
            raise Violation(f"a repack releases {sorted(both)}, which it moves others to")

    def _check_memory(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for machine, relay in self._relays.machines.items():
            status = relay.store.status(now_s, 0)
            held = sum(1 for version in status.versions if version.pinned or version.num_leases)
            most = self._keep_versions + held + len(status.incoming) + SPARE_SLOTS
            if status.num_slots > most:
                raise Violation(f"the relay of {machine} has {status.num_slots} slots, {most} are enough")

    # ---- the end

    def check_end(self, journal: MemoryJournal, num_steps: int, groups_per_step: int) -> None:
        """The run is over: nothing was lost on the way."""
        with journal.rows() as rows:
            report = audit_rows(rows, mixes_versions=self._mixes_versions)
            per_step = rows.trained_groups_by_step()
        if not report.is_sound:
            raise Violation("; ".join(report.problems[:3]))
        short = {step: per_step[step] for step in range(1, num_steps + 1) if per_step[step] != groups_per_step}
        if short:
            raise Violation(f"steps trained other numbers of groups than {groups_per_step}: {short}")
        durable = {row.trajectory_id for row in self._rows.values() if row.state == "trained"}
        if durable != self._trained:
            raise Violation(f"{len(durable ^ self._trained)} trajectories are trained in the ledger or learner only")
