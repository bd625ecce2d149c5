"""Beyond the published evaluation: larger clusters, other lengths, and what limits each."""

from typing import Any

from laminar.config.simulation import LogNormalLengths, SimulationConfig
from laminar.simulator import paper
from laminar.simulator.parallel import in_parallel
from laminar.simulator.running import Run, simulate

Row = dict[str, Any]

LARGE_GPUS = (256, 1_024, 2_048, 4_096, 10_240)
LARGE_STEPS = 5
TRAJECTORIES_PER_GPU = 8
"""Trajectories of a step per GPU, as at 1,024 GPUs in the paper: the step grows with the cluster."""

LARGE_BATCH = 64
"""Trajectories that a replica claims: with more, several steps would be in flight."""

TAILS = (3.0, 10.0, 30.0)
"""99th percentile of answer lengths over their median."""

MEDIAN_TOKENS = 1_500.0


def large_cluster(gpus: int) -> SimulationConfig:
    """7B at the placement of 256 GPUs, enlarged."""
    config = paper.throughput("7B", 256, "laminar", batch_trajectories=LARGE_BATCH)
    groups = TRAJECTORIES_PER_GPU * gpus // config.work.group_size
    work = config.work.model_copy(update={"num_steps": LARGE_STEPS, "warmup_steps": 1, "groups_per_step": groups})
    rollout_gpus = gpus // 4
    cluster = config.cluster.model_copy(update={"rollout_gpus": rollout_gpus, "train_gpus": gpus - rollout_gpus})
    return config.model_copy(update={"work": work, "cluster": cluster})


def with_tail(p99_over_median: float, *, repack: bool) -> SimulationConfig:
    """7B on 64 GPUs, more of them generating than the learner needs, with log-normal lengths."""
    config = paper.throughput("7B", 32, "laminar", repack=repack)
    lengths = LogNormalLengths(median_tokens=MEDIAN_TOKENS, p99_over_median=p99_over_median)
    work = config.work.model_copy(update={"lengths": lengths, "num_steps": 8, "warmup_steps": 4})
    return config.model_copy(update={"work": work, "max_groups_ahead": 1 << 20})


def scale_rows(sizes: tuple[int, ...] = LARGE_GPUS) -> list[Row]:
    """Clusters up to 10,240 GPUs."""
    return in_parallel(_scale_row, sizes)


def _scale_row(gpus: int) -> Row:
    return {"gpus": gpus, **_facts(simulate(large_cluster(gpus)))}


def tail_rows() -> list[Row]:
    """Heavier and lighter tails, with and without repack."""
    return in_parallel(_tail_row, [(tail, repack) for tail in TAILS for repack in (True, False)])


def _tail_row(job: tuple[float, bool]) -> Row:
    tail, repack = job
    return {"p99_over_median": tail, "repack": repack, **_facts(simulate(with_tail(tail, repack=repack)))}


def _facts(run: Run) -> Row:
    measures = run.measures
    return {
        "replicas": run.config.num_replicas,
        "tokens_per_s": round(measures.tokens_per_s),
        "generated_per_s": round(measures.generated_per_s),
        "iteration_s": round(measures.iteration_s, 1),
        "trainer_wait_fraction": round(measures.trainer_wait_fraction, 3),
        "busy_fraction": round(measures.busy_fraction, 3),
        "kv_use": round(measures.kv_use, 3),
        "latency_max_s": round(measures.latency_max_s),
        "staleness_mean": round(measures.staleness_mean, 2),
        "staleness_max": measures.staleness_max,
        "cpu_s": round(run.cpu_s, 1),
        "peak_mib": run.peak_bytes >> 20,
    }
