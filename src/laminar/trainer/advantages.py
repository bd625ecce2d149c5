"""How the rewards of one group become one advantage per member.

Invariant: a group whose rewards are all equal, also a group of one, teaches nothing: its advantages are exactly 0.
Groups may have fewer members than `data.group_size`; every formula uses the members that are there.
"""

import math
from collections.abc import Callable, Sequence

STD_EPS = 1e-6
"""Added to the deviation of a group; that of verl and TRL, so that runs can be compared."""


def grpo(rewards: Sequence[float]) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6), with the sample deviation (n - 1). GRPO, arXiv 2402.03300."""
    centred = grpo_no_std(rewards)
    if not any(centred):
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(centred) - 1))
    return [value / (std + STD_EPS) for value in centred]


def grpo_no_std(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean(r). Dr.GRPO, arXiv 2503.20783: groups of little spread are not blown up."""
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean of the other members = n / (n - 1) * (r_i - mean(r)). RLOO, arXiv 2402.14740."""
    num_members = len(rewards)
    return [value * num_members / max(num_members - 1, 1) for value in grpo_no_std(rewards)]


ADVANTAGES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "grpo": grpo,
    "grpo_no_std": grpo_no_std,
    "rloo": rloo,
}
"""`trainer.algorithm.advantage`."""
