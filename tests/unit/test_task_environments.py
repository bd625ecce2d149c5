"""Environments of users may hang, crash, lie or eat memory: an episode fails, and the replica goes on."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from laminar.schema.trajectories import Scored
from laminar.tasks.environments import EnvironmentPool, EnvironmentRules, InlineEnvironments
from laminar.tasks.loading import build_task
from laminar.tasks.protocol import EnvironmentLost, EpisodeFailed, InteractiveTask, Problem, Reply, Turn

SOURCE = """
import asyncio, os, subprocess, sys, time
from laminar.tasks.protocol import Reply

class Play:
    def __init__(self, problem):
        if problem.problem_id == "refuses":
            raise ValueError("no such game")
        self.turns = []

    async def act(self, turn):
        self.turns.append(turn)
        match turn:
            case "sleep": await asyncio.sleep(600)
            case "slow": await asyncio.sleep(0.4)
            case "block": time.sleep(600)
            case "raise": return 1 / 0
            case "exit": os._exit(3)
            case "leave": sys.exit("enough")
            case "word": return "very good"
            case "lies": return Reply(text=7)
            case "both": return Reply(text="a", messages=({"role": "tool", "content": "b"},))
            case "mute": return Reply(messages=({"role": "tool"},))
            case "early": return Reply(grade=1.0)
            case "nan": return Reply(done=True, grade=float("nan"))
            case "ids": return Reply(messages=({"role": "tool", "content": str(turn.token_ids)},))
            case "closed": return Reply(text=str(CLOSED))
            case "judge": return Reply(done=True, grade=0.25)
            case "hog": bytearray(1 << 40)
            case "spawn":
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", os.path.dirname(__file__)])
            case "pid": return Reply(text=str(os.getpid()))
        return Reply(text=" ".join(self.turns), done=turn == "bye")

    async def close(self):
        CLOSED.append([str(turn) for turn in self.turns])
        raise RuntimeError("nobody hears this")

CLOSED = []

class Game:
    def problems(self, split): return []
    def grade(self, problem, answer): return 0.0
    def environment(self, problem): return Play(problem)
