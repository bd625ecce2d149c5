"""An event loop whose clock jumps to the next timer, so that minutes of waiting take milliseconds.

Invariant: time passes only when nothing is ready to run, and then exactly to the next timer; with code that uses
neither threads nor sockets nor a clock or randomness of its own, two runs do the same things at the same times.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Nothing is ever ready; asked to wait, it lets the clock jump instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("every task waits for another one and no timer runs: a deadlock")
        if timeout > 0:
            self.now_s += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code that reads time from its event loop only, and uses neither threads nor sockets."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
