"""A learner that only takes its time, and checkpoints that only remember that they were made.

Time of an iteration (fitted to the paper's own points): a + b / GPUs for the tokens of its workload; the second part
grows with the tokens, the first does not.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from laminar.schema.trajectories import ExperienceGroup, num_tokens
from laminar.trainer.ports import Checkpoint


class LearnerPace(Struct, frozen=True, kw_only=True):
    """Seconds of one mini-batch: `fixed_s`, and `token_s` for each of its tokens; and of writing a checkpoint."""

    fixed_s: float
    token_s: float
    checkpoint_s: float = 0.0


class EmulatedLearner:
    """Fulfils `trainer.ports.Learner`; pass `run_blocking` to the trainer loop, which is where the time passes."""

    def __init__(self, pace: LearnerPace, tokens_per_id: int) -> None:
        self._pace = pace
        self._tokens_per_id = tokens_per_id
        self._busy_s = 0.0

    def step(self, groups: Sequence[ExperienceGroup]) -> dict[str, float]:
        """One update."""
        num_ids = sum(
            len(group.prompt.token_ids) + num_tokens(member.pieces) for group in groups for member in group.members
        )
        trained_tokens = num_ids * self._tokens_per_id
        self._busy_s += self._pace.fixed_s + self._pace.token_s * trained_tokens
        return {"trained_tokens": float(trained_tokens)}

    def tensors(self) -> Mapping[str, Any]:
        """No weights."""
        return {}

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        self._busy_s += self._pace.checkpoint_s

    def restore(self, folder: Path) -> None:
        """Read a checkpoint."""
        self._busy_s += self._pace.checkpoint_s

    async def run_blocking(self, call: Callable[..., Any], /, *args: Any) -> Any:
        """The answer of the call, after the time that it takes has passed."""
        answer = call(*args)
        busy_s, self._busy_s = self._busy_s, 0.0
        if busy_s:
            await asyncio.sleep(busy_s)
        return answer


class EmulatedCheckpoints:
    """Fulfils `trainer.ports.CheckpointStore`; outlives the trainer, as a disk does."""

    def __init__(self) -> None:
        self._newest: Checkpoint | None = None

    def newest(self) -> Checkpoint | None:
        """The newest one."""
        return self._newest

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Make the checkpoint of this step."""
        path = Path(f"step-{step}")
        write(path)
        self._newest = Checkpoint(step, path)
        return path
