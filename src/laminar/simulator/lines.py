"""Calls from one service to another that lives in the same event loop: latency, loss, cuts, and the end of either side.

Invariant: whatever happens, the caller gets an answer, `PeerLost`, or what the service raised; after the host of a
service is over, nothing of that service runs on behalf of a caller.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from laminar.schema.errors import PeerLost

CALL_S = 0.001
"""One way of a call between two processes of a cluster, about what a Ray actor call takes."""


class Weather(Protocol):
    """What happens to one message."""

    def delay_s(self) -> float:
        """Time that it is under way."""
        ...

    def loses(self) -> bool:
        """Whether it never arrives."""
        ...


class Calm:
    """Every message arrives after the same time."""

    def delay_s(self) -> float:
        """`CALL_S`."""
        return CALL_S

    def loses(self) -> bool:
        """Never."""
        return False


class Host:
    """The process of one life of a service: it can be frozen, and it ends."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_over = False
        self._awake = asyncio.Event()
        self._awake.set()
        # Dictionaries, because a set of tasks is in another order in every process.
        self._callers: dict[asyncio.Task[Any], None] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}

    @property
    def is_frozen(self) -> bool:
        """Whether it does nothing at present, and does not know."""
        return not self._awake.is_set()

    def spawn(self, work: Any, parent: asyncio.TaskGroup) -> asyncio.Task[Any]:
        """A task that ends with this life."""
        task: asyncio.Task[Any] = parent.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    def freeze(self) -> None:
        """Stop answering, stop calling; `thaw` goes on as if nothing had been."""
        self._awake.clear()

    def thaw(self) -> None:
        """End a freeze."""
        self._awake.set()

    async def awake(self) -> None:
        """waits for:  `thaw`"""
        if not self._awake.is_set():
            await self._awake.wait()

    def end(self) -> None:
        """The process is gone at once: its tasks end, and whoever waits for its answer learns that it is lost."""
        self.is_over = True
        for task in [*self._tasks, *self._callers]:
            task.cancel()

    async def serve(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Answer one call; `PeerLost` if this life ends meanwhile."""
        caller = asyncio.current_task()
        assert caller is not None, "a call is made by a task"
        if self.is_over:
            raise PeerLost(f"{self.name} is gone")
        is_nested = caller in self._callers
        self._callers[caller] = None
        try:
            await self.awake()
            return await call()
        except asyncio.CancelledError:
            if self.is_over and not is_nested and caller.uncancel() == 0:
                raise PeerLost(f"{self.name} is gone") from None
            raise
        finally:
            if not is_nested:
                self._callers.pop(caller, None)


class Line:
    """Every public method of a service, by way of the network; `find` gives host and service of the present life.

    `PeerLost` if there is none, if the line `is_cut`, or if the weather loses the question or the answer.
    """

    def __init__(
        self, find: Callable[[], tuple[Host, Any] | None], name: str, weather: Weather, caller: Host | None = None
    ) -> None:
        self._find = find
        self._name = name
        self._weather = weather
        self._caller = caller
        self.is_cut = False

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(self._weather.delay_s())
            found = self._find()
            if found is None or self.is_cut or self._weather.loses():
                raise PeerLost(f"{self._name} cannot be reached")
            host, service = found
            answer = await host.serve(lambda: getattr(service, method)(*args, **kwargs))
            if self.is_cut or self._weather.loses():
                raise PeerLost(f"the answer of {self._name} did not arrive")
            if self._caller is not None:
                await self._caller.awake()
            return answer

        setattr(self, method, call)  # a name is looked up once
        return call
