"""What replicas report about themselves, and what the manager orders."""

from typing import Literal

from msgspec import Struct

ReplicaPhase = Literal["starting", "loading", "generating", "idle"]


class ReplicaLoad(Struct, frozen=True, kw_only=True):
    """One heartbeat: who I am, which version I hold, how full I am.

    `lease_id` names the batch being run, None between batches. `num_running` counts trajectories that decode now,
    `num_waiting` those admitted to the replica but not yet in its KV cache, `num_acting` those that wait for an
    environment. KV use is in tokens.
    """

    replica_id: str
    incarnation: int
    phase: ReplicaPhase
    version: int | None
    lease_id: str | None
    num_running: int
    num_waiting: int
    num_acting: int
    kv_used_tokens: int
    kv_capacity_tokens: int

    @property
    def num_trajectories(self) -> int:
        return self.num_running + self.num_waiting + self.num_acting

    @property
    def kv_fraction(self) -> float:
        """Used share of the KV cache, 0 to 1."""
        return self.kv_used_tokens / self.kv_capacity_tokens if self.kv_capacity_tokens else 0.0


class KnownFleet(Struct, frozen=True, kw_only=True):
    """What the cluster layer tells a manager that starts: how many replicas there shall be, which lives an earlier
    manager left running, and the last lives of those that are over, whose names are used up."""

    num_replicas: int
    running: dict[str, int] = {}
    over: dict[str, int] = {}


class Lease(Struct, frozen=True, kw_only=True):
    """A batch in somebody's hands, as the data shard sees it."""

    lease_id: str
    version: int
    num_unfinished: int
    purpose: Literal["training", "evaluation"]


class Adoption(Struct, frozen=True, kw_only=True):
    """An order to a replica: take over what is unfinished of this lease, under this version."""

    lease_id: str
    version: int


def lease_name(replica_id: str, incarnation: int, cycle: int) -> str:
    """Name of the lease for one batch of one life of a replica, e.g. `replica-1/2/37`."""
    return f"{replica_id}/{incarnation}/{cycle}"
