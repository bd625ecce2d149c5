"""The whole configuration of a run, in the order in which a trajectory meets its parts."""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from laminar.config.base import DottedPath, Section
from laminar.config.engines import EngineConfig, TorchEngineConfig
from laminar.config.training import TrainerConfig
from laminar.schema.schedule import ScheduleName


class ModelConfig(Section):
    """The language model to post-train."""

    path: Path
    """Folder in Hugging Face format, relative to the recipe: config.json, *.safetensors, tokenizer.json."""


class TaskConfig(Section):
    """What to ask and how good an answer is."""

    path: DottedPath
    """`module:Name` of a class; the folder of the recipe and the working directory are on the module path."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    grade_timeout_s: PositiveFloat = 10.0
    """A reward that takes longer is unscorable."""
    grade_workers: PositiveInt = 1
    """Processes that compute rewards, per replica."""
    act_timeout_s: PositiveFloat = 30.0
    """An environment that takes longer for a reply ends the episode, which is then unscorable."""
    environment_workers: PositiveInt = 1
    """Processes in which environments live, per replica; each holds many."""
    worker_memory_gib: PositiveFloat | None = None
    """Address space of each such process; beyond it user code gets a MemoryError. Default: no limit."""


class SamplingConfig(Section):
    """How tokens are drawn."""

    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus; 1 cuts nothing off."""
    top_k: int = Field(default=0, ge=0)
    """Most likely tokens kept; 0 keeps all."""


class DataConfig(Section):
    """Prompt pool, partial response pool and experience buffer."""

    group_size: PositiveInt = 16
    """Trajectories per prompt."""
    shuffle: bool = True
    """Draw prompts in a random order, new in every epoch and reproducible from the seed; else in file order."""
    max_groups_ahead: PositiveInt | None = None
    """Groups that may be in flight or waiting for the trainer; claims wait beyond it. Default: 4 x groups_per_step."""
    sampler: Literal["fifo", "prompt_order", "freshest", "bounded_staleness", "priority"] | DottedPath = "fifo"
    """Which complete groups train next: `fifo` by completion, `prompt_order`, `freshest`, `bounded_staleness`,
    `priority` (largest spread of rewards first), or `module:function` of your own."""
    eviction: Literal["none", "oldest_version"] | DottedPath = "none"
    """Which waiting groups are dropped for newer ones: `none` (claims wait instead), `oldest_version`, or
    `module:function` of your own."""
    max_staleness: PositiveInt | None = None
    """With `sampler: bounded_staleness`: groups that are older when they are drawn are dropped."""
    max_prompt_tokens: PositiveInt = 2_048
    """A longer prompt is dropped, with the reason in the ledger."""
    data_failures: PositiveInt = 2
    """Tries of a trajectory whose reward cannot be computed before it is dropped."""
    incomplete_groups: Literal["train_rest", "drop"] = "train_rest"
    """A group with a dropped member: train the others if there are two or more, or drop them, too."""
    flush_s: PositiveFloat = 0.05
    """Journal rows are committed together at least this often."""


class RolloutConfig(Section):
    """Replicas and how they run their batches."""

    num_replicas: PositiveInt = 2
    """Rollout workers."""
    batch_trajectories: PositiveInt = 512
    """Trajectories claimed per cycle, in whole groups."""
    max_new_tokens: PositiveInt = 1_024
    """Longest answer, environment tokens included."""
    max_turns: PositiveInt = 8
    """Model turns in one episode with an environment."""
    sampling: SamplingConfig = SamplingConfig()
    """How training answers are drawn."""
    engine: EngineConfig = TorchEngineConfig()
    """What turns tokens into more tokens."""
    engine_timeout_s: PositiveFloat = 300.0
    """An engine that takes longer for one call (some decode steps, a swap of weights) hangs: its replica is replaced
    and its trajectories go on elsewhere."""
    gpus_per_replica: PositiveFloat = 1.0
    """GPUs that Ray sets aside for a replica whose engine runs on `cuda`; 0.3 lets three processes share one."""
    stream_every_tokens: PositiveInt = 128
    """A trajectory's new tokens go to the partial response pool after so many,"""
    stream_every_s: PositiveFloat = 0.5
    """or after so long, whichever is first."""


