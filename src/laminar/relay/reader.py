"""A replica's end: weights are mapped, not received.

Invariant: the tensors of a lease do not change while it is open; if that cannot be vouched for (the connection broke
meanwhile), leaving the lease raises `PeerLost` and whoever copied from it copies again.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType

from laminar.engines.protocol import Weights
from laminar.relay.client import ClientRules, Connection, RelayClient
from laminar.relay.messages import (
    Done,
    GetStatus,
    Leased,
    Newest,
    RelayStatus,
    ReleaseLease,
    TakeLease,
    Version,
    WaitNewer,
)
from laminar.relay.tensors import MappedTensors, Selection
from laminar.schema.errors import PortError


class WeightReader:
    """Fulfils `rollout.ports.WeightSource` over the socket of this machine's relay.

    Connects on use, and again after the relay restarted. Raises `PeerLost` when there is no relay, `DeadlinePassed`
    when it does not answer.
    """

    def __init__(self, socket_path: Path, secret: bytes, *, rules: ClientRules | None = None) -> None:
        self._client = RelayClient(socket_path, secret, rules or ClientRules())

    async def newest(self) -> int | None:
        """Newest complete version, None before the first publish."""
        return (await self._client.call(Newest(), Version)).version

    async def wait_newer(self, than: int | None, wait_s: float) -> int | None:
        """Newest complete version as soon as it is newer than `than`, or what there is after `wait_s`."""
        deadline_s = wait_s + self._client.rules.call_s
        return (await self._client.call(WaitNewer(than, wait_s), Version, deadline_s)).version

    async def status(self) -> RelayStatus:
        """What the relay holds."""
        return await self._client.call(GetStatus(), RelayStatus)

    @contextlib.asynccontextmanager
    async def lease(
        self, version: int | None = None, slices: Mapping[str, Selection] | None = None
    ) -> AsyncIterator[Weights]:
        """Map a version (None: the newest complete one), kept while the context is open.

        Of the tensors named in `slices` only that share is shown. Raises `WeightsUnavailable` if the version is not
        held. The tensors are `MappedTensors`: read-only, and not to be used after the context.
        """
        connection = await self._client.connection()
        leased = await connection.call(TakeLease(version), Leased, self._client.rules.call_s)
        try:
            memory, _ = connection.maps.map(leased.memory)
            tensors = MappedTensors(memory, leased.manifest, leased.checksum, slices or {})
            del memory
            try:
                yield Weights(leased.version, tensors)
            finally:
                tensors.end()
        except BaseException:
            with contextlib.suppress(PortError):
                await self._release(connection, leased.lease_id)
            raise
        await self._release(connection, leased.lease_id)

    async def close(self) -> None:
        """Close the connection; open leases end."""
        await self._client.close()

    async def __aenter__(self) -> "WeightReader":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _release(self, connection: Connection, lease_id: int) -> None:
        await connection.call(ReleaseLease(lease_id), Done, self._client.rules.call_s)
