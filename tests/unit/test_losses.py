"""The loss and its metrics against numbers worked out by hand."""

import math
import sys
import types

import pytest
import torch

from laminar.config.training import AlgorithmConfig
from laminar.schema.errors import UserError
from laminar.trainer.losses import (
    TokenBatch,
    TokenMetrics,
    clip,
    exp_difference,
    kl_k3,
    load_objective,
    weighted_loss,
    zero_advantage_is_idle,
)
from laminar.trainer.sequences import token_weights


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def token_batch(learner, behaviour, advantages, *, proximal=None, weights=None, reference=None) -> TokenBatch:
    count = len(learner)
    return TokenBatch(
        logprobs_T=learner,
        behaviour_logprobs_T=behaviour,
        proximal_logprobs_T=behaviour if proximal is None else proximal,
        advantages_T=advantages,
        weights_T=values(*[1 / count] * count) if weights is None else weights,
        reference_logprobs_T=reference,
    )


def unchanged(sums: torch.Tensor) -> torch.Tensor:
    return sums


def test_the_surrogate_is_clipped_on_the_side_of_the_advantage_only():
    rules = AlgorithmConfig(clip_low=0.2, clip_high=0.28)
    old = logs(0.4, 0.4, 0.4, 0.4, 0.4)
    new = logs(0.6, 0.2, 0.6, 0.2, 0.44)  # ratios 1.5, 0.5, 1.5, 0.5, 1.1
    advantages = values(1, 1, -1, -1, 2)
    # min(1.5, 1.28), min(0.5, 0.8), min(-1.5, -1.28), min(-0.5, -0.8), 2.2; negated
    expected = values(-1.28, -0.5, 1.5, 0.8, -2.2)
    torch.testing.assert_close(clip(new, old, old, advantages, rules), expected)


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_that_of_the_policy_gradient():
    new = logs(0.6, 0.4).requires_grad_()
    clip(new, logs(0.4, 0.4), logs(0.4, 0.4), values(1, 3), AlgorithmConfig()).sum().backward()
    torch.testing.assert_close(new.grad, values(0, -3))


def test_the_truncated_importance_weight_multiplies_the_surrogate_and_has_no_gradient():
    rules = AlgorithmConfig(proximal="recomputed", importance_cap=2.0)
    behaviour, proximal = logs(0.1, 0.4), logs(0.5, 0.2)  # weights min(5, 2) and 0.5
    new = proximal.clone().requires_grad_()
    loss = clip(new, behaviour, proximal, values(1, 1), rules)
    torch.testing.assert_close(loss.detach(), values(-2, -0.5))
    loss.sum().backward()
    torch.testing.assert_close(new.grad, values(-2, -0.5))


def test_a_log_prob_that_is_far_off_gives_a_finite_loss():
    far = torch.tensor([-1e4, 0.0])
    assert torch.isfinite(exp_difference(far, -far)).all()
    assert torch.isfinite(clip(far, far.flip(0), far.flip(0), torch.tensor([-1.0, 1.0]), AlgorithmConfig())).all()


def test_k3_is_zero_for_equal_policies_and_never_negative():
    assert kl_k3(logs(0.3), logs(0.3)).item() == 0
    # r = reference / pi = 2: 2 - 1 - ln 2
    assert kl_k3(logs(0.2), logs(0.4)).item() == pytest.approx(1 - math.log(2))


def test_k3_estimates_the_divergence_under_the_first_policy():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.2, 0.3])
    drawn = torch.multinomial(p, 200_000, replacement=True, generator=generator)
    exact = (p * (p / q).log()).sum()
    assert kl_k3(p.log()[drawn], q.log()[drawn]).mean().item() == pytest.approx(exact.item(), rel=0.02)


