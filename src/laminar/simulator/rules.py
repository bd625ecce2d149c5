"""From the settings of a simulation to the rules of each shipped service and each emulated part."""

import math
from pathlib import Path
from typing import assert_never

from laminar.config.simulation import (
    LogNormalLengths,
    PublishedLengths,
    RecordedLengths,
    SimulationConfig,
    WorkConfig,
)
from laminar.config.training import CheckpointConfig, TrainerConfig
from laminar.data.ports import DataRules
from laminar.engines.calibration import calibration
from laminar.engines.emulated_pace import Pace, kv_capacity_tokens, roofline_pace
from laminar.engines.rules import EmulatedEngineRules
from laminar.engines.workloads import (
    Distribution,
    LogNormal,
    Workload,
    mean,
    published_lengths,
    recorded,
    sandbox_latency,
)
from laminar.manager.manager import ManagerRules
from laminar.manager.rules import rules_of
from laminar.rollout.batch_run import StreamRules
from laminar.rollout.replica import ReplicaRules
from laminar.rollout.trajectory import EpisodeLimits
from laminar.scheduling.roofline import HARDWARE, Hardware, max_useful_batch
from laminar.scheduling.schedules import Schedule, schedule_named
from laminar.schema.errors import UserError
from laminar.schema.trajectories import Sampling
from laminar.simulator.learner import LearnerPace
from laminar.simulator.task import EmulatedTokenizer
from laminar.telemetry.files import EVENTS
from laminar.telemetry.reading import read_facts
from laminar.telemetry.vocabulary import Trajectory

DEADLINE_S = 24 * 3600.0
"""Waits of a simulated run end with a sentence, too; virtual days cost nothing."""

CALIBRATED_WORK = {"7B": "math-7B", "32B": "math-32B", "72B": "math-72B"}
"""Lengths of the runs that the learner's time was fitted to."""

CALIBRATED_TRAJECTORIES = 8192
CALIBRATED_PROMPT_TOKENS = 170


def schedule_of(config: SimulationConfig) -> Schedule:
    """The schedule with its bound."""
    return schedule_named(config.schedule, config.max_lag)


def hardware_of(config: SimulationConfig) -> Hardware:
    """The replicas' accelerator."""
    measured = config.cluster.machine
    if measured is not None:
        return Hardware(**measured.model_dump())
    return HARDWARE[config.cluster.hardware]


def lengths_of(work: WorkConfig) -> Distribution:
    """Answer lengths in tokens."""
    lengths = work.lengths
    match lengths:
        case PublishedLengths(name=name):
            return published_lengths()[name]
        case LogNormalLengths():
            return LogNormal(
                median=lengths.median_tokens, p99_over_median=lengths.p99_over_median, most=float(work.max_new_tokens)
            )
        case RecordedLengths(run=run):
            return recorded(_recorded_tokens(run))
        case _:
            assert_never(lengths)


def _recorded_tokens(run: Path) -> list[float]:
    tokens = [float(fact.tokens) for fact in read_facts(run / EVENTS) if isinstance(fact, Trajectory)]
    if not tokens:
        raise UserError(f"{run} has no finished trajectory to take lengths from; give the --out folder of a run")
    return tokens


def workload_of(config: SimulationConfig) -> Workload:
    """Answers, and how long the tool takes."""
    work = config.work
    return Workload(
        tokens=lengths_of(work),
        prompt_tokens=work.prompt_tokens,
        tool_latency_s=sandbox_latency() if work.tool else None,
        max_calls=work.max_calls,
    )


def ids(config: SimulationConfig, tokens: float) -> int:
    """Emulated ids that stand for so many tokens; at least one."""
    return max(1, round(tokens / config.emulation.tokens_per_id))


def pace_of(config: SimulationConfig) -> Pace:
    """Decode and prefill of one replica."""
    constants, cluster, emulation = calibration(), config.cluster, config.emulation
    return roofline_pace(
        constants.models[cluster.model],
        hardware_of(config),
        constants.decode,
        tensor_parallel=cluster.tensor_parallel,
        sequence_s=constants.decode.sequence_s(cluster.model, cluster.tensor_parallel),
        latency_factor=emulation.latency_factor,
        floor_s=emulation.step_floor_s,
    )


def kv_capacity_of(config: SimulationConfig) -> int:
    """KV cache of one replica; raises `UserError` if no answer fits."""
    if config.emulation.kv_capacity_tokens is not None:
        capacity = config.emulation.kv_capacity_tokens
    else:
        constants, cluster = calibration(), config.cluster
        capacity = kv_capacity_tokens(
            constants.models[cluster.model],
            hardware_of(config),
            tensor_parallel=cluster.tensor_parallel,
            memory_share=constants.kv_cache.memory_share,
            reserved_bytes=constants.kv_cache.reserved_bytes,
        )
    longest = config.work.max_new_tokens + config.work.prompt_tokens + 2 * config.emulation.tokens_per_id
    if capacity < longest:
        raise UserError(
            f"cluster: {config.cluster.tensor_parallel} x {config.cluster.hardware} hold the KV of {capacity} tokens "
            f"beside the {config.cluster.model} model, but one answer may need {longest}; raise "
            "cluster.tensor_parallel or lower work.max_new_tokens"
        )
    return capacity


