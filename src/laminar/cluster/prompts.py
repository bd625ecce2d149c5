"""The task's problems as prompts in token ids."""

from collections.abc import Sequence

import msgspec

from laminar.schema.errors import UserError
from laminar.schema.trajectories import Prompt
from laminar.tasks.protocol import Problem, Split, Task
from laminar.tasks.tokenizer import Tokenizer


class TaskPrompts:
    """Problems are tokenised when they are drawn; the problem itself travels along as the prompt's payload."""

    def __init__(self, task: Task, tokenizer: Tokenizer, *, num_heldout: int) -> None:
        self._tokenizer = tokenizer
        self._problems: dict[Split, Sequence[Problem]] = {
            "train": task.problems("train"),
            "heldout": task.problems("heldout")[:num_heldout] if num_heldout else (),
        }
        if not self._problems["train"]:
            raise UserError("task: problems('train') is empty; there is nothing to train on")

    @property
    def num_train(self) -> int:
        return len(self._problems["train"])

    @property
    def num_heldout(self) -> int:
        return len(self._problems["heldout"])

    def prompt(self, split: Split, index: int) -> Prompt:
        """The problem at this place of its split."""
        problem = self._problems[split][index]
        return Prompt(
            prompt_id=problem.problem_id,
            token_ids=self._tokenizer.encode_prompt(problem.prompt),
            payload=msgspec.to_builtins(problem),
        )
