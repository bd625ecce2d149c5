"""What an iteration consumed and what its updates measured, in numbers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from laminar.schema.trajectories import ExperienceGroup, num_tokens


def batch_facts(groups: Sequence[ExperienceGroup], *, learner_version: int) -> dict[str, float]:
    """Rewards, lengths and ages of the trajectories of one iteration.

    staleness: inherent, as recorded when each trajectory finished. consumed_staleness: `learner_version`, that of the
    weights before the iteration, minus the version that generated. Metrics of the task are averaged over the
    trajectories that have them, as `task/NAME`.
    """
    answers = [(group.prompt, member) for group in groups for member in group.members]
    if not answers:
        return {"groups": len(groups), "trajectories": 0, "tokens": 0}
    response_tokens = [num_tokens(member.pieces) for _, member in answers]
    staleness = [member.staleness for _, member in answers]
    consumed = [learner_version - member.version for _, member in answers]
    return {
        "groups": len(groups),
        "trajectories": len(answers),
        "tokens": sum(response_tokens) + sum(len(prompt.token_ids) for prompt, _ in answers),
        "reward_mean": fmean(member.reward for _, member in answers),
        "response_tokens_mean": fmean(response_tokens),
        "response_tokens_max": max(response_tokens),
        "truncated_fraction": fmean(member.stop_reason == "length" for _, member in answers),
        "uniform_groups_fraction": fmean(len({member.reward for member in group.members}) <= 1 for group in groups),
        "staleness_mean": fmean(staleness),
        "staleness_max": max(staleness),
        "consumed_staleness_mean": fmean(consumed),
        "consumed_staleness_max": max(consumed),
    } | _task_metrics([member.metrics for _, member in answers])


def _task_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    values = defaultdict(list)
    for of_one in metrics:
        for name, value in of_one.items():
            values[f"task/{name}"].append(value)
    return {name: fmean(found) for name, found in values.items()}


TOTALS = ("sequences", "sequences_skipped", "trained_tokens")
"""Learner metrics that add up over the mini-batches of an iteration."""


def merge_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Learner metrics of one iteration: totals add up, `..._max` is the largest, everything else is averaged."""
    values = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            values[name].append(value)
    return {name: _merge(name, found) for name, found in values.items()}


def _merge(name: str, values: Sequence[float]) -> float:
    if name in TOTALS:
        return sum(values)
    return max(values) if name.endswith("_max") else fmean(values)
