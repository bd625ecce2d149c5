"""Our numbers beside the published ones, one function per figure; every row is a flat mapping of plain values.

A row's `paper_...` value is read off the figure; `fitted` says whether a constant was fitted to that very number.
"""

import asyncio
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Final

from laminar.config.run_config import ManagerConfig, RepackConfig
from laminar.config.simulation import ModelName, SimulationConfig
from laminar.engines.calibration import calibration
from laminar.schema.schedule import ScheduleName
from laminar.simulator import clock, paper
from laminar.simulator.parallel import in_parallel
from laminar.simulator.recorder import Event
from laminar.simulator.relays import Relays
from laminar.simulator.running import Run, simulate
from laminar.simulator.world import World

Row = dict[str, Any]

UNBOUNDED_GROUPS = 1 << 20
"""Groups ahead where the paper lets the buffer grow."""

FAULT_S = 1_500.0
"""When the paper kills a machine (Fig. 15)."""

REPACK_STEPS = (8, 3)
"""Iterations and warm-up of the runs at 32B on 128 GPUs: as long as the paper's Fig. 16."""

BATCH_WINDOW_S: Final = 20
"""Of Fig. 9."""

MODELS: Final[tuple[ModelName, ...]] = ("7B", "32B", "72B")


def figure_11(
    models: Sequence[ModelName] = MODELS, schedules: Sequence[ScheduleName] = (), only_gpus: Sequence[int] | None = None
) -> list[Row]:
    """Throughput of all systems at all scales; baselines with and without the unexplained step floor.

    Without it 32B and 72B are simulated at their largest scales only.
    """
    jobs = [
        (model, gpus, schedule, floor, False)
        for model in models
        for gpus in paper.SCALES[model]
        if only_gpus is None or gpus in only_gpus
        for schedule in schedules or tuple(paper.SYSTEMS)
        for floor in ((True, False) if paper.has_floor(schedule) else (False,))
        if floor or not paper.has_floor(schedule) or model == "7B" or gpus == paper.SCALES[model][-1]
    ]
    return in_parallel(_throughput_row, jobs)


def figure_12(schedules: Sequence[ScheduleName] = ()) -> list[Row]:
    """The same for tool calling at 7B; the paper's Laminar bars there equal those of Fig. 11, and are suspect."""
    jobs = [
        ("7B", gpus, schedule, paper.has_floor(schedule), True)
        for gpus in paper.SCALES["7B"]
        for schedule in schedules or ("sync", "one_step", "stream", "laminar")
    ]
    return in_parallel(_throughput_row, jobs)


def _throughput_row(job: tuple[ModelName, int, ScheduleName, bool, bool]) -> Row:
    model, gpus, schedule, floor, tool = job
    measures = simulate(paper.throughput(model, gpus, schedule, floor=floor, tool=tool)).measures
    published = paper.paper_tokens_per_s(model, gpus, schedule, tool=tool)
    return {
        "model": model,
        "gpus": gpus,
        "schedule": schedule,
        "floor": floor,
        "tokens_per_s": round(measures.tokens_per_s),
        "paper_tokens_per_s": published,
        "ratio": round(measures.tokens_per_s / published, 3) if published else None,
        "fitted": paper.is_fitted(model, gpus, schedule, floor=floor) and not tool,
        "trainer_wait_fraction": round(measures.trainer_wait_fraction, 2),
        "staleness_mean": round(measures.staleness_mean, 2),
    }


def figure_10() -> list[Row]:
    """Inherent staleness: 7B at 64 and 256 GPUs, for two sizes of a replica's batch and of the buffer.

    The paper bounds nothing and never lets a replica idle, which is the unbounded buffer.
    """
    jobs = [(gpus, batch, bounded) for gpus in (64, 256) for batch in (512, 1024) for bounded in (True, False)]
    return in_parallel(_staleness_row, jobs)


def _staleness_row(job: tuple[int, int, bool]) -> Row:
    gpus, batch, bounded = job
    config = paper.throughput("7B", gpus, "laminar", batch_trajectories=batch)
    if not bounded:
        config = config.model_copy(update={"max_groups_ahead": UNBOUNDED_GROUPS})
    measures = simulate(config).measures
    shares = paper.figures()["fig10_pct_by_half_hour"] if gpus == 64 else []
    return {
        "model": "7B",
        "gpus": gpus,
        "batch_trajectories": batch,
        "bounded": bounded,
        "staleness_mean": round(measures.staleness_mean, 3),
        "staleness_max": measures.staleness_max,
        "percent": [round(100 * share, 2) for share in measures.staleness_shares],
        "paper_percent": [round(fmean(column), 2) for column in zip(*shares, strict=True)],
        "fitted": False,
    }


