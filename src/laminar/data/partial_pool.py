"""Trajectories in somebody's hands: leases, attempts, and the tokens that stream in.

Invariants: a running trajectory is in exactly one lease and carries an attempt number that nobody else was given; what
arrives under another lease or attempt changes nothing. A lease has one version, and so have all tokens streamed to it;
an answer has one version, unless the schedule interrupts answers for new weights (`mixes_versions`).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from laminar.data.journal import Rows
from laminar.data.ledger import Group, Ledger, Trajectory
from laminar.data.rows import LeaseRow, PieceRow, State, StintRow
from laminar.schema.fleet import Lease
from laminar.schema.trajectories import Append, Purpose


class PartialPool:
    """Who runs what, and how far it has come."""

    def __init__(self, ledger: Ledger, *, keeps_partial: bool, mixes_versions: bool) -> None:
        self._ledger = ledger
        self._keeps_partial = keeps_partial
        self._mixes_versions = mixes_versions
        # Every lease there ever was, so that a repeated claim is known: some 100 bytes for a batch of hundreds.
        self._rows: dict[str, LeaseRow] = {}
        self._by_num: dict[int, LeaseRow] = {}
        self._held: dict[int, dict[int, Trajectory]] = {}

    def restore(self, rows: Rows) -> None:
        """Take up the leases of an earlier process."""
        for row in rows.leases():
            if row.num > self._ledger.position.num_dead_leases:
                self._add(row)
        for group in self._ledger.groups.values():
            for trajectory in group.in_state("running"):
                num = trajectory.row.num
                self._held.setdefault(self.lease_of(trajectory).num, {})[num] = trajectory
                *_, trajectory.stint = rows.stints(range(num, num + 1))

    def forget_leases(self) -> None:
        """All replicas are gone; new ones may use the same names."""
        self._ledger.advance(num_dead_leases=self._ledger.position.num_leases)
        self._rows.clear()
        self._by_num.clear()

    def purpose(self, lease_id: str) -> Purpose | None:
        """What a lease is for; None if it was never opened."""
        row = self._rows.get(lease_id)
        return row.purpose if row else None

    def held(self, lease_id: str) -> list[Trajectory]:
        """Unfinished trajectories of a lease."""
        row = self._rows.get(lease_id)
        return list(self._held.get(row.num, {}).values()) if row else []

    def adopted(self, from_lease: str, to_lease: str, version: int) -> list[Trajectory]:
        """Unfinished trajectories that one lease took over from another one, if that is what it runs under."""
        source, target = self._rows.get(from_lease), self._rows.get(to_lease)
        if source is None or target is None or target.version != version:
            return []
        return [t for t in self.held(to_lease) if t.row.adopted_from == source.num]

    def movable(self, from_lease: str, to_lease: str, version: int) -> list[Trajectory]:
        """What may go from one lease to another under `version`: what may go on under it.

        An evaluation stays at its version even without tokens. Training and evaluation may share a lease: each
        trajectory knows what it is for.
        """
        source, target = self._rows.get(from_lease), self._rows.get(to_lease)
        if source is None or from_lease == to_lease:
            return []
        if target is not None and target.version != version:
            return []
        may_change_version = {"training": True, "evaluation": source.version == version}
        return [
            t for t in self.held(from_lease) if self._may_go_on(t, version) and may_change_version[t.group.row.purpose]
        ]

    def holders(self, group: Group) -> tuple[str, ...]:
        """Replicas that run members of a group."""
        leases = {self.lease_of(trajectory).lease_id for trajectory in group.in_state("running")}
        return tuple(sorted({lease.partition("/")[0] for lease in leases}))

    def live(self) -> tuple[Lease, ...]:
        """Leases with unfinished trajectories."""
        rows = [(self._by_num[num], len(held)) for num, held in self._held.items()]
        return tuple(
            Lease(lease_id=row.lease_id, version=row.version, num_unfinished=num_unfinished, purpose=row.purpose)
            for row, num_unfinished in rows
        )

    def lend(self, lease_id: str, version: int, purpose: Purpose, trajectories: Iterable[Trajectory]) -> None:
        """Put waiting trajectories into a lease."""
        lease = self._open(lease_id, version, purpose)
        for trajectory in trajectories:
            self._begin(trajectory, lease, attempt=trajectory.row.attempt, adopted_from=None)

    def hand_over(self, trajectories: Sequence[Trajectory], from_lease: str, to_lease: str, version: int) -> None:
        """Move running trajectories from one lease to another."""
        source = self._rows[from_lease]
        target = self._open(to_lease, version, source.purpose)
        for trajectory in trajectories:
            self._end(trajectory, "adopted")
            if not self._keeps_partial:
                self._ledger.forget_tokens(trajectory)
            self._begin(trajectory, target, attempt=trajectory.row.attempt + 1, adopted_from=source.num)

    def holder_of(self, lease_id: str, trajectory: Trajectory | None, attempt: int) -> Trajectory | None:
        """The trajectory, if this lease was the last to hold it, under this attempt; it may have finished meanwhile."""
        lease = self._rows.get(lease_id)
        if trajectory is None or lease is None:
            return None
        row = trajectory.row
        if row.state == "waiting" or row.lease != lease.num or row.attempt != attempt:
            return None
        return trajectory

    def append(self, trajectory: Trajectory, update: Append) -> None:
        """Take in what is new of it; raises `Refused` if it cannot be true."""
        version = self.lease_of(trajectory).version
        new = trajectory.response.extend(update.offset, update.pieces, version, mixes_versions=self._mixes_versions)
        num = trajectory.row.num
        self._ledger.record(*[PieceRow(trajectory=num, piece=piece) for piece in new])

    def finish(self, trajectory: Trajectory, state: State, **changes: Any) -> None:
        """The trajectory is graded and leaves its lease for good."""
        version = self.lease_of(trajectory).version
        self._end(trajectory, "finished")
        self._ledger.move(trajectory, state, version=version, **changes)

    def drop(self, trajectory: Trajectory, reason: str) -> None:
        """A trajectory that waits or runs is given up."""
        if trajectory.row.state == "running":
            self._end(trajectory, "dropped")
        self._ledger.drop(trajectory, reason)

    def give_back(self, trajectory: Trajectory, end: str, *, keep_tokens: bool, **changes: Any) -> None:
        """The trajectory waits for the next claim, from its first token on unless its tokens are kept."""
        self._end(trajectory, end)
        if not keep_tokens:
            self._ledger.forget_tokens(trajectory)
        attempt, version = trajectory.row.attempt + 1, trajectory.response.version
        self._ledger.move(trajectory, "waiting", attempt=attempt, adopted_from=None, version=version, **changes)

    def lease_of(self, trajectory: Trajectory) -> LeaseRow:
        """The lease of a running trajectory."""
        assert trajectory.row.lease is not None, "a running trajectory is in a lease"
        return self._by_num[trajectory.row.lease]

    def _add(self, row: LeaseRow) -> None:
        self._rows[row.lease_id] = self._by_num[row.num] = row

    def _open(self, lease_id: str, version: int, purpose: Purpose) -> LeaseRow:
        row = self._rows.get(lease_id)
        if row is None:
            num = self._ledger.position.num_leases + 1
            row = LeaseRow(num=num, lease_id=lease_id, version=version, purpose=purpose, opened_s=self._ledger.now_s())
            self._add(row)
            self._ledger.advance(num_leases=num)
            self._ledger.record(row)
        return row

    def _begin(self, trajectory: Trajectory, lease: LeaseRow, *, attempt: int, adopted_from: int | None) -> None:
        if not self._may_go_on(trajectory, lease.version):
            self._ledger.forget_tokens(trajectory)
        self._held.setdefault(lease.num, {})[trajectory.row.num] = trajectory
        version = trajectory.response.version
        self._ledger.move(
            trajectory, "running", lease=lease.num, attempt=attempt, adopted_from=adopted_from, version=version
        )
        trajectory.stint = StintRow(
            trajectory=trajectory.row.num,
            attempt=attempt,
            lease=lease.num,
            num_tokens=trajectory.response.num_tokens,
            began_s=self._ledger.now_s(),
        )
        self._ledger.record(trajectory.stint)

    def _may_go_on(self, trajectory: Trajectory, version: int) -> bool:
        return self._mixes_versions or trajectory.response.version in (None, version)

    def _end(self, trajectory: Trajectory, end: str) -> None:
        lease, stint = self.lease_of(trajectory), trajectory.stint
        assert stint is not None, "a running trajectory has begun to run"
        held = self._held[lease.num]
        del held[trajectory.row.num]
        if not held:
            del self._held[lease.num]
        self._ledger.record(replace(stint, ended_s=self._ledger.now_s(), end=end))
        trajectory.stint = None
