"""What a run does on a machine of a Ray cluster, and how it waits for room on one."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from laminar.cluster.agent import MARKER, MachineAgent, marker
from laminar.cluster.guardian import MARK, kill_marked
from laminar.cluster.life import LifeLost
from laminar.cluster.machine import this_machine
from laminar.cluster.machines import Machines
from laminar.cluster.shell import Place
from laminar.scheduling.placement import Need
from laminar.schema.errors import UserError
from laminar.telemetry.events import MemoryEvents, NullEvents

GPU = Need(num_gpus=1, is_replica=True)


def place(folder: Path, secret: bytes = b"s" * 32) -> Place:
    return Place(run_id="run", folder=folder, sockets=folder, secret=secret, module_path=())


async def test_a_machine_that_sees_another_folder_under_the_same_path_is_refused(tmp_path: Path) -> None:
    agent = MachineAgent(place(tmp_path), tmp_path, see_s=0.0)
    with marker(place(tmp_path)):
        assert (await agent.look()).sockets == tmp_path
    assert not (tmp_path / MARKER).exists()
    with pytest.raises(UserError, match="does not see the run folder"):
        await agent.look()
    with marker(place(tmp_path, secret=b"of an earlier start")), pytest.raises(UserError, match="--out folder"):
        await agent.look()


@contextmanager
def child(**environment: str) -> Iterator[psutil.Process]:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()  # its own environment shows from now on
        try:
            yield psutil.Process(process.pid)
        finally:
            process.kill()


async def test_an_agent_kills_what_is_frozen_and_belongs_to_its_run_and_nothing_else(tmp_path: Path) -> None:
    agent = MachineAgent(place(tmp_path), tmp_path)
    with child() as stranger, child(**{MARK: str(tmp_path)}) as ours:
        ours.suspend()
        await agent.kill(stranger.pid)
        await agent.kill(ours.pid)
        assert ours.wait(timeout=10) is not None
        assert stranger.is_running()
    kill_marked(ours.pid, str(tmp_path))  # it is gone, and nobody complains


async def test_what_finds_no_room_waits_for_a_machine_that_has_some() -> None:
    machines = Machines(NullEvents(), room_wait_s=30.0)
    machines.add(replace(this_machine(Path(), 1.0), name="a"))
    assert (await machines.place("replica-0", GPU)).name == "a"
    waiting = asyncio.ensure_future(machines.place("replica-1", GPU))
    await asyncio.sleep(0)
    assert not waiting.done()
    machines.add(replace(this_machine(Path(), 1.0), name="b"))
    assert (await waiting).name == "b"
    waiting = asyncio.ensure_future(machines.place("replica-2", GPU))
    machines.ended("replica-0", lived_s=100.0)
    assert (await waiting).name == "a"


async def test_what_finds_no_room_in_time_counts_as_a_life_that_failed() -> None:
    machines = Machines(NullEvents(), room_wait_s=0.01)
    with pytest.raises(LifeLost, match="no machine has 1 free GPUs for replica-0"):
        await machines.place("replica-0", GPU)


async def test_a_machine_is_given_up_aloud_unless_it_is_the_only_one() -> None:
    events = MemoryEvents()
    machines = Machines(events, room_wait_s=0.0)
    for name in ("a", "b"):
        machines.add(replace(this_machine(Path(), 0.0), name=name))
    given_up = (await machines.place("replica-0", Need(is_replica=True))).name
    for _ in range(2):
        machines.ended("replica-0", lived_s=1.0)
        last = (await machines.place("replica-0", Need(is_replica=True))).name
    assert [event["machine"] for event in events.of("machine_given_up")] == [given_up]
    assert last != given_up
    machines.remove(machines.present[last])
    assert (await machines.place("replica-0", Need(is_replica=True))).name == given_up
