"""Calls to a service in another process: `await port.method(values)`, with a deadline and three errors."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from laminar.schema.errors import DeadlinePassed, LaminarError, PeerLost

CALL_DEADLINE_S = 30.0
"""Longest silence of a neighbour that is alive; calls that wait on purpose (`wait_s`) get that much more."""


RELAY = "relay"
"""Actor name of the only relay, and how those of several machines begin."""


class ActorPort:
    """Every public method of a service, by the service's name; whoever lives under that name at the time answers.

    Raises `PeerLost` if nobody does or the callee dies, `DeadlinePassed`, or what the service raised.
    """

    def __init__(self, namespace: str, name: str, deadline_s: float = CALL_DEADLINE_S) -> None:
        self._namespace = namespace
        self._name = name
        self._deadline_s = deadline_s
        self._handle: Any = None

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, wait_s: float | None = None) -> Any:
            extra = {} if wait_s is None else {"wait_s": wait_s}
            return await self._call(method, args, extra, self._deadline_s + (wait_s or 0.0))

        return call

    async def _call(self, method: str, args: tuple[Any, ...], extra: dict[str, Any], deadline_s: float) -> Any:
        try:
            async with asyncio.timeout(deadline_s):
                return await self._actor().call.remote(method, args, extra)
        except TimeoutError:
            raise DeadlinePassed(f"{self._name} gave no answer to {method} within {deadline_s:g} s") from None
        except RayTaskError as error:
            if isinstance(error.cause, LaminarError):
                raise error.cause from None
            raise
        except RayActorError as error:
            self._handle = None
            raise PeerLost(f"{self._name} is gone ({method}): {first_line(error)}") from None

    def _actor(self) -> Any:
        if self._handle is None:
            try:
                self._handle = ray.get_actor(self._name, namespace=self._namespace)
            except ValueError:
                raise PeerLost(f"{self._name} is not running") from None
        return self._handle


def port_to(namespace: str, name: str) -> Any:
    """A port whose methods are those of whatever protocol the caller declared for this neighbour."""
    return ActorPort(namespace, name)


class ActorReplicas:
    """The way to each life of each replica."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._ports: dict[str, Any] = {}

    def port(self, replica_id: str, incarnation: int) -> Any:
        """Calls on it raise `PeerLost` once that life is over."""
        name = replica_name(replica_id, incarnation)
        if name not in self._ports:
            self._ports[name] = port_to(self._namespace, name)
        return self._ports[name]


class AllRelays:
    """Fulfils `manager.ports.RelayPort` for the relays of all machines that there are at the time."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    async def pin(self, versions: tuple[int, ...]) -> None:
        """Keep these versions everywhere. A relay that is away has none to keep."""
        names = await asyncio.to_thread(ray.util.list_named_actors)
        relays = [port_to(self._namespace, name) for name in names if name.startswith(RELAY)]
        for answer in await asyncio.gather(*(relay.pin(versions) for relay in relays), return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, PeerLost):
                raise answer


def relay_name(machine: str) -> str:
    """Actor name of the relay of a machine; without a name it is the only one."""
    return f"{RELAY}-{machine}" if machine else RELAY


def replica_name(replica_id: str, incarnation: int) -> str:
    """Actor name of one life of a replica."""
    return f"{replica_id}/{incarnation}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text; Ray's go on for twenty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def cause_line(error: RayTaskError) -> str:
    """Type and text of what a remote method raised; of a group of errors the first that says something."""
    cause: BaseException = error.cause
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return f"{type(cause).__name__}: {first_line(cause)}"
