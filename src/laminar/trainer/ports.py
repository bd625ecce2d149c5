"""What the trainer loop needs from its neighbours."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from laminar.schema.trajectories import ExperienceGroup


class BufferPort(Protocol):
    """The experience buffer, as the trainer sees it. All calls are idempotent."""

    async def sample(self, step: int, part: int, num_groups: int, wait_s: float) -> tuple[ExperienceGroup, ...]:
        """Draw complete groups for mini-batch `part` of iteration `step`; waits up to `wait_s`, then returns ().

        Asking again for the same (step, part) returns the same groups. They count as taken by `step`.
        """
        ...

    async def commit(self, step: int) -> None:
        """A checkpoint that covers all iterations up to `step` is durable: what they took is trained for good."""
        ...

    async def rewind(self, step: int) -> None:
        """The learner restarts after iteration `step`: what later iterations took is ready to be drawn again."""
        ...

    async def request_evaluation(self, version: int) -> None:
        """Have the held-out prompts answered by the next replica that claims at `version` or newer."""
        ...


class Learner(Protocol):
    """The model that is trained, with its optimizer. Calls block; the trainer loop runs them in a thread."""

    def step(self, groups: Sequence[ExperienceGroup]) -> dict[str, float]:
        """One optimizer update on one mini-batch; returns metrics.

        Raises `RunFailed` if loss or gradient is not finite.
        """
        ...

    def tensors(self) -> Mapping[str, Any]:
        """Current weights by Hugging Face name, a tied one once; they may be read until the next `step`."""
        ...

    def save(self, folder: Path) -> None:
        """Write model, optimizer and random generators into an existing empty folder. Raises OSError if it cannot."""
        ...

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote."""
        ...


class Written(Protocol):
    """A version that has left the learner."""

    @property
    def stall_s(self) -> float:
        """How long the learner stood still for it."""
        ...


class WeightSink(Protocol):
    """The relay, as the trainer sees it."""

    async def newest(self) -> int | None:
        """Newest complete version; None if it holds none."""
        ...

    async def publish(self, version: int, tensors: Mapping[str, Any]) -> float:
        """Copy the weights out, and wait until they can be seen; returns the seconds that the learner stood still.

        Idempotent per version.
        """
        ...

    async def write(self, version: int, tensors: Mapping[str, Any]) -> Written:
        """Only the first half of `publish`: when it returns, the learner may change its weights. Idempotent."""
        ...

    async def complete(self, written: Any) -> None:
        """The second half, for what `write` returned. If it raises a `PortError`, the version may never be seen."""
        ...


class ManagerPort(Protocol):
    """The manager, as the trainer sees it."""

    async def published(self, version: int) -> None:
        """The relay holds this version completely: a good moment to repack."""
        ...


class Checkpoint(NamedTuple):
    """A complete checkpoint, which covers all iterations up to `step`."""

    step: int
    path: Path


class CheckpointStore(Protocol):
    """Durable states. Calls block; the trainer loop runs them in a thread."""

    def newest(self) -> Checkpoint | None:
        """The newest complete one."""
        ...

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let `write` fill a folder and make it the checkpoint of `step`: complete or not at all."""
        ...


class RunBlocking(Protocol):
    """How the loop makes a blocking call: `asyncio.to_thread`, or at once on a virtual clock."""

    async def __call__(self, call: Callable[..., Any], /, *args: Any) -> Any:
        """Return what `call(*args)` returns, without holding up the event loop."""
        ...
