"""Waiting for a change of state: by event, never by looking again and again."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


class Signal:
    """Wakes everybody who waits, in the order in which they came; each tries again what it waits to do."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}

    def fire(self) -> None:
        """Something changed."""
        for waiter in self._waiters:
            _wake(waiter)

    async def wait_for(self, attempt: Callable[[], Value | None], wait_s: float) -> Value | None:
        """The first answer of `attempt` that is not None, or None after `wait_s`.

        waits for:  `fire`, or the deadline
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        while (value := attempt()) is None and loop.time() < deadline_s:
            waiter = loop.create_future()
            timer = loop.call_at(deadline_s, _wake, waiter)
            self._waiters[waiter] = None
            try:
                await waiter
            finally:
                timer.cancel()
                del self._waiters[waiter]
        return value


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
