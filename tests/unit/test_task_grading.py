"""Rewards of users may hang, crash or eat memory: the service never notices more than a value."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from laminar.schema.errors import UserError
from laminar.schema.trajectories import Scored, Unscorable
from laminar.tasks.grading import Grader, GradingRules, InlineGrader
from laminar.tasks.loading import build_task
from laminar.tasks.protocol import Problem

TASK_SOURCE = """
import math, os, re, subprocess, sys, time
from laminar.schema.trajectories import Scored, Unscorable

if os.path.exists("do_not_start"):
    os._exit(7)

CHILD = [sys.executable, "-c", "import time; time.sleep(600)", os.path.dirname(__file__)]

def divide(payload):
    return 1 / payload["zero"]

class HostileTask:
    def __init__(self, greeting="hello"):
        if greeting == "raise":
            raise RuntimeError("bad greeting")
        self.greeting = greeting
    def problems(self, split):
        return []
    def grade(self, problem, answer):
        return getattr(self, answer)(problem.payload)
    def one(self, payload): return 1
    def yes(self, payload): return True
    def half(self, payload): return 0.5
    def number(self, payload): return payload["n"]
    def rich(self, payload): return Scored(reward=0.25, metrics={"steps": 3})
    def no_verdict(self, payload): return Unscorable(reason="sandbox is down")
    def not_a_number(self, payload): return math.nan
    def infinite(self, payload): return -math.inf
    def bad_metric(self, payload): return Scored(reward=1.0, metrics={"steps": math.inf})
    def word(self, payload): return "very good"
    def nothing(self, payload): return None
    def raises(self, payload): return divide(payload)
    def library_raises(self, payload): return re.compile("(")
    def leaves(self, payload): sys.exit("enough")
    def hang(self, payload): time.sleep(600)
    def slow(self, payload): time.sleep(0.3); return 1.0
    def backtrack(self, payload): return re.match("(a+)+$", "a" * 40 + "b")
    def crash(self, payload): os._exit(payload["code"])
    def spawn_and_hang(self, payload):
        subprocess.Popen(CHILD)
        subprocess.Popen(CHILD, start_new_session=True)
        time.sleep(600)
    def spawn(self, payload):
        subprocess.Popen(CHILD)
        return 1.0
    def hog(self, payload):
        kept = []
        while True:
            kept.append(bytearray(1 << 24))
    def print(self, payload):
        print("noise on stdout " * 1000)
        return 1.0
    def torch_is_imported(self, payload): return "torch" in sys.modules
    def pid(self, payload): return os.getpid()
"""


@pytest.fixture(autouse=True)
def recipe(tmp_path, monkeypatch):
    """A recipe's folder; afterwards no process of this test may be left."""
    (tmp_path / "hostile_task.py").write_text(TASK_SOURCE)
    monkeypatch.chdir(tmp_path)
    before = set(psutil.Process().children(recursive=True))  # helpers of other tests' multiprocessing
    yield tmp_path
    deadline_s = time.monotonic() + 5
    while left := set(psutil.Process().children(recursive=True)) - before:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.02)
    assert not children_of(tmp_path)


