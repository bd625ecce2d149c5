"""Trajectories in somebody's hands: leases, attempts, and the tokens that stream in.

Invariants: a running trajectory is in exactly one lease and carries an attempt number that nobody else was given; what
arrives under another lease or attempt changes nothing. A lease has one version, and so have all tokens streamed to it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from laminar.data.journal import Rows
from laminar.data.ledger import Ledger, Trajectory
from laminar.data.rows import LeaseRow, PieceRow, State, StintRow
from laminar.schema.fleet import Lease
from laminar.schema.trajectories import Append, Purpose


class PartialPool:
    """Who runs what, and how far it has come."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # Every lease there ever was, so that a repeated claim is known: some 100 bytes for a batch of hundreds.
        self._rows: dict[str, LeaseRow] = {}
        self._held: dict[int, dict[int, Trajectory]] = {}

    def restore(self, rows: Rows) -> None:
        """Take up the leases of an earlier process."""
        self._rows = {row.lease_id: row for row in rows.leases()}
        for group in self._ledger.groups.values():
            for trajectory in group.in_state("running"):
                row = trajectory.row
                assert row.lease is not None, "a running trajectory is in a lease"
                self._held.setdefault(row.lease, {})[row.num] = trajectory
                stints = list(rows.stints(range(row.num, row.num + 1)))
                trajectory.stint = stints[-1]

    def is_known(self, lease_id: str) -> bool:
        """Whether this lease was ever opened."""
        return lease_id in self._rows

    def purpose(self, lease_id: str) -> Purpose | None:
        """What a lease is for; None if it was never opened."""
        row = self._rows.get(lease_id)
        return row.purpose if row else None

    def held(self, lease_id: str) -> list[Trajectory]:
        """Unfinished trajectories of a lease."""
        row = self._rows.get(lease_id)
        return list(self._held.get(row.num, {}).values()) if row else []

    def adopted(self, lease_id: str, from_lease: str) -> list[Trajectory]:
        """Unfinished trajectories of a lease that it took over from another one."""
        source = self._rows.get(from_lease)
        return [t for t in self.held(lease_id) if source is not None and t.row.adopted_from == source.num]

    def live(self) -> tuple[Lease, ...]:
        """Leases with unfinished trajectories."""
        return tuple(
            Lease(lease_id=row.lease_id, version=row.version, num_unfinished=len(held), purpose=row.purpose)
            for row in self._rows.values()
            if (held := self._held.get(row.num))
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
        new = trajectory.response.extend(update.offset, update.pieces, self._version_of(trajectory))
        num = trajectory.row.num
        self._ledger.record(*[PieceRow(trajectory=num, piece=piece) for piece in new])

    def finish(self, trajectory: Trajectory, state: State, end: str, **changes: Any) -> None:
        """The trajectory leaves its lease for good."""
        version = self._version_of(trajectory)
        self._end(trajectory, end)
        self._ledger.move(trajectory, state, version=version, **changes)

    def give_back(self, trajectory: Trajectory, reason: str, *, keep_tokens: bool, num_failures: int = 0) -> None:
        """The trajectory waits for the next claim, from its first token on unless its tokens are kept."""
        self._end(trajectory, f"returned: {reason}")
        if not keep_tokens:
            self._ledger.forget_tokens(trajectory)
        row = trajectory.row
        self._ledger.move(
            trajectory,
            "waiting",
            attempt=row.attempt + 1,
            adopted_from=None,
            version=trajectory.response.version,
            num_failures=row.num_failures + num_failures,
        )

    def _open(self, lease_id: str, version: int, purpose: Purpose) -> LeaseRow:
        row = self._rows.get(lease_id)
        if row is None:
            num = self._ledger.position.num_leases + 1
            row = LeaseRow(
                num=num, lease_id=lease_id, version=version, purpose=purpose, opened_s=self._ledger.now_s()
            )
            self._rows[lease_id] = row
            self._ledger.advance(num_leases=num)
            self._ledger.record(row)
        return row

    def _begin(self, trajectory: Trajectory, lease: LeaseRow, *, attempt: int, adopted_from: int | None) -> None:
        self._held.setdefault(lease.num, {})[trajectory.row.num] = trajectory
        self._ledger.move(trajectory, "running", lease=lease.num, attempt=attempt, adopted_from=adopted_from)
        trajectory.stint = StintRow(
            trajectory=trajectory.row.num,
            attempt=attempt,
            lease=lease.num,
            num_tokens=trajectory.response.num_tokens,
            began_s=self._ledger.now_s(),
        )
        self._ledger.record(trajectory.stint)

    def _end(self, trajectory: Trajectory, end: str) -> None:
        lease, stint = trajectory.row.lease, trajectory.stint
        assert lease is not None and stint is not None, "a running trajectory is in a lease"
        held = self._held[lease]
        del held[trajectory.row.num]
        if not held:
            del self._held[lease]
        self._ledger.record(replace(stint, ended_s=self._ledger.now_s(), end=end))
        trajectory.stint = None
