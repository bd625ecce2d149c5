"""Complete groups on their way to the trainer; which one is next is decided in `scheduling`.

Invariants: a group is in flight, ready, taken by one mini-batch of one step, or settled. A mini-batch that is asked for
again gets the groups that it got before. What a step took is ready again after a rewind to before it, in its old place.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct

from laminar.data.functions import load_function
from laminar.data.ledger import Group, Ledger
from laminar.data.ports import DataRules
from laminar.scheduling.eviction import EVICTIONS
from laminar.scheduling.sampling import SAMPLERS, ReadyGroup, SamplingRules, check_draw
from laminar.scheduling.schedules import groups_needed
from laminar.schema.errors import RunFailed, UserError
from laminar.schema.trajectories import Experience, ExperienceGroup

MIN_MEMBERS = 2
"""A group with fewer gradable members is dropped as a whole: an advantage compares answers, and one alone has nothing
to be compared with. Groups of one by configuration stay whole."""


class ReadyEntry(Struct, frozen=True, eq=False):
    """A complete group and what a sampler sees of it."""

    group: Group
    seen: ReadyGroup


class ExperienceBuffer:
    """From the first token of a group to the checkpoint that covers it."""

    def __init__(self, ledger: Ledger, rules: DataRules) -> None:
        self._ledger = ledger
        self._sampler_name = rules.sampler
        self._sampler = load_function("data.sampler", rules.sampler, SAMPLERS)
        self._sampling = SamplingRules(max_staleness=rules.max_staleness)
        self._eviction_name = rules.eviction
        self._eviction = load_function("data.eviction", rules.eviction, EVICTIONS)
        self._drops_incomplete = rules.incomplete_groups == "drop"
        self._schedule = rules.schedule
        self._groups_per_step = rules.groups_per_step
        self._in_flight: set[int] = set()
        self._ready: dict[str, ReadyEntry] = {}
        self._ready_in_order: list[ReadyGroup] | None = None
        self._takes: dict[tuple[int, int], list[Group]] = {}

    def restore(self) -> None:
        """Sort an earlier process's groups."""
        for group in self._ledger.groups.values():
            if group.row.purpose == "training":
                self._file(group)
        for groups in self._takes.values():
            groups.sort(key=lambda group: group.row.place or 0)

    @property
    def num_in_flight(self) -> int:
        """Groups that are not complete."""
        return len(self._in_flight)

    @property
    def num_ready(self) -> int:
        """Groups that wait for the trainer."""
        return len(self._ready)

    @property
    def num_taken(self) -> int:
        """Groups that steps took, for good or not."""
        for_good = self._ledger.trained_groups_by_step.total()
        return for_good + sum(len(groups) for groups in self._takes.values())

    def oldest_in_flight(self, holders: Callable[[Group], tuple[str, ...]]) -> tuple[str, tuple[str, ...]]:
        """The group that has waited longest for its members, in words, and who works on them."""
        if not self._in_flight:
            return "new prompts to be claimed", ("replica",)
        group = self._ledger.groups[min(self._in_flight)]
        num_left = len(group.in_state("waiting", "running"))
        what = f"{num_left} of {group.row.num_members} answers of group {group.row.group_id}"
        return what, holders(group) or ("replica",)

    def expect(self, group: Group) -> None:
        """A group was drawn."""
        self._in_flight.add(group.row.num)

    def member_done(self, group: Group) -> None:
        """A member was graded or dropped: the group may be complete."""
        if group.row.num not in self._in_flight or group.in_state("waiting", "running"):
            return
        self._in_flight.discard(group.row.num)
        graded = group.in_state("finished")
        num_members = group.row.num_members
        num_needed = num_members if self._drops_incomplete else min(MIN_MEMBERS, num_members)
        if len(graded) >= num_needed:
            completed = self._ledger.position.num_completed + 1
            self._ledger.advance(num_completed=completed)
            self._ledger.change_group(group, completed=completed, completed_s=self._ledger.now_s())
            self._make_ready(group)
        else:
            self._drop(group, f"only {len(graded)} of {num_members} members of the group could be graded")

    def taken(self, step: int, part: int) -> list[Group] | None:
        """What this mini-batch has drawn already."""
        return self._takes.get((step, part))

    def draw(self, step: int, part: int, num_groups: int) -> list[Group] | None:
        """Give groups to a mini-batch; None while the sampler finds too few."""
        committed = self._ledger.position.committed_step
        if step <= committed:
            raise RunFailed(
                f"step {step} asks for experience, but the checkpoint of step {committed} is durable already"
            )
        if (groups := self.taken(step, part)) is not None:
            return groups
        if self.num_ready < groups_needed(self._schedule, part, num_groups, self._groups_per_step):
            return None
        seen = self._seen()
        try:
            draw = self._sampler(seen, num_groups, self._ledger.position.learner_version, self._sampling)
            check_draw(draw, seen, num_groups)
        except ValueError as error:
            raise UserError(f"data.sampler {self._sampler_name}: {error}") from error
        self._drop_ready(draw.dropped)
        if not draw.picked:
            return None
        groups = [self._take_ready(group_id) for group_id in draw.picked]
        for place, group in enumerate(groups):
            now_s = self._ledger.now_s()
            self._ledger.change_group(group, step=step, part=part, place=place, taken_s=now_s)
            for member in group.in_state("finished"):
                self._ledger.move(member, "taken", step=step)
        self._takes[step, part] = groups
        return groups

    def evict(self, capacity: int) -> bool:
        """Let ready groups go for newer ones; whether any went."""
        evicted = self._eviction(self._seen(), capacity, self._ledger.position.learner_version)
        unknown = [group_id for group_id, _ in evicted if group_id not in self._ready]
        if unknown:
            raise UserError(f"data.eviction {self._eviction_name}: group {unknown[0]} is not ready")
        self._drop_ready(evicted)
        return bool(evicted)

    def commit(self, step: int) -> None:
        """What steps up to `step` took is trained for good."""
        for key in [key for key in self._takes if key[0] <= step]:
            for group in self._takes.pop(key):
                for member in group.in_state("taken"):
                    self._ledger.move(member, "trained")
                self._ledger.settle(group)
        self._ledger.advance(committed_step=max(step, self._ledger.position.committed_step))

    def rewind(self, step: int) -> None:
        """What steps after `step` took is ready again."""
        for key in [key for key in self._takes if key[0] > step]:
            for group in self._takes.pop(key):
                for member in group.in_state("taken"):
                    self._ledger.move(member, "finished", step=None)
                self._ledger.change_group(group, step=None, part=None, place=None, taken_s=None)
                self._make_ready(group)

    def drop_all(self, reason: str) -> None:
        """No more training: nothing that is graded and not taken will be trained."""
        for num in self._in_flight:
            self._drop(self._ledger.groups[num], reason)
        self._in_flight.clear()
        self._drop_ready([(group_id, reason) for group_id in self._ready])

    def staleness_mean(self, groups: Sequence[Group]) -> float:
        """Mean inherent staleness of the gradable members."""
        stalenesses = [t.row.staleness or 0 for group in groups for t in group.in_state("taken")]
        return sum(stalenesses) / len(stalenesses)

    def _file(self, group: Group) -> None:
        row = group.row
        if row.completed is None:
            self._in_flight.add(row.num)
        elif row.step is None or row.part is None:
            self._make_ready(group)
        else:
            self._takes.setdefault((row.step, row.part), []).append(group)

    def _seen(self) -> list[ReadyGroup]:
        """Ready groups in order of completion; every claim that waits for room asks, so they are sorted once."""
        if self._ready_in_order is None:
            self._ready_in_order = sorted((entry.seen for entry in self._ready.values()), key=_by_completion)
        return self._ready_in_order

    def _take_ready(self, group_id: str) -> Group:
        self._ready_in_order = None
        return self._ready.pop(group_id).group

    def _make_ready(self, group: Group) -> None:
        rows = [member.row for member in group.in_state("finished")]
        seen = ReadyGroup(
            group_id=group.row.group_id,
            version=min(row.version or 0 for row in rows),
            completed=group.row.completed or 0,
            rewards=tuple(row.reward or 0.0 for row in rows),
            position=group.row.position,
        )
        self._ready[seen.group_id] = ReadyEntry(group, seen)
        ordered = self._ready_in_order
        if ordered and ordered[-1].completed < seen.completed:
            ordered.append(seen)
        else:
            self._ready_in_order = None

    def _drop_ready(self, dropped: Sequence[tuple[str, str]]) -> None:
        for group_id, reason in dropped:
            self._drop(self._take_ready(group_id), reason)

    def _drop(self, group: Group, reason: str) -> None:
        for member in group.in_state("finished"):
            self._ledger.drop(member, reason)
        self._ledger.settle(group)


def _by_completion(seen: ReadyGroup) -> int:
    return seen.completed


def experience_group(group: Group) -> ExperienceGroup:
    """A taken group as the trainer gets it."""
    members = []
    for trajectory in group.in_state("taken"):
        row = trajectory.row
        assert row.reward is not None, "it finished"
        assert row.stop_reason is not None, "it finished"
        assert row.version is not None, "it finished"
        assert row.staleness is not None, "it finished"
        members.append(
            Experience(
                trajectory_id=row.trajectory_id,
                pieces=trajectory.response.pieces(),
                reward=row.reward,
                metrics=row.metrics,
                stop_reason=row.stop_reason,
                version=row.version,
                staleness=row.staleness,
            )
        )
    return ExperienceGroup(group_id=group.row.group_id, prompt=group.prompt, members=tuple(members))
