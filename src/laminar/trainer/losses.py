"""The loss of generated tokens, and what is worth knowing about them.

Invariant: a loss reads log-probs, advantages and weights that travel with the tokens, nothing else; it knows no
versions, groups or schedules. Sums over micro-batches add up to the loss of the mini-batch, because the weights were
fixed before the split (`sequences.token_weights`).

Axis: T generated tokens of one micro-batch, of all its sequences one after another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from laminar.config.training import AlgorithmConfig
from laminar.schema.errors import UserError

Reduction = Callable[[Tensor], Tensor]

MAX_LOG_RATIO = 20.0
"""Differences of log-probs are cut here before exp: e^20 is far outside any clip, e^89 is infinite in float32."""

Objective = Callable[[Tensor, Tensor, Tensor, Tensor, AlgorithmConfig], Tensor]
"""`(logprobs_T, behaviour_logprobs_T, proximal_logprobs_T, advantages_T, rules) -> loss_T`.

Log-probs are those of softmax(logits / temperature): of the learner now (the only ones with a gradient), of the version
that drew the token, and of the reference of the ratio (`trainer.algorithm.proximal`). `rules` is `trainer.algorithm`.
The loss is one number per token; weighing and summing is done outside.
"""


def clip(
    logprobs_T: Tensor,
    behaviour_logprobs_T: Tensor,
    proximal_logprobs_T: Tensor,
    advantages_T: Tensor,
    rules: AlgorithmConfig,
) -> Tensor:
    """PPO's clipped surrogate with two bounds (DAPO, arXiv 2503.14476), decoupled (arXiv 2110.00641).

    ratio = pi / pi_proximal;  loss = -w * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
    w = min(pi_proximal / pi_behaviour, importance_cap) with `proximal: recomputed`, else 1.
    """
    ratio_T = exp_difference(logprobs_T, proximal_logprobs_T)
    clipped_T = ratio_T.clamp(1 - rules.clip_low, 1 + rules.clip_high)
    surrogate_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    if rules.proximal == "behaviour":
        return -surrogate_T
    importance_T = exp_difference(proximal_logprobs_T, behaviour_logprobs_T).clamp(max=rules.importance_cap)
    return -importance_T * surrogate_T


OBJECTIVES: dict[str, Objective] = {"clip": clip}
"""`trainer.algorithm.objective`, besides dotted paths."""


def load_objective(name: str) -> Objective:
    """One of `OBJECTIVES`, or the function behind `module:function`."""
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    module_name, _, function_name = name.partition(":")
    try:
        objective: Objective = vars(import_module(module_name))[function_name]
    except (ImportError, KeyError, ValueError) as error:
        raise UserError(
            f"trainer.algorithm.objective is {name!r}, which is neither {', '.join(OBJECTIVES)} nor an importable "
            f"module:function ({error!r})"
        ) from error
    return objective


def zero_advantage_is_idle(rules: AlgorithmConfig) -> bool:
    """Whether tokens whose advantage is exactly 0 add nothing to loss and gradient, so that they need no forward."""
    return rules.objective == "clip" and rules.kl_coefficient == 0


def exp_difference(logprobs_T: Tensor, other_logprobs_T: Tensor) -> Tensor:
    """Ratio of two probabilities, finite whatever they are."""
    return (logprobs_T - other_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_k3(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """KL(pi || reference) per token drawn from pi: r - 1 - log r with r = reference / pi. Never negative, low variance.

    Estimator k3 of http://joschu.net/blog/kl-approx.html.
    """
    log_ratio_T = (reference_logprobs_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio_T.exp() - 1 - log_ratio_T


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """All that a loss reads about the generated tokens of one micro-batch. `reference_logprobs_T` only with KL."""

    logprobs_T: Tensor
    behaviour_logprobs_T: Tensor
    proximal_logprobs_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    reference_logprobs_T: Tensor | None = None


def weighted_loss(tokens: TokenBatch, objective: Objective, rules: AlgorithmConfig) -> Tensor:
    """This micro-batch's part of the mini-batch loss: sum of weight x (objective + kl_coefficient x KL)."""
    loss_T = objective(
        tokens.logprobs_T, tokens.behaviour_logprobs_T, tokens.proximal_logprobs_T, tokens.advantages_T, rules
    )
    if loss_T.shape != tokens.logprobs_T.shape:
        raise UserError(
            f"trainer.algorithm.objective {rules.objective} returned shape {tuple(loss_T.shape)} for "
            f"{len(tokens.logprobs_T)} tokens; it must return one loss per token"
        )
    if tokens.reference_logprobs_T is not None:
        loss_T = loss_T + rules.kl_coefficient * kl_k3(tokens.logprobs_T, tokens.reference_logprobs_T)
    return (tokens.weights_T * loss_T).sum()


class TokenMetrics:
    """Metrics over all tokens that went through the model in a mini-batch; kept on the device until `result`.

    ratio: learner / proximal. behaviour_kl: k3 estimate of KL(behaviour || learner). entropy: mean of -log-prob of the
    tokens drawn. logprob_gap: mean |learner - behaviour|. ess: effective sample size of the untruncated importance
    weights w = learner / behaviour, as a share of the tokens: (sum w)^2 / (n sum w^2). reference_kl: with a reference.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, tokens: TokenBatch, rules: AlgorithmConfig) -> None:
        logprobs_T = tokens.logprobs_T.detach()
        ratio_T = exp_difference(logprobs_T, tokens.proximal_logprobs_T)
        importance_T = exp_difference(logprobs_T, tokens.behaviour_logprobs_T)
        gap_T = (logprobs_T - tokens.behaviour_logprobs_T).abs()
        columns = {
            "count": torch.ones_like(ratio_T),
            "importance": importance_T,
            "importance_squared": importance_T.square(),
            "ratio_mean": ratio_T,
            "clip_fraction": _is_clipped(ratio_T, tokens.advantages_T, rules).float(),
            "behaviour_kl": kl_k3(tokens.behaviour_logprobs_T, logprobs_T),
            "entropy": -logprobs_T,
            "logprob_gap": gap_T,
        }
        if tokens.reference_logprobs_T is not None:
            columns["reference_kl"] = kl_k3(logprobs_T, tokens.reference_logprobs_T)
        for name, column_T in columns.items():
            self._sums[name] = self._sums.get(name, 0) + column_T.double().sum()
        for name, column_T in {"ratio_max": ratio_T, "logprob_gap_max": gap_T}.items():
            largest = column_T.max().double()
            self._maxima[name] = torch.maximum(self._maxima.get(name, largest), largest)

    def result(self, combine_sums: Reduction, combine_maxima: Reduction) -> dict[str, float]:
        """One number each; empty if no token went through the model. The arguments combine the ranks of a learner."""
        if not self._sums:
            return {}
        sums = dict(zip(self._sums, combine_sums(torch.stack(list(self._sums.values()))).tolist(), strict=True))
        maxima = dict(zip(self._maxima, combine_maxima(torch.stack(list(self._maxima.values()))).tolist(), strict=True))
        count, weight, square = (sums.pop(name) for name in ("count", "importance", "importance_squared"))
        means = {name: value / count for name, value in sums.items()}
        return means | maxima | {"ess": weight * weight / (count * square), "trained_tokens": count}


def _is_clipped(ratio_T: Tensor, advantages_T: Tensor, rules: AlgorithmConfig) -> Tensor:
    """Where the bound of the ratio stops the gradient."""
    above_T = (advantages_T > 0) & (ratio_T > 1 + rules.clip_high)
    below_T = (advantages_T < 0) & (ratio_T < 1 - rules.clip_low)
    return above_T | below_T