def repack_config(*, repack: bool, batch_trajectories: int = 1024) -> SimulationConfig:
    """32B on 64 + 64 GPUs, as in §8.4 and §8.5 of the paper."""
    num_steps, warmup_steps = REPACK_STEPS
    config = paper.throughput("32B", 128, "laminar", repack=repack, batch_trajectories=batch_trajectories)
    work = config.work.model_copy(update={"num_steps": num_steps, "warmup_steps": warmup_steps})
    manager = ManagerConfig(heartbeat_s=1.0, repack=RepackConfig(enabled=repack))
    return config.model_copy(update={"work": work, "manager": manager, "max_groups_ahead": UNBOUNDED_GROUPS})


def table_1() -> list[Row]:
    """Repack on and off."""
    return in_parallel(_repack_row, [True, False])


PAPER_TABLE_1: Final = {
    True: {"generated_per_s": 68_100, "kv_use": 0.822, "latency_mean_s": 290, "latency_max_s": 828},
    False: {"generated_per_s": 54_200, "kv_use": 0.716, "latency_mean_s": 296, "latency_max_s": 826},
}
"""Table 1 of the paper; generation after its first 1,200 s."""


def _repack_row(repack: bool) -> Row:
    measures = simulate(repack_config(repack=repack)).measures
    ours = {
        "generated_per_s": round(measures.generated_per_s),
        "kv_use": round(measures.kv_use, 3),
        "latency_mean_s": round(measures.latency_mean_s, 1),
        "latency_max_s": round(measures.latency_max_s, 1),
    }
    theirs = {f"paper_{name}": value for name, value in PAPER_TABLE_1[repack].items()}
    facts = {"num_released": measures.num_released, "moved_tokens": measures.moved_tokens, "fitted": repack}
    return {"model": "32B", "gpus": 128, "repack": repack, **ours, **theirs, **facts}


def figure_16() -> list[Row]:
    """Generation over time with and without repack, in means of 600 s."""
    curves = in_parallel(_generation_curve, [True, False])
    published = paper.figures()["fig16_gen_mean_per_600s"]
    return [
        {
            "minute": 10 * number,
            "generated_per_s_repack": round(with_repack),
            "generated_per_s_none": round(without),
            "paper_generated_per_s_repack": _at(published["repack"], number),
            "paper_generated_per_s_none": _at(published["none"], number),
        }
        for number, (with_repack, without) in enumerate(zip(*curves, strict=False))
    ]


def _at(values: Sequence[float], number: int) -> float | None:
    return values[number] * 1e4 if number < len(values) else None


def _generation_curve(repack: bool) -> list[float]:
    return generation_per_s(simulate(repack_config(repack=repack)), window_s=600.0)


def generation_per_s(run: Run, window_s: float) -> list[float]:
    """Tokens of finished answers per second, window by window; the last, unfinished window is left out."""
    sums = [0.0] * (int(run.measures.simulated_s / window_s) + 1)
    for event in run.recorder.events:
        if event["kind"] == "trajectory":
            sums[int(event["t"] / window_s)] += event["tokens"]
    return [total / window_s for total in sums[:-1]]


def figure_9() -> list[Row]:
    """KV use of one batch of 512 at 32B, from its first to its last token: mean of four replicas without repack."""
    config = repack_config(repack=False, batch_trajectories=512)
    work = config.work.model_copy(update={"groups_per_step": 128, "mini_batches": 4, "num_steps": 1, "warmup_steps": 0})
    cluster = config.cluster.model_copy(update={"rollout_gpus": 16, "start_s": 0.0})
    run = simulate(config.model_copy(update={"work": work, "cluster": cluster, "max_groups_ahead": 128}))
    loads = _of_first_batches([event for event in run.recorder.events if event["kind"] == "load"])
    published = {int(row[0]): row for row in paper.figures()["fig9"]}
    rows = []
    for second in range(0, int(run.measures.simulated_s), BATCH_WINDOW_S):
        window = [load for load in loads if second <= load["t"] < second + BATCH_WINDOW_S]
        if not any(load["num_running"] + load["num_waiting"] for load in window):
            break
        paper_row = published.get(second + 30)
        rows.append(
            {
                "second": second,
                "num_running": round(fmean(load["num_running"] for load in window), 1),
                "num_waiting": round(fmean(load["num_waiting"] for load in window), 1),
                "kv_percent": round(100 * fmean(load["kv_fraction"] for load in window), 1),
                "paper_num_left": paper_row[1] if paper_row else None,
                "paper_num_waiting": paper_row[2] if paper_row else None,
                "paper_kv_percent": paper_row[3] if paper_row else None,
            }
        )
    return rows


