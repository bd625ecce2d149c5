import asyncio
import io
import os
import pty
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from test_dashboard_synthetic import synthetic_events, write_events

from laminar.dashboard.live import draw
from laminar.dashboard.state import ReplicaView, RunView, fold
from laminar.dashboard.status import status
from laminar.dashboard.watching import watch
from laminar.schema.errors import UserError
from laminar.telemetry.events import EventLog
from laminar.telemetry.vocabulary import WaitStarted, to_facts


def _picture(view: RunView, now: float, width: int = 100, height: int = 30) -> list[str]:
    return draw(view, now, width=width, height=height).plain.split("\n")


def _halfway() -> RunView:
    return fold(RunView(), list(to_facts(synthetic_events()))[:2_000])


def test_the_picture_says_where_the_run_stands():
    view = _halfway()
    text = "\n".join(_picture(view, view.now))
    for part in ("synthetic", f"step {view.step}/40", "held-out", "tokens/s", "staleness", "replica-2", "repacks"):
        assert part in text
    assert re.search(r"about 00:\d\d left", text)


def test_the_picture_says_what_the_trainer_waits_for():
    view = _halfway()
    wait = WaitStarted(t=view.now, source="trainer", wait_id="w", waiter="trainer", what="3 groups", waited_s=1)
    fold(view, [wait])
    assert any("waits 5 s for 3 groups" in line for line in _picture(view, view.now + 4))


def test_the_picture_before_the_first_event_and_after_the_last():
    assert "waiting for the run to start" in _picture(RunView(), 0)[0]
    done = fold(RunView(), to_facts(synthetic_events()))
    assert "finished" in _picture(done, done.now + 99)[0]
    assert any("replica-1 lost" in line for line in _picture(done, done.now))


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_lines_keep_to_the_width_and_rows_to_the_height(width: int):
    view = fold(RunView(), to_facts(synthetic_events()))
    for i in range(3, 200):
        view.replicas[f"replica-{i}"] = ReplicaView(replica_id=f"replica-{i}", health="healthy", phase="generating")
    lines = _picture(view, view.now, width, height=30)
    assert len(lines) <= 30
    assert any("more: " in line and "generating" in line for line in lines)
    out = io.StringIO()
    Console(file=out, width=width, height=30).print(draw(view, view.now, width=width, height=30), soft_wrap=False)
    assert max(len(line) for line in out.getvalue().split("\n")) <= width


