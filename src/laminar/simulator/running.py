"""Run a world to its end and measure it."""

import asyncio
import gc
import resource
import time
from collections.abc import Awaitable, Callable

from msgspec import Struct

from laminar.config.simulation import SimulationConfig
from laminar.schema.errors import LaminarError
from laminar.simulator import clock
from laminar.simulator.measuring import Measures, measure
from laminar.simulator.recorder import Recorder
from laminar.simulator.world import World

MEASURED = frozenset({"step", "trajectory", "load", "repack", "adopted", "pulled", "claimed", "published"})
"""Kinds of events that the measures need."""


class Run(Struct, frozen=True, kw_only=True):
    """A finished simulation: what it measured, what it said, and what it cost this machine.

    `cpu_s` says more than `wall_s` on a machine that does something else, too. `peak_bytes` is the process's.
    """

    config: SimulationConfig
    measures: Measures
    recorder: Recorder
    wall_s: float
    cpu_s: float
    peak_bytes: int


Trouble = Callable[[World], Awaitable[None]]
"""What happens to a world while it runs."""


def simulate(config: SimulationConfig, *, keep_all_events: bool = False, trouble: Trouble | None = None) -> Run:
    """Simulate one run from its first to its last step; raises what ended it early."""
    recorder = Recorder(config.emulation.tokens_per_id, kinds=None if keep_all_events else MEASURED)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    gc.collect()
    gc.freeze()
    gc.disable()  # nearly all objects live to the end, and going through millions of them takes a third of the time
    try:
        world = clock.run(_run(World(config, recorder), trouble))
    except ExceptionGroup as errors:
        raise _only_reason(errors) from None
    finally:
        gc.enable()
        gc.unfreeze()
    return Run(
        config=config,
        measures=measure(config, recorder, world.journal),
        recorder=recorder,
        wall_s=time.perf_counter() - began_s,
        cpu_s=time.process_time() - began_cpu_s,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _only_reason(errors: ExceptionGroup) -> Exception:
    """What services of a run raise comes in groups; the one sentence in it, if that is all that it is."""
    error: Exception = errors
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, LaminarError) else errors


async def _run(world: World, trouble: Trouble | None) -> World:
    async with world.open():
        disturbing = asyncio.ensure_future(trouble(world)) if trouble else None
        await world.train()
        if disturbing is not None:
            disturbing.cancel()
            await asyncio.wait([disturbing])
    return world