def _of_first_batches(loads: Sequence[Event]) -> list[Event]:
    """Loads of the first batch of each replica; after its end the replica counts as empty, whatever it does then."""
    first: dict[str, str] = {}
    told = []
    for load in loads:
        if load["lease_id"] is not None:
            first.setdefault(load["replica_id"], load["lease_id"])
        if load["replica_id"] in first:
            is_first = load["lease_id"] == first[load["replica_id"]]
            told.append(load if is_first else {**load, "num_running": 0, "num_waiting": 0, "kv_fraction": 0.0})
    return told


def figure_14() -> list[Row]:
    """How long weights keep learner and replicas waiting."""
    rows: list[Row] = []
    for model in ("32B", "72B"):
        published = paper.figures()["fig14_s"][model]
        stall_s, pull_s = clock.run(_sync_times(model))
        for number, gpus in enumerate(paper.figures()["fig14_s"]["32B"]["rollout_gpus"]):
            rows.append(
                {
                    "model": model,
                    "rollout_gpus": gpus,
                    "replica_wait_s": round(pull_s, 3),
                    "paper_replica_wait_mean_s": published["mean"][number],
                    "paper_replica_wait_best_s": published["best"][number],
                    "paper_global_sync_s": published["global"][number],
                    "learner_stall_s": round(stall_s, 3),
                    "paper_learner_stall_s": {"32B": 0.64, "72B": 1.40}[model],
                    "fitted": True,
                }
            )
    return rows


async def _sync_times(model: ModelName) -> tuple[float, float]:
    loop, relays = asyncio.get_running_loop(), _relays(model, 4)
    running = loop.create_task(relays.run())
    await asyncio.sleep(0)
    stall_s = await relays.publish(1, {})
    began_s = loop.time()
    await relays.pull()
    pull_s = loop.time() - began_s
    running.cancel()
    return stall_s, pull_s


def figure_18() -> list[Row]:
    """Time from the master's having a version to the last relay's."""
    rows: list[Row] = []
    published = paper.figures()["fig18_s"]
    for model in ("32B", "72B"):
        for machines, theirs in zip(published["machines"], published[model], strict=True):
            ours = clock.run(_last_arrival_s(model, machines))
            rows.append(
                {
                    "model": model,
                    "machines": machines,
                    "broadcast_s": round(ours, 3),
                    "paper_broadcast_s": theirs,
                    "ratio": round(ours / theirs, 3),
                    "fitted": True,
                }
            )
    return rows


async def _last_arrival_s(model: ModelName, num_machines: int) -> float:
    return _relays(model, num_machines).arrival_s(num_machines)[-1]


def _relays(model: ModelName, num_machines: int) -> Relays:
    constants = calibration()
    machines = [f"machine-{number}" for number in range(num_machines)]
    return Relays(machines, constants.models[model].weight_bytes, constants.links, keep_versions=2)


def figure_15() -> list[Row]:
    """One of eight rollout machines is lost at 1,500 s: ends of iterations and generation around them."""
    run = simulate(repack_config(repack=True), keep_all_events=True, trouble=_lose_a_machine)
    steps = [event for event in run.recorder.events if event["kind"] == "step"]
    answers = [event for event in run.recorder.events if event["kind"] == "trajectory"]
    published = paper.figures()["fig15_training"]
    rows, before_s = [], 0.0
    for number, step in enumerate(steps):
        inside = [answer["tokens"] for answer in answers if before_s < answer["t"] <= step["t"]]
        seconds = step["t"] - before_s
        rows.append(
            {
                "step": step["step"],
                "end_s": round(step["t"], 1),
                "trained_per_s": round(step["tokens"] / seconds),
                "generated_per_s": round(sum(inside) / seconds),
                "paper_end_s": published[number][0] if number < len(published) else None,
                "paper_trained_per_s": published[number][1] if number < len(published) else None,
                "num_dropped": run.measures.num_dropped,
            }
        )
        before_s = step["t"]
    return rows


async def _lose_a_machine(world: World) -> None:
    await asyncio.sleep(FAULT_S)
    await world.machine_lost("machine-3")


FIGURES: Final[dict[str, Callable[..., list[Row]]]] = {
    "9": figure_9,
    "10": figure_10,
    "11": figure_11,
    "12": figure_12,
    "14": figure_14,
    "15": figure_15,
    "16": figure_16,
    "18": figure_18,
    "table1": table_1,
}
"""By the names that `laminar simulate paper --figure` takes."""
