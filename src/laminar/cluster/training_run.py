"""`laminar train` from a validated configuration to a finished run folder."""

import asyncio
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.cluster.control import Scale, control_socket
from laminar.cluster.instance import num_gpus_here, ray_cluster, ray_instance
from laminar.cluster.launcher import Launcher
from laminar.cluster.machine import this_machine
from laminar.cluster.machines import Machines
from laminar.cluster.run_folder import RunFacts
from laminar.cluster.shell import Place, Spec
from laminar.cluster.wiring import ping_rules
from laminar.config.run_config import RunConfig
from laminar.schema.errors import LaminarError
from laminar.telemetry.events import EventLog
from laminar.telemetry.files import EVENTS

if TYPE_CHECKING:
    from laminar.cluster.joined import JoinedCluster

Watch = Callable[[asyncio.Event], Any]
"""Shows the run until the event is set."""


class Interrupted(LaminarError):
    """A signal stopped the run; it can be resumed."""

    def __init__(self, signal_number: int, folder: Path) -> None:
        super().__init__(
            f"stopped by {signal.Signals(signal_number).name}; go on with: laminar train --resume {folder}"
        )
        self.exit_code = 128 + signal_number


def train(config: RunConfig, folder: Path, facts: RunFacts, resume_step: int | None, watch: Watch) -> None:
    """Run to the end; raises `RunFailed`, `UserError` or `Interrupted` when it ends early."""
    address = config.cluster.address
    ray = ray_instance(facts.run_id) if address is None else ray_cluster(facts.run_id, address)
    with EventLog(folder / EVENTS, "launcher") as events, ray as scratch:
        place = Place(
            run_id=facts.run_id,
            folder=folder.resolve(),
            sockets=scratch,
            secret=secrets.token_bytes(32),
            module_path=facts.module_path,
        )
        events.emit(
            "run_started" if resume_step is None else "resumed",
            run_id=facts.run_id,
            name=folder.name,
            num_replicas=config.rollout.num_replicas,
            num_steps=config.trainer.num_steps,
            step=resume_step or 0,
        )
        machines, cluster = _machines(config, place, events)
        reason = "failed"
        try:
            launcher = Launcher(config, place, machines, resume_step, events, cluster)
            asyncio.run(_train(launcher, events, watch, folder, scratch))
            reason = "finished"
        except LaminarError as error:
            reason = str(error)
            raise
        finally:
            events.emit("run_finished", reason=reason)


def _machines(config: RunConfig, place: Place, events: EventLog) -> tuple[Machines, "JoinedCluster | None"]:
    """This machine alone, or those of a cluster, which are known when it runs."""
    machines = Machines(events, room_wait_s=config.manager.start_timeout_s)
    if config.cluster.address is None:
        machines.add(this_machine(place.sockets, num_gpus_here()))
        return machines, None
    from laminar.cluster.joined import JoinedCluster  # on use: relays and their chain

    spec = Spec(config=config, place=place, incarnation=1)
    return machines, JoinedCluster(machines, spec, ping_rules(config), events)


async def _train(launcher: Launcher, events: EventLog, watch: Watch, folder: Path, scratch: Path) -> None:
    over = asyncio.Event()
    received: list[int] = []
    loop = asyncio.get_running_loop()
    run = loop.create_task(launcher.run())

    def stop(number: int) -> None:
        received.append(number)
        run.cancel()

    async def obey(question: Scale) -> None:
        await launcher.scale(question.num_replicas)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    flusher = loop.create_task(events.run_flusher(0.2))
    viewer = loop.create_task(watch(over))
    try:
        async with control_socket(folder, scratch, obey):
            await run
    except asyncio.CancelledError:
        raise Interrupted(received[0] if received else signal.SIGINT, folder) from None
    finally:
        over.set()
        flusher.cancel()
        await asyncio.wait([viewer, flusher])
