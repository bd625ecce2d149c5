"""From experience to arrays: one sequence per trajectory, with everything that a loss may read.

Invariant: only tokens that the model drew are trained; prompt and environment tokens are context. What comes after the
last drawn token influences nothing and is cut off.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from laminar.config.training import AlgorithmConfig
from laminar.schema.trajectories import Experience, ExperienceGroup
from laminar.trainer.advantages import ADVANTAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """A prompt and its answer. The arrays are equally long; log-probs are those of the version that drew the token.

    `weight` is that of each trained token in the loss of the mini-batch: loss = sum of weight x loss of the token.
    """

    group_id: str
    token_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    advantage: float
    weight: float

    @property
    def num_inputs(self) -> int:
        """Tokens that go through the model; the last one is only predicted."""
        return len(self.token_ids) - 1

    @property
    def num_trained(self) -> int:
        return int(self.trained[1:].sum())


def build_sequences(groups: Iterable[ExperienceGroup], rules: AlgorithmConfig) -> list[TrainSequence]:
    """All answers of a mini-batch that hold at least one trained token, in the order of the groups."""
    advantage_of = ADVANTAGES[rules.advantage]
    found = []
    for group in groups:
        advantages = advantage_of([member.reward for member in group.members]) if group.members else []
        for member, advantage in zip(group.members, advantages, strict=True):
            arrays = _arrays(group.prompt.token_ids, member)
            if arrays[1][1:].any():
                found.append((group.group_id, advantage, arrays))
    weights = token_weights([int(trained[1:].sum()) for _, _, (_, trained, _) in found], rules.loss)
    return [
        TrainSequence(
            group_id=group_id,
            token_ids=token_ids,
            trained=trained,
            behaviour_logprobs=logprobs,
            advantage=advantage,
            weight=weight,
        )
        for (group_id, advantage, (token_ids, trained, logprobs)), weight in zip(found, weights, strict=True)
    ]


def token_weights(num_trained: Sequence[int], aggregation: str) -> list[float]:
    """Weight of one token of each sequence, so that weighted sums over any split of the mini-batch add up to its mean.

    token_mean: 1 / all trained tokens. sequence_mean: 1 / (sequences x trained tokens of this one).
    """
    if not num_trained:
        return []
    if aggregation == "token_mean":
        return [1.0 / sum(num_trained)] * len(num_trained)
    return [1.0 / (len(num_trained) * count) for count in num_trained]


Arrays = tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32]]


def _arrays(prompt_ids: Sequence[int], answer: Experience) -> Arrays:
    """Token ids, trained or not, and log-probs of prompt and answer up to the last drawn token."""
    pieces = list(answer.pieces)
    while pieces and not pieces[-1].generated:
        pieces.pop()
    prompt = np.asarray(prompt_ids, dtype=np.int32)
    token_ids = [prompt, *(np.frombuffer(piece.token_ids, dtype="<i4") for piece in pieces)]
    trained = [np.zeros(len(prompt), bool), *(np.full(piece.num_tokens, piece.generated) for piece in pieces)]
    logprobs = [np.zeros(len(prompt), np.float32), *(np.frombuffer(piece.logprobs, dtype="<f4") for piece in pieces)]
    return np.concatenate(token_ids), np.concatenate(trained), np.concatenate(logprobs)
