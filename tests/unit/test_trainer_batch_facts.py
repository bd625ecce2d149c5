"""Numbers about a batch, worked out by hand."""

import pytest

from laminar.schema.tokens import pack_ids, pack_logprobs
from laminar.schema.trajectories import Experience, ExperienceGroup, Piece, Prompt
from laminar.trainer.batch_facts import batch_facts, merge_metrics


def member(num_tokens: int, *, reward: float, version: int, staleness: int, stop_reason="stop") -> Experience:
    ids, logprobs = pack_ids([1] * num_tokens), pack_logprobs([-1.0] * num_tokens)
    return Experience(
        trajectory_id="t",
        pieces=(Piece(token_ids=ids, logprobs=logprobs, generated=True, version=version),),
        reward=reward,
        metrics={"correct": reward},
        stop_reason=stop_reason,
        version=version,
        staleness=staleness,
    )


def group(*members: Experience) -> ExperienceGroup:
    return ExperienceGroup(group_id="g", prompt=Prompt(prompt_id="p", token_ids=(1, 2, 3), payload={}), members=members)


def test_facts_are_over_the_trajectories_of_all_groups():
    groups = [
        group(member(4, reward=1, version=7, staleness=1), member(8, reward=0, version=7, staleness=2)),
        group(member(6, reward=1, version=9, staleness=0, stop_reason="length")),
    ]
    facts = batch_facts(groups, learner_version=10)
    assert facts == {
        "groups": 2,
        "trajectories": 3,
        "tokens": 18 + 9,
        "reward_mean": pytest.approx(2 / 3),
        "response_tokens_mean": 6,
        "response_tokens_max": 8,
        "truncated_fraction": pytest.approx(1 / 3),
        "uniform_groups_fraction": 0.5,
        "staleness_mean": 1,
        "staleness_max": 2,
        "consumed_staleness_mean": pytest.approx(7 / 3),
        "consumed_staleness_max": 3,
        "task/correct": pytest.approx(2 / 3),
    }


def test_a_batch_without_answers_has_no_means():
    assert batch_facts([group()], learner_version=1) == {"groups": 1, "trajectories": 0, "tokens": 0}


def test_metrics_of_mini_batches_are_averaged_added_up_or_the_largest():
    parts = [{"loss": 1.0, "ratio_max": 3.0, "trained_tokens": 5}, {"loss": 2.0, "ratio_max": 2.0, "trained_tokens": 6}]
    assert merge_metrics(parts) == {"loss": 1.5, "ratio_max": 3.0, "trained_tokens": 11}
