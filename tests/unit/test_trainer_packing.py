"""Plans of micro-batches and buckets, and what `build_sequences` and `pack` make of experience."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar.config.training import AlgorithmConfig
from laminar.schema.tokens import pack_ids, pack_logprobs
from laminar.schema.trajectories import Experience, ExperienceGroup, Piece, Prompt
from laminar.trainer.packing import pack, plan_buckets, plan_micro_batches
from laminar.trainer.sequences import TrainSequence, build_sequences

lengths = st.lists(st.integers(1, 400), max_size=120)


@given(lengths, st.integers(1, 900), st.integers(1, 4))
def test_every_sequence_is_in_exactly_one_micro_batch_and_the_budget_holds(num_tokens, budget, ranks):
    plan = plan_micro_batches(num_tokens, budget_tokens=budget, multiple_of=ranks)
    assert sorted(index for members in plan for index in members) == list(range(len(num_tokens)))
    assert len(plan) % ranks == 0
    assert sum(not members for members in plan) < ranks
    for members in plan:
        assert sum(num_tokens[index] for index in members) <= budget or len(members) == 1, (members, plan)
        assert [num_tokens[index] for index in members] == sorted((num_tokens[i] for i in members), reverse=True)


@given(lengths, st.integers(800, 2_000))
def test_micro_batches_differ_by_no_more_than_the_longest_sequence(num_tokens, budget):
    fill = [sum(num_tokens[i] for i in members) for members in plan_micro_batches(num_tokens, budget_tokens=budget)]
    assert not fill or max(fill) - min(fill) <= max(num_tokens)


@given(lengths, st.integers(400, 2_000))
def test_there_are_at_most_twice_as_many_micro_batches_as_tokens_ask_for(num_tokens, budget):
    plan = plan_micro_batches(num_tokens, budget_tokens=budget)
    assert len(plan) <= 2 * (sum(num_tokens) // budget + 1)


def test_ten_thousand_sequences_just_over_half_the_budget_are_planned_at_once():
    assert len(plan_micro_batches([513] * 10_000, budget_tokens=1_024)) == 10_000


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_buckets_cover_all_sequences_and_none_is_mostly_padding(num_tokens):
    num_tokens.sort(reverse=True)
    buckets = plan_buckets(num_tokens, min_fill=0.75)
    assert sum(bucket.num_sequences for bucket in buckets) == len(num_tokens)
    start = 0
    for bucket in buckets:
        members = num_tokens[start : start + bucket.num_sequences]
        assert bucket.max_tokens == members[0]
        assert members[-1] >= 0.75 * members[0]
        start += bucket.num_sequences


def piece(token_ids: list[int], logprobs: list[float], *, generated: bool = True, version: int = 3) -> Piece:
    return Piece(token_ids=pack_ids(token_ids), logprobs=pack_logprobs(logprobs), generated=generated, version=version)


def group_of(*answers: tuple[tuple[Piece, ...], float], group_id: str = "g") -> ExperienceGroup:
    members = tuple(
        Experience(
            trajectory_id=f"{group_id}-{index}",
            pieces=pieces,
            reward=reward,
            metrics={},
            stop_reason="stop",
            version=3,
            staleness=0,
        )
        for index, (pieces, reward) in enumerate(answers)
    )
    return ExperienceGroup(
        group_id=group_id, prompt=Prompt(prompt_id="p", token_ids=(7, 8), payload={}), members=members
    )


def test_only_drawn_tokens_are_trained_and_the_tail_after_them_is_cut():
    turns = (
        piece([1, 2], [-0.5, -0.25]),
        piece([3], [0.0], generated=False),
        piece([4], [-1.0]),
        piece([5, 6], [0.0, 0.0], generated=False),
    )
    (first, second) = build_sequences([group_of((turns, 1.0), ((piece([9], [-2.0]),), 0.0))], AlgorithmConfig())
    assert first.token_ids.tolist() == [7, 8, 1, 2, 3, 4]
    assert first.trained.tolist() == [False, False, True, True, False, True]
    assert first.behaviour_logprobs.tolist() == [0, 0, -0.5, -0.25, 0, -1]
    assert (first.num_inputs, first.num_trained, second.num_trained) == (5, 3, 1)
    assert first.advantage > 0 > second.advantage
    assert first.weight == second.weight == 0.25


def test_an_answer_without_a_drawn_token_counts_for_the_baseline_only():
    empty = ((), 0.0)
    sequences = build_sequences([group_of(((piece([1], [-1.0]),), 1.0), empty)], AlgorithmConfig(advantage="rloo"))
    assert [sequence.advantage for sequence in sequences] == [1.0]
    assert build_sequences([group_of(empty), group_of()], AlgorithmConfig()) == []


def test_sequence_mean_gives_every_answer_the_same_weight():
    answers = ((piece([1, 2, 3, 4], [-1.0] * 4), 1.0), (piece([5], [-1.0]),), 0.0)
    group = group_of(((answers[0][0],), 1.0), (answers[1], 0.0))
    sequences = build_sequences([group], AlgorithmConfig(loss="sequence_mean"))
    assert [sequence.weight * sequence.num_trained for sequence in sequences] == [0.5, 0.5]


def test_a_pack_says_which_token_predicts_which():
    def sequence(token_ids: list[int], num_context: int, advantage: float) -> TrainSequence:
        count = len(token_ids)
        return TrainSequence(
            group_id="g",
            token_ids=np.array(token_ids, np.int32),
            trained=np.arange(count) >= num_context,
            behaviour_logprobs=-np.arange(count, dtype=np.float32),
            advantage=advantage,
            weight=0.5,
        )

    batch = pack([sequence([10, 11, 12, 13], 2, 1.0), sequence([20, 21, 22], 1, -1.0)], "cpu")
    assert batch.input_ids_S.tolist() == [10, 11, 12, 20, 21]
    assert batch.position_ids_S.tolist() == [0, 1, 2, 0, 1]
    assert batch.predictors_T.tolist() == [1, 2, 3, 4]
    assert batch.targets_T.tolist() == [12, 13, 21, 22]
    assert batch.behaviour_logprobs_T.tolist() == [-2, -3, -1, -2]
    assert batch.advantages_T.tolist() == [1, 1, -1, -1]
    assert batch.weights_T.tolist() == [0.5] * 4
    assert len(set(batch.layout.places_S.tolist())) == 5
    assert batch.targets_T.dtype == torch.int64
