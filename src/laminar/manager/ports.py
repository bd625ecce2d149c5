"""What the manager needs from its neighbours."""

from typing import Protocol

from laminar.schema.fleet import Lease


class ReplicaPort(Protocol):
    """One life of a replica, as the manager sees it."""

    async def release(self, lease_id: str) -> bool:
        """Let all trajectories of this lease go; False if it is not held (any more)."""
        ...

    async def adopt(self, lease_id: str, version: int) -> bool:
        """Take over what is unfinished of a lease; False if that cannot be done here."""
        ...


class Replicas(Protocol):
    """The way to a replica."""

    def port(self, replica_id: str, incarnation: int) -> ReplicaPort:
        """Calls on it raise `PeerLost` once that life is over."""
        ...


class DataPort(Protocol):
    """The data shard, as the manager sees it."""

    async def leases(self) -> tuple[Lease, ...]:
        """All leases with unfinished trajectories."""
        ...

    async def start_over(self, lease_id: str) -> None:
        """Put the unfinished trajectories of a lease back, their answers discarded."""
        ...


class RelayPort(Protocol):
    """The relay, as the manager sees it."""

    async def pin(self, versions: tuple[int, ...]) -> None:
        """Keep these versions whatever their age; replaces the previous pins."""
        ...
