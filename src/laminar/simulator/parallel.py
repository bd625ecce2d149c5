"""Several simulations at once, each in a process of its own, so that none finds the memory of another one."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def in_parallel(make_row: Callable[[Any], Any], jobs: Sequence[Any]) -> list[Any]:
    """Results in the order of the jobs; as many processes at a time as there are cores."""
    workers = min(len(jobs), os.cpu_count() or 1)
    if workers == 1:
        return [make_row(job) for job in jobs]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        return list(pool.map(make_row, jobs))
