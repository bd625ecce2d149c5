"""Programs that talk to the model over HTTP: what they add to the conversation becomes the environment's reply."""

import asyncio
import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from laminar.schema.trajectories import Scored
from laminar.tasks.agents import ENDPOINT, AgentEnvironment, AgentTask
from laminar.tasks.chat_endpoint import Call, Refused
from laminar.tasks.environments import InlineEnvironments
from laminar.tasks.protocol import Environment, EpisodeFailed, Message, Problem, Reply, Split, Turn

QUESTION: Message = {"role": "user", "content": "How warm is it?"}
PROBLEM = Problem(problem_id="1", prompt=(QUESTION,))


def post(base_url: str, **body: Any) -> dict[str, Any]:
    """One request, as any client sends it; raises ValueError with status and message of a refusal."""
    request = urllib.request.Request(
        f"{base_url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{error.code}: {json.load(error)['error']['message']}") from None


def ask(base_url: str, messages: list[Message]) -> dict[str, Any]:
    """The choice of the answer, appended to `messages` as clients do."""
    choice = post(base_url, model="any", messages=messages)["choices"][0]
    messages.append(choice["message"])
    return choice


class Thermometer(AgentTask):
    """Looks when the model says so; the reward is what it found, in a thousandth."""

    def __init__(self, *steps: str) -> None:
        self.steps = steps
        self.seen: list[dict[str, Any]] = []
        self.refusals: list[str] = []
        self.ended = threading.Event()

    def problems(self, split: Split) -> Sequence[Problem]:
        return [PROBLEM]

    def play(self, problem: Problem, base_url: str) -> Any:
        messages = [dict(message) for message in problem.prompt if isinstance(message, dict)]
        try:
            self.seen.append(ask(base_url, messages))
            for step in self.steps:
                messages.append({"role": "tool", "content": step})
                self.seen.append(ask(base_url, messages))
            return len(messages) / 1000
        except ValueError as error:
            self.refusals.append(str(error))
            raise
        finally:
            self.ended.set()


@contextlib.asynccontextmanager
async def episode(task: AgentTask, problem: Problem = PROBLEM, timeout_s: float = 30.0) -> AsyncIterator[Environment]:
    environments = InlineEnvironments(task, timeout_s)
    one = environments.environment(problem)
    try:
        yield one
    finally:
        await one.close()  # type: ignore[attr-defined]


async def test_a_dialogue_goes_through_the_endpoint_turn_by_turn():
    task = Thermometer("21 degrees", "22 degrees")
    async with episode(task) as one:
        assert await one.act(Turn("look", (5, 6, 2))) == Reply(messages=({"role": "tool", "content": "21 degrees"},))
        assert await one.act(Turn("look again", (7, 2))) == Reply(messages=({"role": "tool", "content": "22 degrees"},))
        assert await one.act(Turn("22", (8, 2))) == Reply(done=True, grade=Scored(reward=0.006))
    assert [choice["message"]["content"] for choice in task.seen] == ["look", "look again", "22"]
    assert [choice["token_ids"] for choice in task.seen] == [[5, 6, 2], [7, 2], [8, 2]]
    assert {choice["finish_reason"] for choice in task.seen} == {"stop"}


class Coroutine(Thermometer):
    async def play(self, problem: Problem, base_url: str) -> Any:  # type: ignore[override]
        return await asyncio.to_thread(super().play, problem, base_url)


async def test_an_agent_may_be_a_coroutine():
    task = Coroutine("21 degrees")
    async with episode(task) as one:
        assert (await one.act(Turn("look"))).messages == ({"role": "tool", "content": "21 degrees"},)
        assert await one.act(Turn("21")) == Reply(done=True, grade=Scored(reward=0.004))


async def test_many_agents_speak_at_the_same_time_and_hear_only_their_own():
    tasks = [Thermometer(f"{n} degrees") for n in range(40)]
    async with contextlib.AsyncExitStack() as stack:
        episodes = [await stack.enter_async_context(episode(task)) for task in tasks]
        replies = await asyncio.gather(*(one.act(Turn(f"look {n}")) for n, one in enumerate(episodes)))
        assert [reply.messages[0]["content"] for reply in replies] == [f"{n} degrees" for n in range(40)]
        await asyncio.gather(*(one.act(Turn("done")) for one in episodes))
    assert [task.seen[0]["message"]["content"] for task in tasks] == [f"look {n}" for n in range(40)]


class Scripted(Thermometer):
    """Sends the given conversations one after the other, whatever the model says."""

    def __init__(self, *conversations: list[Message]) -> None:
        super().__init__()
        self.conversations = conversations

    def play(self, problem: Problem, base_url: str) -> Any:
        try:
            for messages in self.conversations:
                self.seen.append(post(base_url, messages=messages)["choices"][0])
        except ValueError as error:
            self.refusals.append(str(error))
            raise
        finally:
            self.ended.set()


def said(content: str) -> Message:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    ("conversations", "reason"),
    [
        ([[{"role": "user", "content": "Something else"}]], "the messages of the problem's prompt"),
        ([[QUESTION], [QUESTION, said("edited"), QUESTION]], "all messages so far as they were"),
        ([[QUESTION], [QUESTION, said("look")]], "new ones at the end"),
        ([[QUESTION], [said("look"), QUESTION]], "all messages so far as they were"),
    ],
    ids=["another prompt", "edited answer", "nothing new", "shortened"],
)
async def test_a_conversation_that_is_not_continued_fails_its_episode_and_tells_the_agent(
    conversations: list[list[Message]], reason: str
):
    task = Scripted(*conversations)
    async with episode(task) as one:
        with pytest.raises(EpisodeFailed, match=reason):
            await one.act(Turn("look"))
        assert await asyncio.to_thread(task.ended.wait, 10)
    assert len(task.refusals) == 1
    assert task.refusals[0].startswith("400: ")
    assert reason in task.refusals[0]


