"""Settings of `laminar simulate`: the cluster, the work and the schedule; every key has a default."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from laminar.config.base import Section
from laminar.config.run_config import ManagerConfig, RepackConfig
from laminar.schema.schedule import ScheduleName

HardwareName = Literal["H800", "H100", "H200", "A100-80G", "RTX 4090", "this machine"]
ModelName = Literal["7B", "32B", "72B"]


class PublishedLengths(Section):
    """Answer lengths of one of the paper's checkpoints."""

    kind: Literal["published"] = "published"
    name: Literal["math-7B", "math-32B", "math-72B", "tool-7B", "aime"] = "math-7B"
    """Which one."""


class LogNormalLengths(Section):
    """Log-normal answer lengths."""

    kind: Literal["lognormal"] = "lognormal"
    median_tokens: PositiveFloat = 2_000.0
    """Half of the answers are shorter."""
    p99_over_median: float = Field(default=10.0, gt=1)
    """How heavy the tail is."""


class RecordedLengths(Section):
    """Answer lengths of a run of your own."""

    kind: Literal["recorded"] = "recorded"
    run: Path
    """Folder of the run, live or finished."""


LengthConfig = Annotated[PublishedLengths | LogNormalLengths | RecordedLengths, Field(discriminator="kind")]


class WorkConfig(Section):
    """What is to be answered and learnt."""

    lengths: LengthConfig = PublishedLengths()
    """How long answers are."""
    max_new_tokens: PositiveInt = 16_384
    """Longest answer."""
    prompt_tokens: PositiveInt = 170
    """Length of every prompt."""
    tool: bool = False
    """Answers call a sandbox with the paper's latencies (Fig. 2) between their turns."""
    max_calls: PositiveInt = 8
    """With `tool`: an answer makes 1 to so many calls."""
    group_size: PositiveInt = 16
    """Trajectories per prompt."""
    groups_per_step: PositiveInt = 512
    """Groups that one iteration trains."""
    mini_batches: PositiveInt = 16
    """Updates per iteration."""
    num_steps: PositiveInt = 15
    """Iterations."""
    warmup_steps: int = Field(default=10, ge=0)
    """First iterations that no average counts."""


class MachineConfig(Section):
    """An accelerator that was measured; `laminar bench engine --out FILE` writes these numbers."""

    flops_per_s: PositiveFloat
    """Rate of large products."""
    bandwidth_bytes_per_s: PositiveFloat
    """Rate of reading its memory."""
    memory_bytes: PositiveInt
    """Size of its memory."""


class ClusterConfig(Section):
    """What the work runs on."""

    model: ModelName = "7B"
    """Size of the model (Qwen2.5)."""
    hardware: HardwareName = "H800"
    """Accelerator of the replicas, by its data sheet."""
    machine: MachineConfig | None = None
    """With `hardware: this machine`: what was measured."""
    train_gpus: PositiveInt = 40
    """Accelerators of the learner."""
    rollout_gpus: PositiveInt = 24
    """Accelerators of the replicas; with `schedule: sync` they are the learner's own."""
    tensor_parallel: PositiveInt = 1
    """Accelerators per replica."""
    gpus_per_machine: PositiveInt = 8
    """Replicas of one machine share a relay, and its fate."""
    start_s: NonNegativeFloat = 60.0
    """A replica takes so long to start."""
    machine_replace_s: NonNegativeFloat = 252.0
    """A lost machine is back after so long (paper, §8.5)."""
    relay_restart_s: NonNegativeFloat = 5.0
    """A lost relay is back after so long,"""
    trainer_restart_s: NonNegativeFloat = 60.0
    """and a lost trainer."""
    data_restart_s: NonNegativeFloat = 5.0
    """A lost data service is back after so long,"""
    manager_restart_s: NonNegativeFloat = 5.0
    """and a lost manager."""

    @model_validator(mode="after")
    def _measured_numbers_go_with_this_machine(self) -> "ClusterConfig":
        if (self.hardware == "this machine") != (self.machine is not None):
            raise ValueError(
                "hardware: this machine and machine go together; laminar bench engine --out FILE measures and writes "
                "them"
            )
        return self


