"""What a data shard needs from its neighbours, and its own few settings."""

from typing import Any, Literal, Protocol

from msgspec import Struct

from laminar.scheduling.schedules import Schedule
from laminar.schema.trajectories import Prompt

Split = Literal["train", "heldout"]


class Prompts(Protocol):
    """The task's problems as token ids; the same ones at the same places in every start of a run."""

    @property
    def num_train(self) -> int:
        """Problems to train on; at least one."""
        ...

    @property
    def num_heldout(self) -> int:
        """Problems of one evaluation; 0: no evaluation."""
        ...

    def prompt(self, split: Split, index: int) -> Prompt:
        """The problem at this place of its split."""
        ...


class Events(Protocol):
    """Where facts go."""

    def emit(self, kind: str, **fields: Any) -> None:
        """Record one fact; never blocks, never raises."""
        ...


class DataRules(Struct, frozen=True, kw_only=True):
    """Settings of a data shard; `RunConfig.data` documents those of the same name."""

    group_size: int
    max_groups_ahead: int
    seed: int = 0
    shuffle: bool = True
    max_prompt_tokens: int = 2_048
    data_failures: int = 2
    incomplete_groups: Literal["train_rest", "drop"] = "train_rest"
    sampler: str = "fifo"
    deterministic: bool = False
    """An answer that is interrupted begins anew, under its step's only version; goes with a schedule without lag."""
    eviction: str = "none"
    max_staleness: int | None = None
    total_groups: int | None = None
    """Groups that all steps of the run train together; no more are drawn. None: no end."""
    schedule: Schedule = Schedule()
    groups_per_step: int = 1