def engine_rules(config: SimulationConfig) -> EmulatedEngineRules:
    """One replica's engine."""
    emulation = config.emulation
    return EmulatedEngineRules(
        pace=pace_of(config),
        max_running=emulation.max_running,
        kv_capacity_tokens=kv_capacity_of(config),
        tokens_per_id=emulation.tokens_per_id,
        report_every_s=emulation.stream_every_s,
    )


def learner_pace(config: SimulationConfig) -> LearnerPace:
    """One mini-batch of the learner."""
    work, cluster, emulation = config.work, config.cluster, config.emulation
    constants = calibration().learner[cluster.model]
    lengths = published_lengths()[CALIBRATED_WORK[cluster.model]]
    calibrated_tokens = CALIBRATED_TRAJECTORIES * (mean(lengths) + CALIBRATED_PROMPT_TOKENS)
    fixed_s = constants.fixed_s if emulation.learner_fixed_s is None else emulation.learner_fixed_s
    per_gpu_s = constants.per_gpu_s if emulation.learner_per_gpu_s is None else emulation.learner_per_gpu_s
    return LearnerPace(
        fixed_s=fixed_s / work.mini_batches,
        token_s=per_gpu_s / cluster.train_gpus / calibrated_tokens,
        checkpoint_s=emulation.checkpoint_s,
    )


def batch_trajectories(config: SimulationConfig) -> int:
    """What one replica claims at a time, in whole groups."""
    work = config.work
    if config.batch_trajectories is not None:
        return max(work.group_size, config.batch_trajectories)
    return math.ceil(work.groups_per_step / config.num_replicas) * work.group_size


def max_groups_ahead(config: SimulationConfig) -> int:
    """Groups in flight or ready."""
    work = config.work
    in_hand = config.num_replicas * math.ceil(batch_trajectories(config) / work.group_size)
    return config.max_groups_ahead or in_hand + 2 * work.groups_per_step


def data_rules(config: SimulationConfig) -> DataRules:
    """The data shard. There is no last group: at its end a run is as busy as in its middle."""
    work = config.work
    return DataRules(
        group_size=work.group_size,
        max_groups_ahead=max_groups_ahead(config),
        seed=config.seed,
        max_prompt_tokens=work.prompt_tokens + 1,
        schedule=schedule_of(config),
        groups_per_step=work.groups_per_step,
    )


def replica_rules(config: SimulationConfig, replica_id: str, incarnation: int) -> ReplicaRules:
    """One life of a replica."""
    schedule = schedule_of(config)
    return ReplicaRules(
        replica_id=replica_id,
        incarnation=incarnation,
        batch_trajectories=batch_trajectories(config),
        heartbeat_s=config.manager.heartbeat_s,
        weights_deadline_s=DEADLINE_S,
        port_deadline_s=DEADLINE_S,
        engine_timeout_s=DEADLINE_S,
        limits=episode_limits(config),
        stream=StreamRules(every_tokens=config.work.max_new_tokens, every_s=config.emulation.stream_every_s),
        sampling={"training": Sampling(), "evaluation": Sampling()},
        refill_room=config.work.group_size if schedule.refills else None,
        interrupts=schedule.interrupts,
        claim_wait_s=config.emulation.claim_wait_s,
    )


def episode_limits(config: SimulationConfig) -> EpisodeLimits:
    """When an answer ends at the latest."""
    return EpisodeLimits(
        max_new_tokens=ids(config, config.work.max_new_tokens),
        max_turns=config.work.max_calls + 2,
        stop_token_ids=EmulatedTokenizer.stop_token_ids,
    )


def useful_batch(config: SimulationConfig) -> int:
    """B of repack."""
    most = config.manager.repack.max_running
    if most != "auto":
        return most
    hardware = hardware_of(config)
    ridge = max_useful_batch(hardware.flops_per_s, hardware.bandwidth_bytes_per_s)
    return min(config.emulation.max_running, ridge)


def manager_rules(config: SimulationConfig) -> ManagerRules:
    """The fleet."""
    return rules_of(
        config.manager,
        max_running=useful_batch(config),
        repacks=schedule_of(config).repacks,
        replace_machine_s=config.cluster.machine_replace_s,
    )


def trainer_rules(config: SimulationConfig) -> TrainerConfig:
    """The trainer loop."""
    work = config.work
    return TrainerConfig(
        num_steps=work.num_steps,
        groups_per_step=work.groups_per_step,
        mini_batches=work.mini_batches,
        batch_deadline_s=DEADLINE_S,
        checkpoint=CheckpointConfig(every_steps=config.checkpoint_every_steps),
    )