class EmulationConfig(Section):
    """How the cluster's parts are emulated."""

    latency_factor: PositiveFloat = 1.0
    """Decode steps take so many times what the roofline formula says."""
    step_floor_s: NonNegativeFloat = 0.0
    """No decode step is shorter."""
    max_running: PositiveInt = 1_024
    """Sequences that a replica decodes together."""
    kv_capacity_tokens: PositiveInt | None = None
    """KV cache of a replica; default: what its memory holds beside the weights."""
    learner_fixed_s: NonNegativeFloat | None = None
    """An iteration of the learner takes so long,"""
    learner_per_gpu_s: NonNegativeFloat | None = None
    """and so long besides, divided by its GPUs, for the tokens of the paper's iteration; default: as calibrated."""
    claim_wait_s: PositiveFloat = 5.0
    """A replica without work looks for orders and newer weights so often."""
    checkpoint_s: NonNegativeFloat = 0.0
    """Time to write a checkpoint."""
    tokens_per_id: PositiveInt = 34
    """One emulated token stands for so many, so that time and memory follow from trajectories, not from tokens."""
    stream_every_s: PositiveFloat = 60.0
    """Unfinished answers go to the partial response pool so often."""


class SimulationConfig(Section):
    """Everything that a simulated run depends on."""

    seed: int = 0
    """Prompts, lengths and faults."""
    schedule: ScheduleName = "laminar"
    """The rule of who may start, who must update, what trains next."""
    max_lag: PositiveInt | None = None
    """With `schedule: partial`: an answer begins at most so many versions before its step (AReaL's eta)."""
    batch_trajectories: PositiveInt | None = 512
    """Trajectories that a replica claims per cycle; default with null: the step divided among the replicas."""
    max_groups_ahead: PositiveInt | None = None
    """Groups in flight or waiting for the trainer; default: two batches per replica and two steps."""
    checkpoint_every_steps: PositiveInt = 1
    """Iterations between two checkpoints."""
    work: WorkConfig = WorkConfig()
    """What is to be answered and learnt."""
    cluster: ClusterConfig = ClusterConfig()
    """What it runs on."""
    emulation: EmulationConfig = EmulationConfig()
    """How that is emulated."""
    manager: ManagerConfig = ManagerConfig(repack=RepackConfig(max_running="auto"))
    """The fleet, as in a real run."""

    @property
    def num_replicas(self) -> int:
        """Rollout workers."""
        return self.cluster.rollout_gpus // self.cluster.tensor_parallel

    @model_validator(mode="after")
    def _replicas_are_whole(self) -> "SimulationConfig":
        c = self.cluster
        if c.rollout_gpus % c.tensor_parallel:
            raise ValueError(
                f"cluster.rollout_gpus is {c.rollout_gpus}, which is not a multiple of cluster.tensor_parallel = "
                f"{c.tensor_parallel}"
            )
        if c.gpus_per_machine % c.tensor_parallel:
            raise ValueError(
                f"cluster.gpus_per_machine is {c.gpus_per_machine}, which is not a multiple of "
                f"cluster.tensor_parallel = {c.tensor_parallel}"
            )
        return self

    @model_validator(mode="after")
    def _steps_are_whole(self) -> "SimulationConfig":
        w = self.work
        if w.groups_per_step % w.mini_batches:
            raise ValueError("work.groups_per_step must be a multiple of work.mini_batches")
        if w.warmup_steps >= w.num_steps:
            raise ValueError(
                f"work.warmup_steps is {w.warmup_steps} of work.num_steps = {w.num_steps}; nothing is left to measure"
            )
        return self

    @model_validator(mode="after")
    def _lag_belongs_to_partial(self) -> "SimulationConfig":
        if self.max_lag is not None and self.schedule != "partial":
            raise ValueError("max_lag goes with schedule: partial, and with nothing else")
        return self
