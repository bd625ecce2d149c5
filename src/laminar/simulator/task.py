"""The task of a simulated run: prompts, tokenizer, reward and tool, none of which means anything.

Invariant: rewards and latencies follow from the tokens of an answer, so they are the same wherever it is graded.
"""

import asyncio
from collections.abc import Sequence

from laminar.data.ports import Split
from laminar.engines.workloads import Workload
from laminar.schema.trajectories import Grade, Prompt, Scored
from laminar.tasks.protocol import Environment, Message, Problem, Reply, Turn

END, CALL = 0, 1
"""Stop tokens: of an answer, and of a turn that calls the tool."""

NUM_PROMPTS = 17_000
"""About the size of DAPO-Math-17k."""


class EmulatedPrompts:
    """Fulfils `data.ports.Prompts`: as many problems as asked for, all of one length."""

    num_heldout = 0

    def __init__(self, prompt_ids: int, num_train: int = NUM_PROMPTS) -> None:
        self.num_train = num_train
        self._prompt_ids = prompt_ids

    def prompt(self, split: Split, index: int) -> Prompt:
        """Prompt number `index`."""
        problem_id = f"p{index}"
        return Prompt(
            prompt_id=problem_id,
            token_ids=(2 + index % 60,) * self._prompt_ids,
            payload={"problem_id": problem_id, "prompt": ""},
        )


class EmulatedTokenizer:
    """Fulfils `rollout.ports.Tokenizer`; the text of tokens is their sum and the last of them."""

    stop_token_ids: tuple[int, ...] = (END, CALL)

    def __init__(self, reply_ids: int) -> None:
        self._reply_ids = reply_ids

    def encode_text(self, text: str) -> tuple[int, ...]:
        """A reply."""
        return (2,) * self._reply_ids if text else ()

    def encode_reply(self, messages: Sequence[Message], after: Sequence[int]) -> tuple[int, ...]:
        """Messages are as long as any reply."""
        return (2,) * self._reply_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """What reward and tool need to know of an answer."""
        return f"{sum(token_ids)} {token_ids[-1]}"


class EmulatedGrader:
    """Fulfils `rollout.ports.Grader`: rewards of 0 and 1, at once."""

    async def grade(self, problem: Problem, answer: str) -> Grade:
        """By the sum of the answer's tokens."""
        return Scored(reward=float(int(answer.partition(" ")[0]) % 2))


class EmulatedTool(Environment):
    """Replies after its time; an answer that does not call it is the end of the episode."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    async def act(self, turn: Turn) -> Reply:
        """Take the time that this call takes."""
        total, last = (int(word) for word in turn.split())
        if last != CALL:
            return Reply(text="", done=True)
        await asyncio.sleep(self._workload.tool_s(total))
        return Reply(text="reply")


class EmulatedTools:
    """Fulfils `rollout.ports.Environments`."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def environment(self, problem: Problem) -> Environment:
        """The tool of one episode."""
        return EmulatedTool(self._workload)

    def forget(self, environment: Environment) -> None:
        """A tool has no state."""
