"""What every engine must do, whoever computes the tokens."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest
from engines_kit import Answers, EngineKit, ask, emulated_kit, finish_all, scripted_kit, torch_kit

from laminar.engines.protocol import Engine

Ready = Callable[..., Awaitable[Engine]]


@pytest.fixture(params=["scripted", "emulated", "torch"])
def kit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineKit:
    match request.param:
        case "scripted":
            return scripted_kit()
        case "emulated":
            return emulated_kit()
        case _:
            return torch_kit(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def ready(kit: EngineKit) -> AsyncIterator[Ready]:
    """Builds started engines that hold weights, and closes them."""
    engines: list[Engine] = []

    async def build(**options: int) -> Engine:
        engines.append(await kit.ready(**options))
        return engines[-1]

    yield build
    for engine in engines:
        await engine.close()


async def test_a_step_with_nothing_queued_returns_at_once(ready):
    engine = await ready()
    assert await asyncio.wait_for(engine.step(), timeout=1.0) == []
    assert await engine.abort() == []


async def test_answers_stream_until_the_length_limit(ready):
    engine = await ready()
    answers = await finish_all(engine, [ask("a", new=20), ask("b", new=7)])
    assert {name: (len(answer.token_ids), answer.finish) for name, answer in answers.items()} == {
        "a": (20, "length"),
        "b": (7, "length"),
    }
    assert answers["a"].num_reports > 1
    assert all(logprob <= 0.0 for logprob in answers["a"].logprobs)


async def test_a_stop_token_ends_the_answer_and_is_its_last_token(ready):
    engine = await ready()
    stops = tuple(range(0, 60, 3))
    answers = await finish_all(engine, [ask(f"r{i}", new=150, stops=stops) for i in range(6)])
    for answer in answers.values():
        assert answer.finish == "stop"
        assert [token in stops for token in answer.token_ids] == [False] * (len(answer.token_ids) - 1) + [True]


async def test_equal_seeds_draw_equal_tokens_and_other_seeds_others(ready):
    engine = await ready()
    first = await finish_all(engine, [ask("a"), ask("b")])
    again = await finish_all(engine, [ask("b"), ask("c"), ask("a")])
    assert again["a"].token_ids == first["a"].token_ids
    # What is computed together may change the last bits of a sum.
    assert again["a"].logprobs == pytest.approx(first["a"].logprobs, abs=1e-4)
    assert first["a"].token_ids != first["b"].token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_an_aborted_answer_continues_exactly_as_if_undisturbed(ready, temperature):
    engine = await ready()
    undisturbed = await finish_all(engine, [ask("a", new=30, temperature=temperature)])
    engine.submit([ask("a", new=30, temperature=temperature), ask("other")])
    answers = Answers()
    while not answers.get("a") or len(answers["a"].token_ids) < 9:
        answers.take(await engine.step())
    answers.take(await engine.abort(["a"]))
    kept = answers.pop("a")
    assert kept.finish == "aborted"
    assert 9 <= len(kept.token_ids) < 30

    rest = ask("a", answered=kept.token_ids, new=30 - len(kept.token_ids), temperature=temperature)
    continued = await finish_all(engine, [rest], answers)
    assert kept.token_ids + continued["a"].token_ids == undisturbed["a"].token_ids
    assert kept.logprobs + continued["a"].logprobs == pytest.approx(undisturbed["a"].logprobs, abs=1e-4)


async def test_abort_without_ids_stops_everything_and_frees_the_cache(ready):
    engine = await ready(max_running=2)
    engine.submit([ask(f"r{i}", new=100) for i in range(5)])
    await engine.step()
    outputs = await engine.abort()
    assert sorted((output.request_id, output.finish) for output in outputs) == [(f"r{i}", "aborted") for i in range(5)]
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.kv_used_tokens) == (0, 0, 0)


async def test_unknown_ids_are_ignored_by_abort(ready):
    engine = await ready()
    engine.submit([ask("a")])
    assert await engine.abort(["nobody"]) == []
    assert (await finish_all(engine))["a"].finish == "length"


async def test_weights_are_swapped_only_when_idle(ready, kit):
    engine = await ready()
    engine.submit([ask("a", new=50)])
    with pytest.raises(RuntimeError, match="idle"):
        await engine.load_weights(2, kit.weights(2))
    await engine.step()
    with pytest.raises(RuntimeError, match="idle"):
        await engine.load_weights(2, kit.weights(2))
    await engine.abort()
    await engine.load_weights(2, kit.weights(2))


async def test_nothing_computed_under_old_weights_is_reused(ready, kit):
    """The same groups before and after a swap: the second time as in an engine that never saw the old version."""

    def groups():
        return [ask(f"{g}{i}", group=g, prompt=range(5 + 13 * n)) for n, g in enumerate("abc") for i in range(4)]

    engine, fresh = await ready(version=1), await ready(version=2)
    old = await finish_all(engine, groups())
    engine.submit(groups())
    await engine.step()
    await engine.abort()
    await engine.load_weights(2, kit.weights(2))
    new, expected = await finish_all(engine, groups()), await finish_all(fresh, groups())
    assert new.token_ids() == expected.token_ids()
    assert new["a0"].logprobs == pytest.approx(expected["a0"].logprobs, abs=1e-5)
    assert all(new[name].token_ids != old[name].token_ids for name in new)


async def test_counters_tell_running_waiting_and_cache_use(ready):
    engine = await ready(max_running=3)
    engine.submit([ask(f"r{i}", new=30) for i in range(5)])
    assert engine.load().num_waiting == 5
    while engine.load().num_running < 3:
        await engine.step()
    load = engine.load()
    assert (load.num_running, load.num_waiting) == (3, 2)
    assert 3 * 11 <= load.kv_used_tokens <= load.kv_capacity_tokens
    await finish_all(engine)
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.kv_used_tokens, load.num_preempted) == (0, 0, 0, 0)


async def test_a_tiny_cache_preempts_and_still_draws_the_right_tokens(ready):
    requests = [ask(f"r{i}", prompt=range(i, i + 9), new=40) for i in range(8)]
    roomy, tiny = await ready(), await ready(kv_capacity_tokens=120)
    expected, got = await finish_all(roomy, requests), await finish_all(tiny, requests)
    assert tiny.load().num_preempted > 0
    assert roomy.load().num_preempted == 0
    assert got.token_ids() == expected.token_ids()


async def test_a_request_that_can_never_fit_is_refused_with_its_sizes(ready):
    engine = await ready(kv_capacity_tokens=64)
    with pytest.raises(ValueError, match=r"(?s)71.*64"):
        engine.submit([ask("fits"), ask("large", prompt=range(11), new=60)])
    assert engine.load().num_waiting == 0


async def test_requests_may_be_submitted_while_a_step_is_in_flight(ready):
    engine = await ready()
    engine.submit([ask("a", new=12)])
    answers = Answers()
    for late in "bcd":
        step = asyncio.create_task(engine.step())
        await asyncio.sleep(0)
        engine.submit([ask(late, new=12)])
        assert engine.load().num_waiting + engine.load().num_running >= 1
        answers.take(await step)
    await finish_all(engine, answers=answers)
    assert {name: len(answer.token_ids) for name, answer in answers.items()} == dict.fromkeys("abcd", 12)


async def test_a_cancelled_step_loses_no_token(ready):
    engine = await ready()
    expected = await finish_all(engine, [ask("a", new=25)])
    engine.submit([ask("a", new=25)])
    answers = Answers()
    for _ in range(10):
        step = asyncio.create_task(engine.step())
        await asyncio.sleep(0)
        step.cancel()
        with suppress(asyncio.CancelledError):
            answers.take(await step)
    await finish_all(engine, answers=answers)
    assert answers["a"].token_ids == expected["a"].token_ids
