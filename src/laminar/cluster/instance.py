"""Where a run gets its processes from: a Ray instance of its own, gone with it, or a Ray cluster that it joins.

Invariant: the guardian ends every process of an own instance when this process ends, SIGKILL included. All files of the
run outside its folder lie in one scratch folder that carries our process id, so that the next start can sweep what is
left when the guardian was killed, too. A cluster is left as it was found.
"""

import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray

from laminar.cluster.guardian import guarded
from laminar.cluster.ports import first_line
from laminar.schema.errors import UserError

OBJECT_STORE_BYTES = 100 << 20
"""Ray's object store; our services exchange small values, and weights go through the relay, so its minimum will do."""

SCRATCH_PREFIX = "laminar-"

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    # Ray runs its workers at nice 15: anything else on the machine would go before the trainer and the manager's ticks.
    "RAY_worker_niceness": "0",
    "RAY_enable_metrics_collection": "0",
    "GRPC_VERBOSITY": "NONE",
    # glibc copies past the cache only above 40 MB or so; weights are many tensors of a few MB, a third faster this way
    # (benchmarks/relay.py).
    "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000",
    # Thread pools that spin on few cores slow everything down several times; one thread a process unless the user says.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""Environment of every process of the run, where the user has not set it."""

UNSHARED = {"RAY_AUTH_MODE": "disabled"}
"""What an own instance needs besides; a cluster keeps the way in that its user chose."""


FOR_WORKERS = ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "GLIBC_TUNABLES", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What of it processes in a cluster get, too; the rest is for whoever starts Ray there (docs/machines.md)."""

ANSWER_S = 5.0
"""A cluster that lives answers at once; Ray itself would try for a minute, then end the process."""


@contextmanager
def ray_instance(namespace: str) -> Iterator[Path]:
    """Run Ray on this machine for the time of the context; yields a scratch folder with short paths for sockets."""
    with scratch_folder() as scratch, _connected(QUIET | UNSHARED):
        _start(namespace, scratch)
        yield scratch


@contextmanager
def ray_cluster(namespace: str, address: str) -> Iterator[Path]:
    """Take part in a Ray cluster for the time of the context; raises `UserError` if that cannot be.

    Yields a scratch folder as `ray_instance` does. Our actors end with the connection, the cluster lives on.
    """
    found = _bootstrap_address(address)
    with scratch_folder() as scratch, _connected(QUIET):
        try:
            ray.init(
                address=found,
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                runtime_env={"env_vars": {name: os.environ[name] for name in FOR_WORKERS}},
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(
                f"cluster.address: {address} cannot be used: {first_line(error)} (RAY_AUTH_MODE must be the same here "
                "as where Ray was started)"
            ) from None
        yield scratch


@contextmanager
def scratch_folder(*, is_launcher: bool = True) -> Iterator[Path]:
    """A guarded folder with a short path for sockets; sweeps those that dead processes left."""
    sweep_scratch()
    scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-"))
    with guarded(scratch, is_launcher=is_launcher):
        yield scratch


@contextmanager
def _connected(environment: Mapping[str, str]) -> Iterator[None]:
    """In the environment that Ray and our processes need; disconnects at the end."""
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    try:
        # Ray prints a paragraph on every process that dies; the run's own events say it in a line.
        ray._private.worker.print_to_stdstream = _say_nothing
        yield
    finally:
        ray.shutdown()


def _start(namespace: str, scratch: Path) -> None:
    ray.init(
        address="local",  # not a cluster that this machine belongs to, or that RAY_ADDRESS names
        num_cpus=1,  # our actors ask for none; this keeps Ray from starting a worker per core in advance
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        namespace=namespace,
        log_to_driver=False,
        logging_level=logging.CRITICAL,
        configure_logging=True,
        _temp_dir=str(scratch / "ray"),
    )


def num_gpus_here() -> float:
    """GPUs of the instance."""
    return float(ray.cluster_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]


def _say_nothing(*_: object, **__: object) -> None:
    pass


def sweep_scratch() -> None:
    """Remove the scratch folders of runs whose process is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*-*"):
        pid = folder.name.removeprefix(SCRATCH_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def check(address: str | None) -> None:
    """Raise `UserError` if Ray could not start here, or if nobody answers at the address of a cluster."""
    if address is None:
        check_shared_memory()
    else:
        _bootstrap_address(address)


def _bootstrap_address(address: str) -> str:
    """`HOST:PORT` of the cluster, where somebody answers.

    `auto` is what `ray start` left word of on this machine; Ray's own `auto` takes any instance that it finds running,
    also that of another run.
    """
    found = address
    if address == "auto":
        found = os.environ.get("RAY_ADDRESS") or ray._private.utils.read_ray_address()
    if not found:
        raise UserError(
            "cluster.address: auto finds no Ray cluster that this machine belongs to; start one with ray start --head"
        )
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise UserError(
            f"cluster.address: no Ray cluster answers at {found} ({error}); start one with ray start --head, or give "
            "the address that it printed"
        ) from None
    return found


def check_shared_memory() -> None:
    """Raise `UserError` if Ray could not start here."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return
    free = psutil.disk_usage(str(shm)).free
    if free < OBJECT_STORE_BYTES:
        raise UserError(
            f"/dev/shm has {free >> 20} MiB free but Ray's object store needs {OBJECT_STORE_BYTES >> 20} MiB; "
            "remove files there, or enlarge it (mount -o remount,size=1g /dev/shm; docker run --shm-size=1g)"
        )