class RepackConfig(Section):
    """Moving the tail of several replicas onto few."""

    enabled: bool = True
    """Off: every replica runs its own tail to the end."""
    every_s: PositiveFloat = 5.0
    """Time between two looks at the fleet; one more follows every publish."""
    max_kv_fill: float = Field(default=0.99, gt=0, le=1)
    """KV share up to which a destination is filled (C_max)."""
    max_running: PositiveInt | Literal["auto"] = "auto"
    """Trajectories on one destination (B); auto: by the roofline of `hardware`, or the engine's own limit if that is
    unset."""
    hardware: Literal["H800", "H100", "H200", "A100-80G", "RTX 4090"] | None = None
    """Accelerator of the replicas, for `max_running: auto`."""
    dry_run: bool = False
    """Plan and tell of moves, but make none."""
    strict_idleness: bool = False
    """Idle only while KV use falls from one look to the next, as printed in the paper; default latches instead."""


class ManagerConfig(Section):
    """Watching the fleet."""

    heartbeat_s: PositiveFloat = 1.0
    """Replicas report this often."""
    suspect_after_s: PositiveFloat = 3.0
    """Without a heartbeat for so long a replica gets no more moves,"""
    dead_after_s: PositiveFloat = 5.0
    """and after so long it is killed and its trajectories go on elsewhere."""
    start_timeout_s: PositiveFloat = 300.0
    """A replica that has not reported by then counts as failed at start."""
    max_restarts: PositiveInt = 5
    """Restarts in a row; a replica that fails once more is retired."""
    backoff_s: PositiveFloat = 1.0
    """Wait before the second restart; doubles with every further one."""
    min_replicas: PositiveInt = 1
    """The run fails when fewer are left."""
    redirect_wait_s: PositiveFloat = 60.0
    """How long orphaned trajectories wait for a replica of their version before they start again."""
    repack: RepackConfig = RepackConfig()
    """Repack."""


class RelayConfig(Section):
    """Weights in host memory."""

    keep_versions: PositiveInt = 2
    """Newest complete versions kept; versions in use are kept besides."""
    dtype: Literal["float32", "bfloat16", "keep"] = "keep"
    """Number format of published weights; keep: as the learner holds them."""


class ClusterConfig(Section):
    """Machines; see docs/machines.md."""

    address: str | None = None
    """The Ray cluster to run on: `HOST:PORT`, or `auto` for the one that this machine belongs to. The run folder, the
    recipe and the model must then be on a file system that all its machines share. Default: a Ray instance of the run's
    own, on this machine."""

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None and value != "auto" and not re.fullmatch(r".+:[0-9]+", value):
            raise ValueError("must be auto, HOST:PORT, or null for this machine alone")
        return value


class EvaluationConfig(Section):
    """Held-out accuracy at a pinned version, while training goes on."""

    every_steps: PositiveInt = 10
    """An evaluation after every so many versions, at version 0 and after the last."""
    num_prompts: int = Field(default=256, ge=0)
    """Held-out prompts per evaluation (the same ones each time); 0: no evaluation."""
    sampling: SamplingConfig = SamplingConfig()
    """How evaluation answers are drawn."""