def children_of(recipe):
    """The processes that this test's task started, wherever they are."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[-1:] == [str(recipe)] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.asynccontextmanager
async def grader_of(recipe, *, options=None, timeout_s=5.0, num_workers=1, memory_bytes=None):
    rules = GradingRules(timeout_s=timeout_s, num_workers=num_workers, memory_bytes=memory_bytes)
    grader = Grader("hostile_task:HostileTask", options or {}, sys_path=[str(recipe)], rules=rules)
    try:
        yield grader
    finally:
        await grader.close()


def problem(**payload):
    return Problem(problem_id="p", prompt="?", payload=payload)


async def test_numbers_and_grades_come_back_and_noise_does_not_disturb(recipe):
    expected = {"one": 1.0, "yes": 1.0, "half": 0.5, "print": 1.0, "torch_is_imported": 0.0}
    async with grader_of(recipe) as grader:
        await grader.start()
        for answer, reward in expected.items():
            assert await grader.grade(problem(), answer) == Scored(reward=reward)
        assert await grader.grade(problem(), "rich") == Scored(reward=0.25, metrics={"steps": 3.0})
        assert await grader.grade(problem(), "no_verdict") == Unscorable(reason="sandbox is down")


UNSCORABLE = {
    "not_a_number": "the reward is nan",
    "infinite": "the reward is -inf",
    "bad_metric": "the metric 'steps' is inf",
    "word": "the reward is not a number but a str: 'very good'",
    "nothing": "the reward is not a number but a NoneType: None",
    "raises": "ZeroDivisionError: division by zero ({folder}/hostile_task.py:11)",
    "library_raises": "error: missing ), unterminated subpattern at position 0 ({folder}/hostile_task.py:34)",
    "leaves": "SystemExit: enough ({folder}/hostile_task.py:35)",
}


async def test_what_is_not_a_reward_says_why_and_costs_no_worker(recipe):
    async with grader_of(recipe) as grader:
        pid = await grader.grade(problem(), "pid")
        for answer, reason in UNSCORABLE.items():
            reason = reason.replace("{folder}", str(recipe))
            assert await grader.grade(problem(zero=0), answer) == Unscorable(reason=reason)
        assert await grader.grade(problem(), "pid") == pid


async def test_the_inline_grader_gives_the_same_verdicts(recipe, monkeypatch):
    monkeypatch.syspath_prepend(str(recipe))
    monkeypatch.delitem(sys.modules, "hostile_task", raising=False)
    inline = InlineGrader(build_task("hostile_task:HostileTask", {}))
    assert await inline.grade(problem(n=3), "number") == Scored(reward=3.0)
    for answer, reason in UNSCORABLE.items():
        reason = reason.replace("{folder}", str(recipe))
        assert await inline.grade(problem(zero=0), answer) == Unscorable(reason=reason)


@pytest.mark.parametrize("answer", ["hang", "backtrack", "spawn_and_hang"])
async def test_code_that_does_not_return_is_killed_with_its_children_and_replaced(recipe, answer):
    async with grader_of(recipe, timeout_s=0.5) as grader:
        await grader.start()
        started_s = time.monotonic()
        assert await grader.grade(problem(), answer) == Unscorable(reason="no answer after 0.5 s")
        assert time.monotonic() - started_s < 2.5
        assert not children_of(recipe)
        assert await grader.grade(problem(), "one") == Scored(reward=1.0)


async def test_a_worker_that_dies_is_reported_and_replaced(recipe):
    async with grader_of(recipe) as grader:
        for code in (0, 3, 255):
            grade = await grader.grade(problem(code=code), "crash")
            assert grade == Unscorable(reason=f"the grading process died (exit code {code})")
        pid = await grader.grade(problem(), "pid")
        os.kill(int(pid.reward), signal.SIGKILL)
        grade = await grader.grade(problem(), "one")
        assert grade == Unscorable(reason="the grading process died (killed by SIGKILL)")
        assert await grader.grade(problem(), "one") == Scored(reward=1.0)


async def test_memory_is_bounded(recipe):
    async with grader_of(recipe, memory_bytes=1 << 30) as grader:
        grade = await grader.grade(problem(), "hog")
        assert isinstance(grade, Unscorable)
        assert grade.reason.startswith("MemoryError")
        assert await grader.grade(problem(), "one") == Scored(reward=1.0)


async def test_children_that_outlive_their_call_end_with_the_grader(recipe):
    async with grader_of(recipe) as grader:
        assert await grader.grade(problem(), "spawn") == Scored(reward=1.0)
        give_up_s = time.monotonic() + 30
        while not children_of(recipe):  # it shows its name once it has begun its program
            assert time.monotonic() < give_up_s
    assert not children_of(recipe)


async def test_calls_share_the_workers_and_each_has_its_own_time_limit(recipe):
    async with grader_of(recipe, timeout_s=1.0, num_workers=2) as grader:
        # Six calls of 0.3 s on two workers: the last ones wait longer than most of their limit, but are not cut short.
        answers = ["slow"] * 6 + ["hang"] + ["number"] * 200
        grades = await asyncio.gather(*[grader.grade(problem(n=n), answer) for n, answer in enumerate(answers)])
    assert grades[:6] == [Scored(reward=1.0)] * 6
    assert grades[6] == Unscorable(reason="no answer after 1 s")
    assert grades[7:] == [Scored(reward=float(n)) for n in range(7, 207)]


async def test_a_large_answer_passes(recipe):
    async with grader_of(recipe) as grader:
        grade = await grader.grade(problem(text="é" * 3_000_000), "one")
        assert grade == Scored(reward=1.0)


async def test_a_cancelled_call_leaves_nothing_behind_and_the_next_one_gets_its_own_answer(recipe):
    async with grader_of(recipe) as grader:
        await grader.start()
        call = asyncio.create_task(grader.grade(problem(), "spawn_and_hang"))
        while not children_of(recipe):  # noqa: ASYNC110  another process is what we wait for
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await grader.grade(problem(n=5), "number") == Scored(reward=5.0)
        waiting = [asyncio.create_task(grader.grade(problem(), "one")) for _ in range(3)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert await grader.grade(problem(n=6), "number") == Scored(reward=6.0)


async def test_closing_ends_calls_under_way_and_refuses_later_ones(recipe):
    async with grader_of(recipe, num_workers=2) as grader:
        await grader.start()
        calls = [asyncio.create_task(grader.grade(problem(), answer)) for answer in ("hang", "one", "hang", "hang")]
        await asyncio.sleep(0.5)
        started_s = time.monotonic()
        await grader.close()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - started_s < 2
        assert [type(end) for end in ended] == [Unscorable, Scored, Unscorable, RuntimeError]
        with pytest.raises(RuntimeError, match="closed"):
            await grader.grade(problem(), "one")


async def test_a_task_that_cannot_be_built_is_refused_at_the_start(recipe):
    async with grader_of(recipe, options={"greting": 1}) as grader:
        with pytest.raises(UserError, match="no option 'greting', did you mean 'greeting'"):
            await grader.start()
    async with grader_of(recipe, options={"greeting": "raise"}) as grader:
        with pytest.raises(UserError, match=r"cannot be built: RuntimeError: bad greeting \(.*hostile_task.py:16\)"):
            await grader.start()
    (recipe / "do_not_start").touch()
    async with grader_of(recipe) as grader:
        with pytest.raises(UserError, match=r"The process that builds .* died \(exit code 7\)"):
            await grader.start()
        grade = await grader.grade(problem(), "one")
        assert isinstance(grade, Unscorable)
        (recipe / "do_not_start").unlink()
        assert await grader.grade(problem(), "one") == Scored(reward=1.0)


OWNER = """
import asyncio, sys
from laminar.tasks.grading import Grader, GradingRules
from laminar.tasks.protocol import Problem

async def main():
    grader = Grader("hostile_task:HostileTask", {}, sys_path=[sys.argv[1]], rules=GradingRules(timeout_s=600))
    await grader.start()
    print("started", flush=True)
    await grader.grade(Problem(problem_id="p", prompt="?"), sys.argv[2])

asyncio.run(main())
"""


@pytest.mark.parametrize("answer", ["hang", "backtrack", "spawn_and_hang", "one"])
def test_workers_die_with_their_owner_even_if_it_is_killed(recipe, answer):
    command = [sys.executable, "-c", OWNER, str(recipe), answer]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"started\n"
        workers = psutil.Process(owner.pid).children()
        if answer == "spawn_and_hang":
            while len(psutil.Process(owner.pid).children(recursive=True)) < 4:
                time.sleep(0.01)
        else:
            time.sleep(0.2)
        owner.kill()
    _gone, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive
    deadline_s = time.monotonic() + 5
    while children_of(recipe):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