"""

PROBLEM = Problem(problem_id="1", prompt="?")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "wild_game.py").write_text(SOURCE)
    return tmp_path


@contextlib.asynccontextmanager
async def pool_of(
    folder: Path, *, name: str = "Game", timeout_s: float = 5.0, num_workers: int = 1, memory_bytes: int | None = None
) -> AsyncIterator[EnvironmentPool]:
    rules = EnvironmentRules(timeout_s=timeout_s, num_workers=num_workers, memory_bytes=memory_bytes)
    pool = EnvironmentPool(f"wild_game:{name}", {}, sys_path=[str(folder)], rules=rules)
    try:
        yield pool
    finally:
        await pool.close()
        assert not started_by(folder), "a process was left"


def started_by(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[-1:] == [str(folder)] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


async def test_an_episode_remembers_its_turns_and_knows_nothing_of_others(folder: Path):
    async with pool_of(folder) as pool:
        one, other = pool.environment(PROBLEM), pool.environment(PROBLEM)
        assert await one.act(Turn("a")) == Reply(text="a")
        assert await other.act(Turn("x")) == Reply(text="x")
        assert await one.act(Turn("bye")) == Reply(text="a bye", done=True)


async def test_many_episodes_share_a_process_and_act_at_the_same_time(folder: Path):
    async with pool_of(folder) as pool:
        episodes = [pool.environment(PROBLEM) for _ in range(30)]
        pids = {(await episode.act(Turn("pid"))).text for episode in episodes}
        assert len(pids) == 1
        began_s = time.monotonic()
        replies = await asyncio.gather(*(episode.act(Turn("slow")) for episode in episodes))
        assert {reply.text for reply in replies} == {"pid slow"}
        assert time.monotonic() - began_s < 30 * 0.4


async def test_episodes_are_spread_over_the_processes(folder: Path):
    async with pool_of(folder, num_workers=3) as pool:
        assert len({(await pool.environment(PROBLEM).act(Turn("pid"))).text for _ in range(6)}) == 3


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ("raise", r"ZeroDivisionError: division by zero \(.*wild_game.py:\d+\)"),
        ("leave", "SystemExit: enough"),
        ("word", "not a Reply but a str: 'very good'"),
        ("lies", "a Reply has a text"),
        ("both", "a text or messages, this one both"),
        ("mute", "a message has a role and a content"),
        ("early", "done=True is missing"),
        ("nan", "the reward is nan"),
        ("exit", r"process died \(exit code 3\)"),
    ],
)
async def test_what_user_code_does_is_a_fact_about_its_episode(folder: Path, turn: str, reason: str):
    async with pool_of(folder) as pool:
        with pytest.raises(EpisodeFailed, match=reason):
            await pool.environment(PROBLEM).act(Turn(turn))
        assert await pool.environment(PROBLEM).act(Turn("hello")) == Reply(text="hello")


async def test_an_environment_that_cannot_be_made_fails_its_episode_alone(folder: Path):
    async with pool_of(folder) as pool:
        with pytest.raises(EpisodeFailed, match="ValueError: no such game"):
            await pool.environment(Problem(problem_id="refuses", prompt="?")).act(Turn("a"))
        assert await pool.environment(PROBLEM).act(Turn("a")) == Reply(text="a")


async def test_a_turn_that_waits_too_long_ends_and_its_neighbours_do_not_notice(folder: Path):
    async with pool_of(folder, timeout_s=0.5) as pool:
        slow, neighbour = pool.environment(PROBLEM), pool.environment(PROBLEM)
        pid = await neighbour.act(Turn("pid"))
        with pytest.raises(EpisodeFailed, match=r"no reply after 0\.5 s"):
            await slow.act(Turn("sleep"))
        assert (await neighbour.act(Turn("pid"))).text == pid.text


async def test_a_turn_that_blocks_the_process_ends_with_it_and_others_are_not_blamed(
    folder: Path,
):
    async with pool_of(folder, timeout_s=0.5) as pool:
        bad, good = pool.environment(PROBLEM), pool.environment(PROBLEM)
        await good.act(Turn("a"))
        with pytest.raises(EpisodeFailed, match=r"no reply after 0\.5 s"):
            await bad.act(Turn("block"))
        with pytest.raises(EnvironmentLost):
            await good.act(Turn("b"))
        again = pool.environment(PROBLEM)
        assert [(await again.act(Turn(turn))).text for turn in "ab"] == ["a", "a b"]


async def test_of_several_turns_under_way_none_is_blamed_for_a_dead_process(folder: Path):
    async with pool_of(folder) as pool:
        episodes = [pool.environment(PROBLEM) for _ in range(3)]
        for episode in episodes:
            await episode.act(Turn("a"))
        turns = zip(episodes, ["slow", "slow", "exit"], strict=True)
        outcomes = await asyncio.gather(*(e.act(Turn(turn)) for e, turn in turns), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {EnvironmentLost}


async def test_memory_is_bounded(folder: Path):
    async with pool_of(folder, memory_bytes=1 << 30) as pool:
        with pytest.raises(EpisodeFailed, match="out of memory"):
            await pool.environment(PROBLEM).act(Turn("hog"))
        assert await pool.environment(PROBLEM).act(Turn("a")) == Reply(text="a")


async def test_children_of_an_environment_end_with_the_pool(folder: Path):
    async with pool_of(folder) as pool:
        await pool.environment(PROBLEM).act(Turn("spawn"))
        give_up_s = time.monotonic() + 30
        while not started_by(folder):
            assert time.monotonic() < give_up_s


async def test_an_environment_gets_the_ids_and_may_reply_with_messages_and_with_a_grade(folder: Path):
    async with pool_of(folder) as pool:
        one = pool.environment(PROBLEM)
        assert await one.act(Turn("ids", (5, 2))) == Reply(messages=({"role": "tool", "content": "(5, 2)"},))
        assert await one.act(Turn("judge")) == Reply(done=True, grade=Scored(reward=0.25))


async def test_an_environment_is_closed_when_its_episode_is_forgotten(folder: Path):
    async with pool_of(folder) as pool:
        closed, other = pool.environment(PROBLEM), pool.environment(PROBLEM)
        await closed.act(Turn("a"))
        assert (await other.act(Turn("closed"))).text == "[]"
        pool.forget(closed)
        async with asyncio.timeout(10):
            while (await other.act(Turn("closed"))).text != "[['a']]":  # noqa: ASYNC110 (nothing tells when it is done)
                await asyncio.sleep(0)


async def test_a_forgotten_episode_is_gone_from_its_process(folder: Path):
    async with pool_of(folder) as pool:
        episode = pool.environment(PROBLEM)
        await episode.act(Turn("a"))
        pool.forget(episode)
        await pool.environment(PROBLEM).act(Turn("b"))  # in order on the same socket, so the first is forgotten by now
        with pytest.raises(EpisodeFailed, match="the episode is closed"):
            await episode.act(Turn("c"))


async def test_a_task_that_cannot_be_built_says_so_in_its_episodes(folder: Path):
    async with pool_of(folder, name="Nothing") as pool:
        with pytest.raises(EpisodeFailed, match="has no 'Nothing'"):
            await pool.environment(PROBLEM).act(Turn("a"))


async def test_played_inline_the_facts_are_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(folder))
    task = build_task("wild_game:Game", {})
    assert isinstance(task, InteractiveTask)
    pool = InlineEnvironments(task, 0.2)
    for turn, reason in (("raise", "ZeroDivisionError"), ("word", "not a Reply"), ("sleep", "no reply after")):
        with pytest.raises(EpisodeFailed, match=reason):
            await pool.environment(PROBLEM).act(Turn(turn))
    assert await pool.environment(PROBLEM).act(Turn("a")) == Reply(text="a")