class RunConfig(Section):
    """Everything a run depends on, besides the files it names."""

    model: ModelConfig
    """The model."""
    task: TaskConfig
    """The task."""
    seed: int = 0
    """Order of prompts and draw of tokens."""
    deterministic: bool = False
    """Same seed, same weights, bit for bit, whatever is killed meanwhile: each step trains, in the order of prompts, on
    answers of the version before it; replicas run one answer at a time, which begins anew if it is interrupted, and
    nothing is repacked. Slow: for tests, and to tell a bug from chance."""
    schedule: ScheduleName = "laminar"
    """The rule of who may start, who must update, what trains next: `laminar`, or one that it is compared with: `sync`,
    `one_step`, `stream` (whole steps), `partial` (a new version interrupts every answer)."""
    max_lag: PositiveInt | None = None
    """With `schedule: partial`: an answer begins at most so many versions before the step that it is for."""
    data: DataConfig = DataConfig()
    """Prompts, partial responses, experience."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation."""
    manager: ManagerConfig = ManagerConfig()
    """The fleet."""
    relay: RelayConfig = RelayConfig()
    """Weights on their way."""
    trainer: TrainerConfig = TrainerConfig()
    """Learning."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out accuracy."""
    cluster: ClusterConfig = ClusterConfig()
    """Machines."""

    @property
    def max_groups_ahead(self) -> int:
        """Groups in flight or buffered: the bound of memory, and with it of staleness."""
        return self.data.max_groups_ahead or 4 * self.trainer.groups_per_step

    @model_validator(mode="after")
    def _a_batch_holds_a_group(self) -> "RunConfig":
        if self.rollout.batch_trajectories < self.data.group_size:
            raise ValueError(
                f"rollout.batch_trajectories is {self.rollout.batch_trajectories} but one group has "
                f"data.group_size = {self.data.group_size} trajectories; a batch must hold at least one group"
            )
        return self

    @model_validator(mode="after")
    def _ahead_covers_a_step(self) -> "RunConfig":
        if self.max_groups_ahead < self.trainer.groups_per_step:
            raise ValueError(
                f"data.max_groups_ahead is {self.max_groups_ahead} but one step needs "
                f"trainer.groups_per_step = {self.trainer.groups_per_step} groups; the trainer would wait for ever"
            )
        return self

    @model_validator(mode="after")
    def _a_group_has_something_to_compare(self) -> "RunConfig":
        if self.data.group_size < 2:
            raise ValueError(
                f"data.group_size is 1 but trainer.algorithm.advantage = {self.trainer.algorithm.advantage} compares "
                "the trajectories of a group with each other; a group of one teaches nothing"
            )
        return self

    @model_validator(mode="after")
    def _an_answer_fits_the_cache(self) -> "RunConfig":
        if self.rollout.max_new_tokens >= self.rollout.engine.kv_capacity_tokens:
            raise ValueError(
                f"rollout.engine.kv_capacity_tokens is {self.rollout.engine.kv_capacity_tokens} but one answer may "
                f"take rollout.max_new_tokens = {self.rollout.max_new_tokens} tokens besides its prompt"
            )
        return self

    @model_validator(mode="after")
    def _staleness_bound_belongs_to_its_sampler(self) -> "RunConfig":
        if (self.data.sampler == "bounded_staleness") != (self.data.max_staleness is not None):
            raise ValueError("data.max_staleness goes with data.sampler = bounded_staleness, and with nothing else")
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> "RunConfig":
        if self.max_lag is not None and self.schedule != "partial":
            raise ValueError("max_lag goes with schedule: partial, and with nothing else")
        if self.schedule == "partial" and self.trainer.algorithm.proximal != "recomputed":
            raise ValueError(
                "schedule: partial mixes versions within an answer and needs trainer.algorithm.proximal: recomputed"
            )
        if self.schedule != "laminar" and self.deterministic:
            raise ValueError("deterministic: true is a schedule of its own; leave schedule away")
        return self

    @model_validator(mode="after")
    def _deterministic_leaves_no_choice(self) -> "RunConfig":
        if self.deterministic and self.data.sampler != "fifo":
            raise ValueError("deterministic: true fixes what trains next; leave data.sampler away")
        if self.deterministic and self.rollout.engine.kind == "custom":
            raise ValueError("deterministic: true needs rollout.engine.kind torch or scripted")
        return self

    @model_validator(mode="after")
    def _timeouts_are_ordered(self) -> "RunConfig":
        m = self.manager
        if not m.heartbeat_s < m.suspect_after_s < m.dead_after_s:
            raise ValueError("manager.heartbeat_s < manager.suspect_after_s < manager.dead_after_s must hold")
        if m.min_replicas > self.rollout.num_replicas:
            raise ValueError(
                f"manager.min_replicas is {m.min_replicas} but rollout.num_replicas is {self.rollout.num_replicas}"
            )
        return self
