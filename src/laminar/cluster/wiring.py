"""From the configuration to the rules of each part: the one place where keys become arguments."""

from laminar.cluster.life import PingRules
from laminar.config.run_config import RunConfig, SamplingConfig
from laminar.data.ports import DataRules
from laminar.manager.manager import ManagerRules
from laminar.manager.rules import rules_of
from laminar.rollout.batch_run import StreamRules
from laminar.rollout.replica import ReplicaRules
from laminar.rollout.trajectory import EpisodeLimits
from laminar.scheduling.placement import Need
from laminar.scheduling.restarts import RestartRules
from laminar.scheduling.roofline import HARDWARE, max_useful_batch
from laminar.scheduling.schedules import Schedule, schedule_named
from laminar.schema.trajectories import Sampling

WEIGHTS_DEADLINE_S = 600.0
"""A replica waits so long for the first weight version; the learner loads its model meanwhile."""

PORT_DEADLINE_S = 120.0
"""A replica keeps its results so long while the data shard restarts."""


def schedule_of(config: RunConfig) -> Schedule:
    """Who may start what when; each step of a deterministic run waits for the one before."""
    return schedule_named("sync" if config.deterministic else config.schedule, config.max_lag)


def replica_rules(
    config: RunConfig, replica_id: str, incarnation: int, stop_token_ids: tuple[int, ...]
) -> ReplicaRules:
    """How one life of a replica runs."""
    rollout, schedule = config.rollout, schedule_of(config)
    return ReplicaRules(
        replica_id=replica_id,
        incarnation=incarnation,
        batch_trajectories=rollout.batch_trajectories,
        heartbeat_s=config.manager.heartbeat_s,
        weights_deadline_s=WEIGHTS_DEADLINE_S,
        port_deadline_s=PORT_DEADLINE_S,
        engine_timeout_s=rollout.engine_timeout_s,
        limits=EpisodeLimits(
            max_new_tokens=rollout.max_new_tokens, max_turns=rollout.max_turns, stop_token_ids=stop_token_ids
        ),
        stream=StreamRules(every_tokens=rollout.stream_every_tokens, every_s=rollout.stream_every_s),
        sampling={"training": sampling(rollout.sampling), "evaluation": sampling(config.evaluation.sampling)},
        refill_room=config.data.group_size if schedule.refills else None,
        interrupts=schedule.interrupts,
    )


def data_rules(config: RunConfig) -> DataRules:
    """How prompts are drawn and experience is handed out."""
    data = config.data
    return DataRules(
        group_size=data.group_size,
        max_groups_ahead=config.max_groups_ahead,
        seed=config.seed,
        shuffle=data.shuffle,
        max_prompt_tokens=data.max_prompt_tokens,
        data_failures=data.data_failures,
        incomplete_groups=data.incomplete_groups,
        sampler="prompt_order" if config.deterministic else data.sampler,
        deterministic=config.deterministic,
        eviction=data.eviction,
        max_staleness=data.max_staleness,
        total_groups=config.trainer.num_steps * config.trainer.groups_per_step,
        schedule=schedule_of(config),
        groups_per_step=config.trainer.groups_per_step,
    )


def sampling(config: SamplingConfig) -> Sampling:
    """How tokens are drawn."""
    return Sampling(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k)


def ping_rules(config: RunConfig) -> PingRules:
    """When the process of a service is given up."""
    manager = config.manager
    return PingRules(
        every_s=manager.heartbeat_s, dead_after_s=manager.dead_after_s, start_timeout_s=manager.start_timeout_s
    )


def restart_rules(config: RunConfig) -> RestartRules:
    """How often a service is started again."""
    return RestartRules(max_restarts=config.manager.max_restarts, backoff_s=config.manager.backoff_s)


def learner_need(config: RunConfig) -> Need:
    """GPUs that Ray must set aside for the trainer."""
    return Need(num_gpus=config.trainer.gpus if config.trainer.device.startswith("cuda") else 0.0)


def replica_need(config: RunConfig) -> Need:
    """GPUs, or the share of one, that Ray must set aside for a replica."""
    engine = config.rollout.engine
    on_gpu = engine.kind != "scripted" and engine.device.startswith("cuda")
    return Need(num_gpus=config.rollout.gpus_per_replica if on_gpu else 0.0, is_replica=True)


def worker_memory(config: RunConfig) -> int | None:
    """Address space of a process that runs code of users, in bytes."""
    gib = config.task.worker_memory_gib
    return None if gib is None else int(gib * 2**30)


def useful_batch(config: RunConfig) -> int:
    """B: trajectories that may decode together on one replica before each of them gets noticeably slower."""
    repack, engine = config.manager.repack, config.rollout.engine
    if repack.max_running != "auto":
        return repack.max_running
    if repack.hardware is None:
        return engine.max_running
    hardware = HARDWARE[repack.hardware]
    bytes_per_weight = 4.0 if engine.kind == "torch" and engine.dtype == "float32" else 2.0
    ridge = max_useful_batch(hardware.flops_per_s, hardware.bandwidth_bytes_per_s, bytes_per_weight)
    return min(ridge, engine.max_running)


def manager_rules(config: RunConfig) -> ManagerRules:
    """How the fleet is watched."""
    return rules_of(config.manager, max_running=useful_batch(config), repacks=schedule_of(config).repacks)
