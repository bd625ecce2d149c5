"""Calls between services of one event loop: whatever happens to either side, the caller gets an answer or an error."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from laminar.engines.calibration import calibration
from laminar.schema.errors import PeerLost
from laminar.simulator import clock
from laminar.simulator.lines import CALL_S, Calm, Host, Line
from laminar.simulator.relays import Relays


class Echo:
    """Answers after a second."""

    async def say(self, word: str) -> str:
        await asyncio.sleep(1.0)
        return word


def on_virtual_time(main: Callable[[Host, Line], Coroutine[Any, Any, Any]]) -> Any:
    async def with_host() -> Any:
        host = Host("echo")
        return await main(host, Line(lambda: None if host.is_over else (host, Echo()), "echo", Calm()))

    return clock.run(with_host())


def test_a_call_takes_its_time():
    async def main(host: Host, line: Line) -> tuple[str, float]:
        return await line.say("a"), asyncio.get_running_loop().time()

    assert on_virtual_time(main) == ("a", pytest.approx(1.0 + CALL_S))


def test_a_caller_learns_at_once_that_its_callee_died():
    async def main(host: Host, line: Line) -> float:
        asyncio.get_running_loop().call_later(0.5, host.end)
        with pytest.raises(PeerLost, match="echo is gone"):
            await line.say("a")
        assert not asyncio.current_task().cancelling()  # type: ignore[union-attr]
        with pytest.raises(PeerLost, match="cannot be reached"):
            await line.say("b")
        return asyncio.get_running_loop().time()

    assert on_virtual_time(main) == pytest.approx(0.5 + CALL_S)


def test_a_frozen_callee_answers_when_it_wakes():
    async def main(host: Host, line: Line) -> float:
        host.freeze()
        asyncio.get_running_loop().call_later(7.0, host.thaw)
        assert await line.say("a") == "a"
        return asyncio.get_running_loop().time()

    assert on_virtual_time(main) == pytest.approx(8.0)


def test_an_answer_over_a_line_that_was_cut_meanwhile_does_not_arrive():
    async def main(host: Host, line: Line) -> None:
        call = asyncio.ensure_future(line.say("a"))
        await asyncio.sleep(0.5)
        line.is_cut = True
        with pytest.raises(PeerLost, match="did not arrive"):
            await call

    on_virtual_time(main)


def test_a_caller_that_is_cancelled_stays_cancelled():
    async def main(host: Host, line: Line) -> None:
        call = asyncio.ensure_future(line.say("a"))
        await asyncio.sleep(0.5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    on_virtual_time(main)


def test_relays_show_a_version_in_chain_order_and_only_when_it_is_there():
    async def main() -> list[list[int | None]]:
        constants = calibration()
        relays = Relays([f"m{n}" for n in range(4)], 65.5e9, constants.links, keep_versions=2)
        running = asyncio.ensure_future(relays.run())
        await asyncio.sleep(0)
        seen = []
        stall_s = await relays.publish(1, {})
        assert stall_s == pytest.approx(65.5e9 / constants.links.learner_to_relay_bytes_per_s)
        arrivals = relays.arrival_s(4)
        assert arrivals == sorted(arrivals)
        for arrival_s in arrivals:
            await asyncio.sleep(max(0.0, arrival_s - asyncio.get_running_loop().time() + stall_s) + 1e-3)
            seen.append([relay.store.newest() for relay in relays.machines.values()])
        running.cancel()
        return seen

    seen = clock.run(main())
    assert seen[0] == [1, None, None, None]
    assert seen[-1] == [1, 1, 1, 1]
    assert [sum(version == 1 for version in row) for row in seen] == [1, 2, 3, 4]


def test_a_virtual_loop_names_a_deadlock():
    async def wait_for_nobody() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="deadlock"):
        clock.run(wait_for_nobody())
