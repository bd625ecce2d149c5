import asyncio

from laminar.telemetry.events import MemoryEvents
from laminar.telemetry.vocabulary import ReplicaStarted, RunFinished, WaitEnded, WaitStarted, problem, to_facts
from laminar.telemetry.waits import Wait, Waits, closes, current_waits, longest_chain


def _wait(waiter: str, of: tuple[str, ...] = (), since: float = 0.0) -> Wait:
    return Wait(wait_id=f"{waiter}:{since}", waiter=waiter, what="it", of=of, since=since, deadline=since + 60)


def _waiters(*waits: Wait) -> list[str]:
    return [wait.waiter for wait in longest_chain(waits)]


async def test_a_short_wait_leaves_no_event():
    memory = MemoryEvents()
    with Waits("trainer", memory).on("3 groups"):
        await asyncio.sleep(0)
    assert memory.events == []


async def test_a_long_wait_is_announced_while_it_goes_on_and_then_ended():
    memory = MemoryEvents()
    waits = Waits("trainer", memory, announce_after_s=0.02)
    with waits.on("3 groups", of="data", deadline_s=60):
        await asyncio.sleep(0.06)
        assert [wait.what for wait in current_waits(to_facts(memory.events))] == ["3 groups"]
    assert current_waits(to_facts(memory.events)) == []
    begun, ended = memory.events
    assert [problem(event) for event in memory.events] == [None, None]
    assert begun["of"] == ["data"]
    assert begun["deadline_s"] == 60
    assert 0.02 <= begun["waited_s"] < ended["waited_s"]


async def test_an_error_inside_ends_the_wait_and_waits_may_overlap():
    memory = MemoryEvents()
    waits = Waits("replica-0", memory, announce_after_s=0.0)

    async def failing() -> None:
        with waits.on("room"):
            await asyncio.sleep(0.01)
            raise ValueError

    async def calm() -> None:
        with waits.on("weights", of=("relay",)):
            await asyncio.sleep(0.03)

    results = await asyncio.gather(failing(), calm(), return_exceptions=True)
    assert isinstance(results[0], ValueError)
    assert len(memory.of("wait_ended")) == 2
    assert len({event["wait_id"] for event in memory.events}) == 2


def test_the_longest_chain_follows_names_and_roles():
    trainer = _wait("trainer", ("data",), since=5)
    data = _wait("data", ("replica",), since=6)
    replica = _wait("replica-1", ("relay",), since=7)
    lonely = _wait("manager", since=1)
    assert _waiters(lonely, replica, data, trainer) == ["trainer", "data", "replica-1"]
    assert _waiters(lonely) == ["manager"]
    assert _waiters() == []
    assert not closes(longest_chain([trainer, data, replica]))


def test_a_circle_is_a_chain_that_closes():
    chain = longest_chain(
        [_wait("trainer", ("data",)), _wait("data", ("replica-0",)), _wait("replica-0", ("trainer",))]
    )
    assert len(chain) == 3
    assert closes(chain)


def test_a_thousand_replicas_that_wait_for_each_other_are_searched_quickly():
    waits = [_wait(f"replica-{i}", ("replica", "data"), since=i) for i in range(1_000)]
    assert _waiters(*waits, _wait("data", ("replica",)))[0] in ("data", "replica-0")


def test_who_dies_or_ends_waits_no_more():
    begun = WaitStarted(t=10, source="replica-0", wait_id="a", waiter="replica-0", what="room", waited_s=1.5)
    assert current_waits([begun])[0].since == 8.5
    assert current_waits([begun, ReplicaStarted(t=11, source="manager", replica_id="replica-0", incarnation=2)]) == []
    assert current_waits([begun, RunFinished(t=11, source="trainer", reason="done")]) == []
    assert current_waits([begun, WaitEnded(t=11, source="replica-0", wait_id="b", waiter="replica-0")]) != []
