"""The contract of a task: where prompts come from, how an answer is graded, what an environment replies."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from msgspec import Struct

from laminar.schema.errors import LaminarError
from laminar.schema.trajectories import Grade

Split = Literal["train", "heldout"]


class Problem(Struct, frozen=True, kw_only=True):
    """One problem before tokenisation: plain text, or chat messages that the model's chat template turns into text.

    `problem_id` is unique within its split and the same in every run; `payload` is what grading needs (JSON values).
    """

    problem_id: str
    prompt: str | tuple[dict[str, str], ...]
    payload: dict[str, Any] = {}


class Reply(Struct, frozen=True, kw_only=True):
    """What an environment answers to one turn. `text` is appended to the context; `done` ends the episode."""

    text: str
    done: bool = False


class EpisodeFailed(LaminarError):
    """This episode cannot go on; the text says what its environment did."""


class EnvironmentLost(LaminarError):
    """The environment is gone through no fault of this episode, whose turns may be played again in a fresh one."""


class Environment(Protocol):
    """One episode; made anew for every attempt, never reset. It lives in a process with others, apart from the replica:
    memory is limited, and a turn that takes too long or kills the process ends the episode."""

    async def act(self, turn: str) -> Reply:
        """Take the model's last turn (special tokens removed) and reply."""
        ...


class Task(Protocol):
    """What to ask and how good an answer is. Construct with the recipe's `task.options` as keyword arguments."""

    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems of a split, in a fixed order."""
        ...

    def grade(self, problem: Problem, answer: str) -> float | Grade:
        """Reward of a complete answer (text, special tokens removed). May block; runs outside the event loop.

        For a multi-turn episode `answer` is the whole transcript after the prompt. Raise to say that the answer cannot
        be scored; an exception is recorded as `Unscorable` with its text, never as a reward of 0.
        """
        ...


@runtime_checkable
class InteractiveTask(Protocol):
    """A task whose problems are played in an environment, turn by turn."""

    def environment(self, problem: Problem) -> Environment:
        """A fresh environment for one episode."""
        ...
