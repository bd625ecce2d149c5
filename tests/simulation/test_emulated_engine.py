"""The emulated engine on virtual time: closed-form progress is what step by step decoding gives."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.engines.calibration import calibration, sources
from laminar.engines.emulated_batch import EmulatedBatch, Sequence
from laminar.engines.emulated_engine import EmulatedEngine
from laminar.engines.emulated_pace import Pace, kv_capacity_tokens, roofline_pace
from laminar.engines.protocol import Request
from laminar.engines.rules import EmulatedEngineRules
from laminar.engines.workloads import Fixed, LogNormal, Workload, mean, published_lengths, recorded, sandbox_latency
from laminar.scheduling.roofline import HARDWARE
from laminar.schema.trajectories import Sampling
from laminar.simulator import clock, paper

PACE = Pace(
    weights_s=4e-3,
    gemm_s_per_sequence=2e-4,
    layers_s=2e-3,
    per_sequence_s=1e-4,
    per_kv_token_s=2e-6,
    prefill_tokens_per_s=50_000.0,
)


def request(name: str, num_prompt: int, max_new: int, seed: int = 0) -> Request:
    return Request(
        request_id=name,
        group_id=name,
        token_ids=tuple(range(num_prompt)),
        num_shared=num_prompt,
        num_answered=0,
        max_new_tokens=max_new,
        stop_token_ids=(),
        sampling=Sampling(),
        seed=seed,
    )


def batch(pace: Pace = PACE, **bounds: int) -> EmulatedBatch:
    limits = {"max_running": 64, "kv_capacity_tokens": 100_000} | bounds
    return EmulatedBatch(EmulatedEngineRules(pace=pace, **limits))


def run_out(emulated: EmulatedBatch) -> dict[str, float]:
    """Let a batch go from event to event; returns when each sequence ended."""
    ends: dict[str, float] = {}
    while (next_s := emulated.next_event_s()) is not None:
        emulated.advance(next_s)
        ends |= {sequence.request.request_id: next_s for sequence in emulated.take_ended()}
    return ends


def step_by_step(lengths: list[tuple[int, int]], pace: Pace) -> dict[str, float]:
    """The same by adding up one decode step after the other, without a bound on the cache."""
    now_s = sum(prompt for prompt, _ in lengths) / pace.prefill_tokens_per_s
    running = {f"r{n}": [prompt, due] for n, (prompt, due) in enumerate(lengths)}
    ends = {}
    while running:
        kv_tokens = sum(tokens for tokens, _ in running.values())
        now_s += max(pace.floor_s, pace.step_s(len(running), kv_tokens))
        for name, state in list(running.items()):
            state[0] += 1
            state[1] -= 1
            if not state[1]:
                ends[name] = now_s
                del running[name]
    return ends


@pytest.mark.parametrize("floor_s", [0.0, 12e-3])
@given(lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 400)), min_size=1, max_size=12))
def test_closed_form_progress_equals_adding_up_steps(floor_s: float, lengths: list[tuple[int, int]]):
    pace = Pace(**{name: getattr(PACE, name) for name in PACE.__struct_fields__} | {"floor_s": floor_s})
    emulated = batch(pace)
    for number, (prompt, due) in enumerate(lengths):
        emulated.submit(Sequence(request(f"r{number}", prompt, due), due, None))
    emulated.advance(0.0)
    ends = run_out(emulated)
    # A step's time is that of the cache at its beginning; the integral takes the mean over the step.
    assert ends == pytest.approx(step_by_step(lengths, pace), rel=5e-3, abs=1e-4)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=20),
    capacity=st.integers(100, 300),
    looks=st.lists(st.floats(0.0, 2.0), max_size=20),
)
def test_a_small_cache_is_never_overfull_and_everything_ends(
    lengths: list[tuple[int, int]], capacity: int, looks: list[float]
):
    emulated = batch(kv_capacity_tokens=capacity, max_running=8)
    for number, (prompt, due) in enumerate(lengths):
        emulated.submit(Sequence(request(f"r{number}", prompt, due), due, None))
    emulated.advance(0.0)
    ended = []
    for look_s in sorted(looks):
        emulated.advance(look_s)
        assert 0 <= emulated.kv_used_tokens <= capacity
        assert emulated.num_running <= 8
        for sequence in emulated.running():
            assert 0 <= sequence.num_drawn <= sequence.num_due
        ended += [sequence.request.request_id for sequence in emulated.take_ended()]
    ended += list(run_out(emulated))
    assert sorted(ended) == sorted(f"r{number}" for number in range(len(lengths)))


def test_a_full_cache_pushes_the_newest_out_and_costs_its_prefill_again():
    roomy, tight = batch(), batch(kv_capacity_tokens=600)
    for emulated in (roomy, tight):
        for number in range(4):
            emulated.submit(Sequence(request(f"r{number}", 10, 200), 200, None))
        emulated.advance(0.0)
    free, crowded = run_out(roomy), run_out(tight)
    assert (roomy.num_preempted, tight.num_preempted > 0) == (0, True)
    assert crowded["r0"] < crowded["r3"]
    assert max(crowded.values()) > max(free.values())


def test_asking_often_changes_nothing():
    ends = []
    for looks in ([], [0.001 * n for n in range(3000)]):
        emulated = batch()
        for number in range(5):
            emulated.submit(Sequence(request(f"r{number}", 7, 40 * number + 9), 40 * number + 9, None))
        emulated.advance(0.0)
        seen = {}
        for look_s in looks:
            emulated.advance(look_s)
            seen |= {sequence.request.request_id: look_s for sequence in emulated.take_ended()}
        ends.append(seen | run_out(emulated))
    assert ends[1] == pytest.approx(ends[0], abs=2e-3)


def on_virtual_time(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return clock.run(main())


def test_a_step_ends_when_an_answer_does_and_costs_no_wall_time_per_token():
    async def main() -> tuple[float, int]:
        rules = EmulatedEngineRules(pace=PACE, max_running=4, kv_capacity_tokens=50_000, report_every_s=1e9)
        engine = EmulatedEngine(rules, Workload(tokens=Fixed(value=10_000)))
        await engine.load_weights(1, {})
        engine.submit([request("a", 4, 9_000)])
        num_steps = 0
        while engine.load().num_running + engine.load().num_waiting:
            outputs = await engine.step()
            num_steps += 1
        assert len(outputs[0].token_ids) == 9_000
        return asyncio.get_running_loop().time(), num_steps

    seconds, num_steps = on_virtual_time(main)
    assert seconds == pytest.approx(sum(PACE.step_s(1, 4 + n) for n in range(9_000)), rel=1e-3)
    assert num_steps <= 3


def test_the_pace_is_within_nine_percent_of_every_published_point():
    constants = calibration()
    for curve, points in paper.figures()["fig4_decode_ms_ctx4096"].items():
        model, _, parallel = curve.partition(" TP")
        pace = roofline_pace(
            constants.models[model],
            HARDWARE["H800"],
            constants.decode,
            tensor_parallel=int(parallel),
            sequence_s=constants.decode.sequence_s(model, int(parallel)),
        )
        for num, milliseconds in points.items():
            ours = 1e3 * pace.step_s(int(num), 4096.0 * int(num))
            assert ours == pytest.approx(milliseconds, rel=0.09), (curve, num)


def test_larger_parallelism_holds_more_kv_and_never_less_than_none():
    model, hardware = calibration().models["32B"], HARDWARE["H800"]
    capacities = [
        kv_capacity_tokens(model, hardware, tensor_parallel=n, memory_share=0.9, reserved_bytes=5e9) for n in (1, 4, 8)
    ]
    assert capacities[0] < capacities[1] < capacities[2]
    assert kv_capacity_tokens(model, hardware, tensor_parallel=1, memory_share=0.5, reserved_bytes=5e9) == 0


def test_every_constant_names_its_source():
    assert len(sources()) > 30
    assert all(constant.source for constant in sources().values())


def test_published_lengths_have_the_published_means():
    means = {name: mean(lengths) for name, lengths in published_lengths().items()}
    published = {"math-7B": 5533, "math-32B": 3325, "math-72B": 1026, "tool-7B": 1042, "aime": 2138}
    assert means == pytest.approx(published, rel=0.01)
    assert mean(sandbox_latency()) == pytest.approx(51.4, rel=0.01)


def test_a_lognormal_has_its_quantiles_and_its_cut():
    lengths = LogNormal(median=1000.0, p99_over_median=10.0, most=16_384.0)
    assert lengths.at(0.5) == pytest.approx(1000.0)
    assert lengths.at(0.99) == pytest.approx(10_000.0)
    assert lengths.at(0.9999999) == 16_384.0


def test_recorded_lengths_are_drawn_as_often_as_they_were_seen():
    lengths = recorded([100.0, 100.0, 100.0, 900.0])
    drawn = [lengths.at(random.Random(n).random()) for n in range(400)]
    assert min(drawn) == 100.0
    assert max(drawn) <= 900.0
    assert sum(value == 100.0 for value in drawn) > 200


def test_an_answer_taken_up_in_the_middle_of_a_turn_ends_where_it_would_have():
    workload = Workload(tokens=Fixed(value=600), tool_latency_s=Fixed(value=5), max_calls=3, reply_tokens=20)
    for seed in range(50):
        at, turns = 0, 0
        while True:
            turn = workload.turn(seed, at, 10)
            assert workload.turn(seed, (at + turn.end_ids) // 2, 10) == turn
            turns += 1
            if turn.is_last:
                break
            at = turn.end_ids + 2
        assert turns == workload.num_turns(seed)
        assert turn.end_ids == 60 + 2 * (turns - 1)
