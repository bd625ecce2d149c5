"""The contract of a task: where prompts come from, how an answer is graded, what an environment replies."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, Self, runtime_checkable

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


Message = dict[str, str]
"""A chat message: `role`, `content` and whatever else the model's chat template knows."""


class Turn(str):
    """A turn of the model as text, special tokens removed; `token_ids` is what was drawn, its end token included."""

    token_ids: tuple[int, ...]

    def __new__(cls, text: str, token_ids: Sequence[int] = ()) -> Self:
        turn = super().__new__(cls, text)
        turn.token_ids = tuple(token_ids)
        return turn


class Reply(Struct, frozen=True, kw_only=True):
    """What an environment answers to one turn; `done` ends the episode.

    `text` joins the context as it is; `messages` join it as the model's chat template writes them, with the opening of
    the model's next turn. `grade`, with `done`, is the reward of the whole episode; without it the task's `grade` says.
    """

    text: str = ""
    messages: tuple[Message, ...] = ()
    done: bool = False
    grade: float | Grade | None = None


class EpisodeFailed(LaminarError):
    """This episode cannot go on; the text says what its environment did."""


class EnvironmentLost(LaminarError):
    """The environment is gone through no fault of this episode, whose turns may be played again in a fresh one."""


class Environment(Protocol):
    """One episode; made anew for every attempt, never reset. It lives in a process with others, apart from the replica:
    memory is limited, and a turn that takes too long or kills the process ends the episode."""

    async def act(self, turn: Turn) -> Reply:
        """Take the model's last turn and reply."""
        ...


@runtime_checkable
class ClosableEnvironment(Protocol):
    """An environment that holds something: `close` is called when the episode is over, unless its process is killed."""

    async def close(self) -> None:
        """Give back what it holds."""
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
