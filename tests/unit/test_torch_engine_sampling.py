"""Draws follow the distribution, stay inside top-k and top-p, and do not depend on who else is in the batch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch_engine_kit import ask, random_prompt, run, runner_for, tiny_model

from laminar.engines.counter_hash import fold_seed, uniforms
from laminar.engines.sampler import RowSampling, draw, sample
from laminar.schema.trajectories import Sampling


def rows(num_rows: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> RowSampling:
    """The same sampling for every row."""
    return RowSampling(
        temperatures_N=torch.full((num_rows,), temperature),
        top_ps_N=torch.full((num_rows,), top_p),
        top_ks_N=torch.full((num_rows,), top_k),
        all_unit=temperature == 1.0,
        any_greedy=temperature == 0.0,
        any_filtered=top_p < 1.0 or top_k > 0,
    )


def numbers(count: int) -> torch.Tensor:
    return torch.from_numpy(uniforms(np.full(count, 5), np.arange(count)))


def counts(logits: torch.Tensor, num_draws: int, **sampling: Any) -> torch.Tensor:
    """How often each token is drawn from one row of logits."""
    tokens, _ = sample(logits.expand(num_draws, -1), numbers(num_draws), rows(num_draws, **sampling))
    return torch.bincount(tokens, minlength=len(logits)).double()


def chi_square_per_degree(observed: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * observed.sum()
    used = expected > 5
    return float(((observed - expected)[used] ** 2 / expected[used]).sum() / (used.sum() - 1))


def test_the_hash_is_splitmix64():
    # First two outputs of the reference generator seeded with 0; the stream of seed s starts at mix(s + increment).
    def reference(state: int) -> int:
        mask = 2**64 - 1
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
        return state ^ (state >> 31)

    increment = 0x9E3779B97F4A7C15
    assert reference(increment) == 0xE220A8397B1DCDAF
    for seed in (0, 1, -1, 2**63 - 1, 2**64 + 17):
        start = reference((seed + increment) % 2**64)
        expected = [(reference((start + (i + 1) * increment) % 2**64) >> 11) * 2.0**-53 for i in range(4)]
        assert uniforms(np.full(4, fold_seed(seed)), np.arange(4)).tolist() == expected


def test_uniforms_are_uniform_and_uncorrelated_between_neighbours():
    table = uniforms(np.repeat(np.arange(300), 300), np.tile(np.arange(300), 300)).reshape(300, 300)
    assert table.min() >= 0.0
    assert table.max() < 1.0
    histogram = np.histogram(table, bins=100, range=(0, 1))[0]
    assert (histogram - 900).std() < 2 * 900**0.5
    for neighbour in (table[1:], table[:, 1:].T):
        mine = table[:-1] if neighbour.shape[0] == 299 and neighbour.shape[1] == 300 else table[:, :-1].T
        assert abs(np.corrcoef(mine.ravel(), neighbour.ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("vocab", [64, 2047, 2500, 49_152])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies_match_the_distribution(vocab, temperature):
    logits = 2.0 * torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    num_draws = 20_000 if vocab < 10_000 else 2_000
    observed = counts(logits, num_draws, temperature=temperature)
    probabilities = (logits / temperature).softmax(-1)
    # Coarse cells, so that each expects enough draws even from a large vocabulary.
    cells = torch.arange(vocab) * 32 // vocab
    folded = [torch.zeros(32, dtype=torch.float64).index_add_(0, cells, x.double()) for x in (observed, probabilities)]
    assert chi_square_per_degree(*folded) < 2.0


def test_logprobs_are_those_before_top_k_and_top_p():
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(2))
    for sampling in ({"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.5}, {"top_k": 3}, {"temperature": 0.0}):
        tokens, logprobs = sample(logits, numbers(8), rows(8, **sampling))
        reference = torch.log_softmax(logits / (sampling.get("temperature", 1.0) or 1.0), -1)
        torch.testing.assert_close(logprobs, reference.gather(1, tokens[:, None]).squeeze(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("vocab", [40, 3000])
def test_top_k_draws_only_the_likeliest_in_proportion(vocab):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    observed = counts(logits, 4_000, top_k=5)
    best = logits.topk(5).indices
    assert observed[best].sum() == 4_000
    assert chi_square_per_degree(observed[best], logits[best].softmax(-1)) < 3.0


@pytest.mark.parametrize("vocab", [40, 3000])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_top_p_draws_from_the_smallest_set_that_reaches_p(vocab, scale):
    """The flat distribution needs more candidates than are looked at first."""
    logits = scale * torch.randn(vocab, generator=torch.Generator().manual_seed(4))
    probabilities, order = logits.softmax(-1).sort(descending=True)
    kept = int((probabilities.cumsum(-1) < 0.8).sum()) + 1
    observed = counts(logits, 4_000, top_p=0.8)
    assert observed[order[:kept]].sum() == 4_000
    assert observed[order[: kept // 2]].sum() > 0


def test_top_p_applies_to_what_top_k_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the two likeliest, 0.4 / 0.7 = 0.57 alone reaches 0.55.
    assert counts(logits, 500, top_k=2, top_p=0.55).nonzero().squeeze(1).tolist() == [0]
    assert counts(logits, 500, top_k=2, top_p=0.6).nonzero().squeeze(1).tolist() == [0, 1]


def test_a_token_without_weight_is_never_drawn():
    weights = torch.zeros(3, 5000)
    weights[:, 1777] = 1e-30
    weights[1, 3000] = 1.0
    for number in (0.0, 0.5, 1.0 - 2.0**-53):
        tokens = draw(weights, torch.full((3,), number, dtype=torch.float64))
        assert tokens.tolist() == [1777, 1777 if number == 0.0 else 3000, 1777]


def test_rows_of_every_kind_share_a_batch_without_touching_each_other():
    model = tiny_model()
    kinds = [
        Sampling(),
        Sampling(temperature=0.0),
        Sampling(temperature=0.5),
        Sampling(top_k=2),
        Sampling(top_p=0.4),
        Sampling(temperature=1.5, top_p=0.9, top_k=7),
    ]
    requests = [ask(f"{i}", random_prompt(i, 12), seed=i, new=30, sampling=kind) for i, kind in enumerate(kinds)]
    together = run(runner_for(model), requests)
    for request in requests:
        alone = run(runner_for(model), [request])
        assert alone[request.request_id].token_ids == together[request.request_id].token_ids


def test_a_model_that_computes_nan_is_an_error_that_names_the_version():
    model = tiny_model()
    runner = runner_for(model)
    runner.load_weights(7, {name: tensor * float("nan") for name, tensor in model.state_dict().items()})
    runner.enqueue([ask("a", [1, 2, 3])])
    with pytest.raises(RuntimeError, match="version 7"):
        runner.run()
