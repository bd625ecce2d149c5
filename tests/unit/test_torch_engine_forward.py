"""The decoder computes what transformers computes, however the work is cut."""

import pytest
import torch
from torch_engine_kit import ask, joined, largest_error, random_prompt, reference_logprobs, run, runner_for, tiny_model

from laminar.schema.trajectories import Sampling

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("llama", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": LLAMA3_ROPE}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
    ("llama", {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "initializer_range": 0.05}),
    ("llama", {"vocab_size": 2500, "tie_word_embeddings": True, "hidden_size": 128, "initializer_range": 0.1}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("qwen3", {"head_dim": 16}),
]
"""The widest and the largest vocabulary take the path of matrices that do not fit the cache (`projection`)."""


def mixed_requests():
    """Prompts of many lengths, two groups, greedy and sampled."""
    lengths = (1, 2, 16, 17, 40, 40, 63, 100)
    requests = [ask(f"p{n}-{i}", random_prompt(n, n), seed=i, new=20 + i) for i, n in enumerate(lengths)]
    requests += [ask(f"g{i}", random_prompt(7, 33), group="g", seed=i, new=10 + 9 * i) for i in range(4)]
    requests += [ask("t", random_prompt(8, 9), sampling=Sampling(temperature=0.6))]
    requests += [ask("greedy", random_prompt(9, 9), sampling=Sampling(temperature=0.0))]
    return requests


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_logprobs_are_those_of_transformers(family, changes):
    model, requests = tiny_model(family, **changes), mixed_requests()
    outputs = run(runner_for(model), requests)
    assert largest_error(model, requests, outputs) < 1e-4
    greedy = next(request for request in requests if request.request_id == "greedy")
    best = reference_logprobs(model, greedy, outputs["greedy"]).argmax(-1)
    assert outputs["greedy"].token_ids == tuple(best.tolist())


@pytest.mark.parametrize("bounds", [{"prefill_chunk_tokens": 7}, {"prefill_chunk_tokens": 1}, {"page_tokens": 5}])
def test_chunks_and_pages_do_not_change_the_answer(bounds):
    model, requests = tiny_model(), mixed_requests()
    whole, cut = run(runner_for(model), requests), run(runner_for(model, **bounds), requests)
    for name, output in whole.items():
        assert cut[name].token_ids == output.token_ids
        assert cut[name].logprobs == pytest.approx(output.logprobs, abs=1e-4)


@pytest.mark.parametrize("bounds", [{}, {"max_running": 3}, {"prefill_chunk_tokens": 5}, {"kv_capacity_tokens": 144}])
def test_sharing_a_groups_prompt_does_not_change_the_answer(bounds):
    model = tiny_model()

    def group(num_shared):
        prompt = random_prompt(3, 37)
        requests = [ask(f"{i}", prompt, group="g", num_shared=num_shared, seed=i, new=24) for i in range(6)]
        # One member that already has an answer, as after a failure or a move.
        longer = ask("6", prompt + random_prompt(4, 9), group="g", num_shared=num_shared, seed=6, new=24)
        return [*requests, longer]

    shared, alone = run(runner_for(model, **bounds), group(37)), run(runner_for(model), group(0))
    for name, output in alone.items():
        assert shared[name].token_ids == output.token_ids
        assert shared[name].logprobs == pytest.approx(output.logprobs, abs=1e-4)


def test_preempted_requests_draw_what_they_would_have_drawn():
    model = tiny_model()
    requests = [ask(f"{i}", random_prompt(i, 20), seed=i, new=60) for i in range(10)]
    roomy, tight = runner_for(model), runner_for(model, kv_capacity_tokens=256)
    expected, got = run(roomy, requests), run(tight, requests)
    assert tight.load().num_preempted > 0
    assert {name: output.token_ids for name, output in got.items()} == {
        name: output.token_ids for name, output in expected.items()
    }
    assert largest_error(model, requests, got) < 1e-4


def test_pages_move_together_when_long_answers_outlive_short_ones():
    model = tiny_model()
    runner = runner_for(model, quantum_s=0.0)  # one iteration per run
    requests = [ask(f"{i}", random_prompt(i, 40), seed=i, new=90 if i > 13 else 4) for i in range(16)]
    runner.enqueue(requests)
    spans, collected = [], []
    while not runner.is_idle:
        runner.run()
        collected.extend(runner.collect())
        used = runner.load().kv_used_tokens // 16
        spans.append(runner.rows.span)
        assert spans[-1] - used <= max(18, spans[-1] / 3)
    assert max(spans) > 16 * 3
    answers = {request.request_id: joined(collected, request.request_id) for request in requests}
    assert largest_error(model, requests, answers) < 1e-4


def test_bfloat16_is_close_to_float32():
    model = tiny_model(initializer_range=0.05)
    requests = mixed_requests()
    outputs = run(runner_for(model, dtype="bfloat16"), requests)
    assert largest_error(model, requests, outputs) < 0.15


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.15)])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gpu_computes_the_same(family, dtype, tolerance):
    model, requests = tiny_model(family, initializer_range=0.05), mixed_requests()
    runner = runner_for(model, device="cuda", dtype=dtype, prefill_chunk_tokens=32)
    assert largest_error(model, requests, run(runner, requests)) < tolerance
