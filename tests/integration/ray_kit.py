"""Several Ray nodes on one machine: each is a machine to a run, and can be killed as one."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from laminar.cluster.instance import QUIET, UNSHARED

NODE = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}


class RayNodes:
    """A Ray cluster as a user would have started it, with one node more after each `add`."""

    def __init__(self, folder: str) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={**NODE, "temp_dir": folder})
        self.address: str = self._cluster.address
        self.head = self._cluster.head_node

    def add(self) -> Any:
        """One more node."""
        return self._cluster.add_node(num_cpus=1, object_store_memory=80_000_000)

    def processes_of(self, node: Any) -> list[psutil.Process]:
        """The node's raylet, and all that it started; nothing if it is dead."""
        try:
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            return [raylet, *raylet.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self, node: Any) -> None:
        """The machine loses its power."""
        for process in self.processes_of(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def workers(self) -> list[psutil.Process]:
        """Processes of actors and what they started, on all nodes."""
        nodes = [self.head, *self._cluster.worker_nodes]
        found = []
        for process in (process for node in nodes for process in self.processes_of(node)):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith("ray::Shell"):
                    found += [process, *process.children(recursive=True)]
        return found

    def shutdown(self) -> None:
        """End all of it."""
        self._cluster.shutdown()


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """A cluster for the time of the context."""
    before = dict(os.environ)
    os.environ.update(QUIET | UNSHARED)
    folder = tempfile.mkdtemp(prefix="ray-")
    nodes = RayNodes(folder)
    try:
        yield nodes
    finally:
        nodes.shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)
