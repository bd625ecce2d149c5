"""Calls to a neighbour that may be restarting: asked again until it answers, but not for ever."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from laminar.schema.errors import DeadlinePassed, PeerLost, RunFailed

FIRST_PAUSE_S = 0.1
"""A service that only lost a connection is back at once."""
LONGEST_PAUSE_S = 2.0
"""A restart takes a few seconds; asking more rarely would only add to it."""

Answer = TypeVar("Answer")


async def insist(call: Callable[[], Awaitable[Answer]], *, on: str, deadline_s: float, who: str) -> Answer:
    """The answer of `call`, an idempotent one; `PeerLost` and `DeadlinePassed` are tried again until the deadline.

    `who` wants what `on` says, for the sentence of `RunFailed`. Every other error, also `Fenced`, is the caller's.
    """
    now_s = asyncio.get_running_loop().time
    give_up_s = now_s() + deadline_s
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except (PeerLost, DeadlinePassed) as error:
            if now_s() + pause_s > give_up_s:
                raise RunFailed(
                    f"{who} could not {on} within {deadline_s:g} s; last error: {error or type(error).__name__}"
                ) from error
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
