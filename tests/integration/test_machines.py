"""One run over several machines: nodes of one Ray cluster, each with its own relay, that come and die meanwhile."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import run_kit as kit
from ray_kit import RayNodes, ray_nodes

from laminar.chaos.session import ChaosSession
from laminar.cluster.control import Scale, ask
from laminar.cluster.instance import SCRATCH_PREFIX
from laminar.dashboard.status import status
from laminar.schema.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ENDLESS = (*kit.SMALL, "trainer.num_steps=100000", "trainer.checkpoint.every_steps=5", "evaluation.num_prompts=0")
PATIENT = ("manager.suspect_after_s=20", "manager.dead_after_s=60")
"""What dies is noticed by its connection; nobody is given up because this machine has much to do."""


def test_a_run_uses_the_machines_of_a_cluster_as_they_come_and_outlives_those_that_die(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    with ray_nodes() as cluster:
        second = cluster.add()
        address = f"cluster.address={cluster.address}"
        with kit.training(str(kit.RECIPE), *ENDLESS, *PATIENT, address, "--out", str(run), log=log) as process:

            def until(what: str, condition: Callable[[], object]) -> None:
                kit.wait_for(what, condition, process, log)

            until("a relay on each machine", lambda: len(with_relay(run)) == 2)
            first, other = machines(run)
            cluster.add()
            until("work on both machines, and a third one", lambda: len(working(run)) == 2 and len(machines(run)) == 3)
            assert laminar("scale", str(run), "--replicas", "3").returncode == 0
            cluster.kill(second)
            (moved,) = [replica for (replica, _), machine in placed(run).items() if machine == other]
            until("work on the third machine", lambda: machines(run)[2] in working(run))
            until("the next life of the replica that was lost", lambda: (moved, 2) in placed(run))
            assert placed(run)[moved, 2] != other
            assert [event["machine"] for event in kit.events(run, "machine_lost")] == [other]
            assert "2 relays" in laminar("relay", "status", str(run)).stdout
            assert f", on {first}" in status(run)
            steps = kit.last_step(run)
            until("further steps", lambda: kit.last_step(run) >= steps + 3)
            with pytest.raises(UserError, match=r"less than manager\.min_replicas"):
                ask(run, Scale(num_replicas=0))
            ask(run, Scale(num_replicas=2))
            until("a replica less", lambda: kit.events(run, "replica_retired"))
            kill_launcher(process, cluster, live_replica(run))

        with pytest.raises(UserError, match="not alive"):
            ask(run, Scale(num_replicas=2))
        more = f"trainer.num_steps={kit.last_step(run) + 3}"
        with kit.training("--resume", str(run), more, log=log) as process:
            kit.finish(process, log)
        nothing_is_left_of(cluster)
    report = kit.audit(run)
    assert report["problems"] == []
    assert report["counts"]["trained"] == kit.last_step(run) * 4 * 8
    assert kit.summary(run)["exit_reason"] == "finished"
    assert (run / "export" / "model.safetensors").is_file()


def machines(run: Path) -> list[str]:
    """The launcher's is the first; all nodes have the same host here, so the others are numbered."""
    return sorted(event["machine"] for event in kit.events(run, "machine_joined"))


def working(run: Path) -> set[str]:
    """Machines on which a replica has finished a batch under weights that it took from its own machine's relay."""
    done = {tuple(event["lease_id"].split("/")[:2]) for event in kit.events(run, "batch_done")}
    return {machine for (name, life), machine in placed(run).items() if (name, str(life)) in done} & with_relay(run)


def with_relay(run: Path) -> set[str]:
    """Machines whose relay has answered."""
    return {e["machine"] for e in kit.events(run, "service_ready") if e["service"] == f"relay-{e['machine']}"}


def placed(run: Path) -> dict[tuple[str, int], str]:
    """The machine of each life of each replica."""
    started = kit.events(run, "replica_started")
    return {(event["replica_id"], event["incarnation"]): event["machine"] for event in started}


def live_replica(run: Path) -> int:
    """Process id of a replica that works."""
    return next(process.pid for name, process in ChaosSession(run).live.items() if name.startswith("replica-"))


def laminar(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(kit.laminar(*args), capture_output=True, text=True, timeout=kit.DEADLINE_S)


def kill_launcher(process: subprocess.Popen[bytes], cluster: RayNodes, frozen: int) -> None:
    """SIGKILL, while one process of the run is frozen: what the run had on all machines ends, and nothing else."""
    ours = cluster.workers()
    os.kill(frozen, signal.SIGSTOP)
    process.kill()
    process.wait(kit.DEADLINE_S)
    assert kit.survivors(ours, within_s=kit.DEADLINE_S) == []
    nothing_is_left_of(cluster)


def nothing_is_left_of(cluster: RayNodes) -> None:
    """No processes of actors, no folders of processes that are gone."""
    give_up_s = time.monotonic() + kit.DEADLINE_S
    while left := [*map(str, cluster.workers()), *stale_folders()]:
        assert time.monotonic() < give_up_s, left
        time.sleep(0.05)


def stale_folders() -> list[str]:
    folders = Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*-*")
    return [str(folder) for folder in folders if not psutil.pid_exists(int(folder.name.split("-")[1]))]
