"""Blocking work beside the event loop, never left behind."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run it in a thread; a cancelled caller still waits for the thread to end.

    The thread uses memory and descriptors that the caller frees next, so it must not outlive the call.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # seen: the cancellation is what the caller gets
        raise


async def run_until_stopped(function: Callable[[], T], stop: Callable[[], None], executor: Executor | None = None) -> T:
    """Run it in a thread; a cancelled caller calls `stop`, which must make it end, and waits for that."""
    work = asyncio.get_running_loop().run_in_executor(executor, function)
    try:
        return await asyncio.shield(work)
    finally:
        while not work.done():
            stop()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # seen, also if the caller was cancelled