async def test_a_client_that_lost_the_response_gets_it_again():
    task = Scripted([QUESTION], [QUESTION], [QUESTION], [QUESTION, said("look"), {"role": "tool", "content": "21"}])
    async with episode(task) as one:
        assert (await one.act(Turn("look", (5, 2)))).messages == ({"role": "tool", "content": "21"},)
    assert [choice["token_ids"] for choice in task.seen] == [[5, 2]] * 3


async def test_parts_of_text_and_empty_fields_of_clients_are_understood():
    echoed = {**said("look"), "refusal": None, "tool_calls": None, "annotations": []}
    more = {
        "role": "tool",
        "tool_call_id": "7",
        "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "1"}],
    }
    task = Scripted([QUESTION], [QUESTION, echoed, more])  # type: ignore[list-item]
    async with episode(task) as one:
        reply = await one.act(Turn("look"))
    assert reply.messages == ({"role": "tool", "tool_call_id": "7", "content": "21"},)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"temperature": 0.5}, "temperature is not supported here: how the model draws is set by the recipe"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"n": 2}, "one answer at a time"),
        ({"stream": True}, "not streamed"),
        ({"messages": []}, "at least one message"),
        ({"messages": ["hello"]}, "a message is an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "tool_calls of a message must be text"),
    ],
)
def test_what_would_be_answered_differently_than_asked_is_refused(body: dict[str, Any], sentence: str):
    base_url = ENDPOINT.open(lambda call: call.answer(Turn("yes")))
    try:
        with pytest.raises(ValueError, match=f"400: .*{sentence}"):
            post(base_url, **{"messages": [QUESTION], **body})
        assert post(base_url, messages=[QUESTION], n=1, stream=False, temperature=None)["choices"]
    finally:
        ENDPOINT.close(base_url)


def test_only_who_knows_the_address_is_heard():
    base_url = ENDPOINT.open(lambda call: call.answer(Turn("yes")))
    host = base_url.rsplit("/", 2)[0]
    with pytest.raises(ValueError, match="410: this conversation is over"):
        post(f"{host}/guessed/v1", messages=[QUESTION])
    with pytest.raises(ValueError, match="404"):
        post(f"{base_url}/more", messages=[QUESTION])
    ENDPOINT.close(base_url)
    with pytest.raises(ValueError, match="410"):
        post(base_url, messages=[QUESTION])
    assert host.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(("headers", "body"), [({}, b"{not json"), ({}, b"[1]"), ({"Content-Length": "1e9"}, b"{}")])
def test_noise_is_refused_and_the_next_request_is_answered(headers: dict[str, str], body: bytes):
    base_url = ENDPOINT.open(lambda call: call.answer(Turn("yes")))
    with pytest.raises(urllib.error.HTTPError, match="HTTP Error 4"):
        urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers), timeout=30)
    assert post(base_url, messages=[QUESTION])["choices"]
    ENDPOINT.close(base_url)


async def test_the_end_of_the_episode_ends_an_agent_that_waits_for_the_model():
    task = Thermometer("21 degrees")
    async with episode(task) as one:
        await one.act(Turn("look"))
    assert await asyncio.to_thread(task.ended.wait, 10)
    assert task.refusals == ["410: this conversation is over"]


def test_a_call_that_arrives_after_the_end_is_refused():
    one = AgentEnvironment(Thermometer(), PROBLEM)
    asyncio.run(one.close())
    call = Call([QUESTION])
    one.hear(call)
    with pytest.raises(Refused, match="this conversation is over"):
        call.wait()


class Fails(AgentTask):
    def __init__(self, result: Any) -> None:
        self.result = result

    def problems(self, split: Split) -> Sequence[Problem]:
        return [PROBLEM]

    def play(self, problem: Problem, base_url: str) -> Any:
        ask(base_url, [QUESTION])
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (ZeroDivisionError("no degrees"), r"ZeroDivisionError: no degrees \(.*test_task_agents.py:\d+\)"),
        ("warm", "the reward is not a number but a str"),
        (float("nan"), "the reward is nan"),
    ],
)
async def test_what_an_agent_raises_or_returns_instead_of_a_reward_is_the_reason(result: Any, reason: str):
    async with episode(Fails(result)) as one:
        with pytest.raises(EpisodeFailed, match=reason):
            await one.act(Turn("look"))


class Silent(Thermometer):
    def play(self, problem: Problem, base_url: str) -> Any:
        return 1.0


async def test_an_agent_that_never_asks_has_no_reward():
    async with episode(Silent()) as one:
        with pytest.raises(EpisodeFailed, match="returned before it called the model"):
            await one.act(Turn("look"))


def test_a_prompt_of_plain_text_is_refused():
    with pytest.raises(TypeError, match="must be chat messages"):
        AgentEnvironment(Silent(), Problem(problem_id="1", prompt="text"))


def test_an_episode_that_runs_into_its_limits_has_a_reward_of_the_tasks_choice():
    assert Silent().grade(PROBLEM, "half an answer") == 0.0