def test_token_mean_weighs_all_tokens_alike_and_sequence_mean_all_sequences():
    assert token_weights([1, 3], "token_mean") == [0.25, 0.25]
    assert token_weights([1, 3], "sequence_mean") == [0.5, 1 / 6]
    assert token_weights([], "sequence_mean") == []


def test_the_loss_is_the_weighted_sum_of_objective_and_kl():
    rules = AlgorithmConfig(kl_coefficient=0.5)
    same = logs(0.2, 0.2)
    tokens = token_batch(same, same, values(1, -2), weights=values(0.75, 0.25), reference=logs(0.4, 0.2))
    # 0.75 * (-1 + 0.5 * (1 - ln 2)) + 0.25 * 2
    assert weighted_loss(tokens, clip, rules).item() == pytest.approx(-0.25 + 0.375 * (1 - math.log(2)))


def test_metrics_are_those_of_all_tokens_however_they_were_split():
    rules = AlgorithmConfig()
    behaviour, learner = logs(0.4, 0.4, 0.4, 0.4), logs(0.6, 0.2, 0.4, 0.4)
    advantages = values(1, 1, -1, 0)
    whole, parts = TokenMetrics(), TokenMetrics()
    whole.add(token_batch(learner, behaviour, advantages), rules)
    for cut in (slice(0, 1), slice(1, 4)):
        parts.add(token_batch(learner[cut], behaviour[cut], advantages[cut]), rules)
    result = whole.result(unchanged, unchanged)
    assert parts.result(unchanged, unchanged) == pytest.approx(result)
    assert result["trained_tokens"] == 4
    assert result["ratio_mean"] == pytest.approx((1.5 + 0.5 + 1 + 1) / 4)
    assert result["ratio_max"] == pytest.approx(1.5)
    assert result["clip_fraction"] == 0.25  # only the first: above the bound with a positive advantage
    assert result["logprob_gap"] == pytest.approx((math.log(1.5) + math.log(2)) / 4)
    assert result["logprob_gap_max"] == pytest.approx(math.log(2))
    assert result["behaviour_kl"] == pytest.approx((0.5 - math.log(1.5) - 0.5 + math.log(2)) / 4)
    assert result["entropy"] == pytest.approx(-(math.log(0.6) + math.log(0.2) + 2 * math.log(0.4)) / 4)
    assert result["ess"] == pytest.approx(16 / (4 * (2.25 + 0.25 + 1 + 1)))
    assert "reference_kl" not in result


def test_no_tokens_no_metrics():
    assert TokenMetrics().result(unchanged, unchanged) == {}


def test_an_objective_of_the_user_is_found_by_its_dotted_path(monkeypatch):
    module = types.ModuleType("my_objectives")
    module.reinforce = lambda new, behaviour, proximal, advantages, rules: -new * advantages
    monkeypatch.setitem(sys.modules, "my_objectives", module)
    objective = load_objective("my_objectives:reinforce")
    rules = AlgorithmConfig(objective="my_objectives:reinforce")
    tokens = token_batch(values(-1, -2), values(0, 0), values(3, 1))
    assert weighted_loss(tokens, objective, rules).item() == 2.5
    assert not zero_advantage_is_idle(rules)


@pytest.mark.parametrize("name", ["clipp", "no_such_module:f", "math:no_such_function", ":f"])
def test_an_unknown_objective_is_one_sentence(name):
    with pytest.raises(UserError, match=r"trainer\.algorithm\.objective"):
        load_objective(name)


def test_an_objective_that_averages_is_refused():
    tokens = token_batch(values(-1, -2), values(0, 0), values(3, 1))
    with pytest.raises(UserError, match="one loss per token"):
        weighted_loss(tokens, lambda new, *_: new.mean(), AlgorithmConfig(objective="m:f"))


def test_tokens_without_advantage_are_idle_unless_a_kl_wants_them():
    assert zero_advantage_is_idle(AlgorithmConfig())
    assert not zero_advantage_is_idle(AlgorithmConfig(kl_coefficient=0.1))