def test_drawing_twice_a_second_costs_less_than_three_percent_of_a_core():
    view = fold(RunView(), to_facts(synthetic_events()))
    console = Console(file=io.StringIO(), width=100, height=30, force_terminal=True)
    console.print(draw(view, view.now, width=100, height=30))
    costs = []
    for _ in range(30):
        began_s = time.thread_time()
        console.print(draw(view, view.now, width=100, height=30))
        costs.append(time.thread_time() - began_s)
    assert 2 * sorted(costs)[len(costs) // 2] < 0.03


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Let the event loop go on until the condition holds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is on a terminal has no event
            await asyncio.sleep(0.005)


async def test_watch_writes_plain_lines_where_there_is_no_terminal(tmp_path: Path):
    events, out, stop = synthetic_events(), io.StringIO(), asyncio.Event()
    write_events(tmp_path, events[:1_000])
    watching = asyncio.create_task(watch(tmp_path, stop, out=out, every_s=0.01, clock=lambda: events[1_000]["t"]))
    await until(lambda: len(out.getvalue().splitlines()) > 5)
    num_early = len(out.getvalue().splitlines())
    write_events(tmp_path, events)
    stop.set()
    view = await watching
    lines = out.getvalue().splitlines()
    assert num_early < len(lines)
    assert "\x1b" not in out.getvalue()
    assert lines[-1].endswith("run finished")
    assert (view.step, view.exit_reason) == (40, "finished")


async def test_watch_waits_for_a_run_that_has_not_begun_and_ends_with_it(tmp_path: Path):
    out = io.StringIO()
    watching = asyncio.create_task(watch(tmp_path, asyncio.Event(), out=out, until_finished=True, every_s=0.01))
    await asyncio.sleep(0.03)
    with EventLog(tmp_path / "events.jsonl", "launcher") as log:
        log.emit("run_started", run_id="r", name="late", num_replicas=1, num_steps=1)
        log.emit("run_finished", reason="finished")
    view = await asyncio.wait_for(watching, 5)
    assert view.name == "late"
    assert [line.split("] ")[1] for line in out.getvalue().splitlines()] == [
        "run late started: 1 step, 1 replica",
        "run finished",
    ]


async def test_a_resumed_run_does_not_tell_its_past_again(tmp_path: Path):
    events, out, stop = synthetic_events(), io.StringIO(), asyncio.Event()
    write_events(tmp_path, events[:1_500])
    resumed = {"source": "launcher", "kind": "resumed", "step": 3, "run_id": "r", "name": "n", "num_steps": 9}
    with (tmp_path / "events.jsonl").open("ab") as file:
        now = events[1_499]["t"] + 1_000
        file.write(write_events(tmp_path / "more", [{"t": now, **resumed}]).joinpath("events.jsonl").read_bytes())
    stop.set()
    view = await watch(tmp_path, stop, out=out, since=now)
    assert out.getvalue() == "[00:00] resumed after step 3\n"
    assert view.step == 3


async def test_the_process_that_started_the_run_keeps_its_metrics(tmp_path: Path):
    write_events(tmp_path, synthetic_events())
    stop = asyncio.Event()
    stop.set()
    await watch(tmp_path, stop, out=io.StringIO())
    assert not (tmp_path / "metrics.jsonl").exists()
    await watch(tmp_path, stop, out=io.StringIO(), keep_metrics=True)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 40


async def test_watch_draws_on_a_terminal_and_gives_it_back(tmp_path: Path):
    events, stop = synthetic_events(), asyncio.Event()
    write_events(tmp_path, events[:2_000])
    with _Terminal() as terminal:
        at = events[2_000]["t"]
        watching = asyncio.create_task(watch(tmp_path, stop, out=terminal.out, every_s=0.02, clock=lambda: at))
        await until(lambda: "replica-2" in terminal.shown)
        write_events(tmp_path, events)
        await until(lambda: "finished" in terminal.shown)
        stop.set()
        await watching
        await until(lambda: "\x1b[?25h" in terminal.shown)
    assert terminal.shown.count("\x1b[?25l") == terminal.shown.count("\x1b[?25h") == 1


async def test_a_cancelled_watch_gives_the_terminal_back(tmp_path: Path):
    with _Terminal() as terminal:
        watching = asyncio.create_task(watch(tmp_path, asyncio.Event(), out=terminal.out, every_s=0.02))
        await until(lambda: "\x1b[?25l" in terminal.shown)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        await until(lambda: "\x1b[?25h" in terminal.shown)


class _Terminal:
    """A terminal that nobody looks at; needs a running event loop, which reads it empty."""

    def __enter__(self) -> "_Terminal":
        self._master, slave = pty.openpty()
        self._read_bytes = b""
        self.out = os.fdopen(slave, "w")
        asyncio.get_running_loop().add_reader(self._master, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._master)
        self.out.close()
        os.close(self._master)

    @property
    def shown(self) -> str:
        return self._read_bytes.decode(errors="ignore")

    def _read(self) -> None:
        self._read_bytes += os.read(self._master, 1 << 16)


def test_status_of_a_folder_without_a_run_names_the_folder(tmp_path: Path):
    with pytest.raises(UserError, match=r"holds no run that has started \(events\.jsonl is missing or empty\)"):
        status(tmp_path)
    write_events(tmp_path, synthetic_events())
    assert status(tmp_path).startswith("synthetic: finished")
