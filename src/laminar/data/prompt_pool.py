"""What is to be answered next: trajectories that came back, then new prompts in the order of `scheduling.order`.

Invariant: position p of the order is drawn once in the life of a run, and what was drawn comes back until it is
settled; so no crash and no restart skips or repeats a prompt.
"""

from collections.abc import Sequence

from laminar.data.ledger import Group, Ledger, Trajectory
from laminar.data.ports import DataRules, Prompts
from laminar.scheduling.order import prompt_at
from laminar.scheduling.schedules import only_version
from laminar.schema.errors import UserError


class PromptPool:
    """Training prompts; the whole state of the order is the ledger's cursor."""

    def __init__(self, ledger: Ledger, prompts: Prompts, rules: DataRules) -> None:
        self._ledger = ledger
        self._prompts = prompts
        self._rules = rules
        self._num_too_long_in_a_row = 0
        self._returned: dict[int, Group] = {}

    def restore(self) -> None:
        """Find what waits in an earlier process's groups."""
        for group in self._ledger.groups.values():
            self.returned(group)

    def returned(self, group: Group) -> None:
        """Members of this group may wait to be claimed again."""
        if group.row.purpose == "training" and group.in_state("waiting"):
            self._returned[group.row.num] = group

    def num_returned(self, version: int) -> int:
        """Trajectories that wait and may be claimed at `version`."""
        return sum(len(self._claimable(group, version)) for group in self._returned.values())

    def take_returned(self, version: int, max_trajectories: int) -> list[Trajectory]:
        """Up to so many of them, oldest groups first; a group is split only if nothing else would be taken."""
        taken: list[Trajectory] = []
        for num in sorted(self._returned):
            group = self._returned[num]
            if not group.in_state("waiting"):
                del self._returned[num]
                continue
            claimable = self._claimable(group, version)
            if len(taken) + len(claimable) <= max_trajectories:
                taken += claimable
        if not taken:
            rest = (t for num in sorted(self._returned) for t in self._claimable(self._returned[num], version))
            taken = [t for t, _ in zip(rest, range(max_trajectories), strict=False)]
        return taken

    def draw(self, num_groups: int) -> list[Group]:
        """New groups. Raises `UserError` if no prompt of the task is short enough."""
        groups: list[Group] = []
        while len(groups) < num_groups:
            if self._num_too_long_in_a_row >= self._prompts.num_train:
                if groups:
                    break
                most = self._rules.max_prompt_tokens
                raise UserError(f"every prompt of the task is longer than data.max_prompt_tokens = {most}")
            group = self._draw_one()
            num_tokens, most = len(group.prompt.token_ids), self._rules.max_prompt_tokens
            if num_tokens <= most:
                self._num_too_long_in_a_row = 0
                groups.append(group)
            else:
                self._num_too_long_in_a_row += 1
                for member in group.members:
                    self._ledger.drop(member, too_long(num_tokens, most))
                self._ledger.settle(group)
        return groups

    def _claimable(self, group: Group, version: int) -> Sequence[Trajectory]:
        """Waiting members, but for those whose kept tokens are newer than the claim.

        Tokens of an older version than the claim are given up: nobody loads that version any more.
        """
        if self._rules.deterministic and self._only_version(group) != version:
            return []
        return [t for t in group.in_state("waiting") if t.response.version is None or t.response.version <= version]

    def _only_version(self, group: Group) -> int:
        """Groups that are settled and were trained come before all others."""
        position = group.row.position
        before = sum(
            other.row.purpose == "training" and other.row.position < position for other in self._ledger.groups.values()
        )
        return only_version(self._ledger.trained_groups_by_step.total() + before, self._rules.groups_per_step)

    def _draw_one(self) -> Group:
        position = self._ledger.position.cursor
        epoch, index = prompt_at(position, self._prompts.num_train, self._rules.seed, self._rules.shuffle)
        self._ledger.advance(cursor=position + 1)
        prompt = self._prompts.prompt("train", index)
        return self._ledger.issue(
            f"{epoch}-{prompt.prompt_id}",
            prompt,
            prompt_index=index,
            position=position,
            num_members=self._rules.group_size,
            purpose="training",
        )


def too_long(num_tokens: int, most: int) -> str:
    """Why a prompt is not used."""
    return f"the prompt has {num_tokens} tokens, data.max_prompt_tokens is {most}"
