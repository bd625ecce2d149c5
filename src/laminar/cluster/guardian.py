"""A small process that outlives the launcher by a moment: when the launcher is gone, however it went, so is the run.

On a Ray cluster each machine has an agent (`cluster.agent`) that is guarded likewise, for what the run has there.

Ray's own processes notice the death of their parent one after the other, some only after many seconds, and a run that
is resumed meanwhile would share the machine with ghosts. The guardian holds one end of a pipe whose other end only the
launcher holds; end of file means that the launcher has ended. Then it kills every process of the run, which it knows by
the scratch folder: by a variable in their environment, or, as some of Ray's processes overwrite theirs to show a title,
by the log files that they hold open there.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

MARK = "LAMINAR_SCRATCH"
"""Environment variable that every process of a run inherits; its value is the run's scratch folder."""

ORPHAN = "orphan"
"""Argument of a guardian that is to have no parent."""

NUM_SWEEPS = 3
"""A process may be born of one that is being killed."""


@contextmanager
def guarded(scratch: Path, *, is_launcher: bool = True) -> Iterator[None]:
    """Mark this process and all that it starts; whatever is left of them when the context or this process ends dies.

    Not the launcher, but one of Ray's workers: the guardian then lets go of its parent, as Ray kills with a worker the
    children that it has.
    """
    os.environ[MARK] = str(scratch)
    ours, theirs = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    command = [sys.executable, "-m", "laminar.cluster.guardian", str(ours), str(scratch), str(os.getpid())]
    if not is_launcher:
        command.append(ORPHAN)
    guardian = subprocess.Popen(
        command, pass_fds=[ours], env=environment, start_new_session=True, stdin=subprocess.DEVNULL
    )
    os.close(ours)
    try:
        yield
    finally:
        os.environ.pop(MARK)
        os.close(theirs)
        guardian.wait()


def kill_marked(pid: int, scratch: str) -> None:
    """Kill one process, if it belongs to the run: its number may be another's by now."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if _belongs(process, scratch):
            process.kill()


def marked(scratch: str, *, but: int) -> list[psutil.Process]:
    """Processes of the run, except the launcher itself."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid not in {but, os.getpid()} and _belongs(process, scratch):
                found.append(process)
    return found


def _belongs(process: psutil.Process, scratch: str) -> bool:
    if process.environ().get(MARK) == scratch:
        return True
    return any(file.path.startswith(f"{scratch}/") for file in process.open_files())


def main(pipe: int, scratch: str, launcher_pid: int, *, is_orphan: bool) -> None:
    """Wait for the launcher to end, then clear up.

    waits for:  end of file on the pipe <- the launcher closes it or dies; without a deadline, as long as the run
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if is_orphan and os.fork():
        os._exit(0)
    os.read(pipe, 1)
    for _ in range(NUM_SWEEPS):
        victims = marked(scratch, but=launcher_pid)
        for victim in victims:
            with suppress(psutil.Error):
                victim.kill()
        psutil.wait_procs(victims, timeout=5.0)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), is_orphan=ORPHAN in sys.argv[4:])
