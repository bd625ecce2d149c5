"""A data shard against a simple model, over random operations, crashes and restarts, on a virtual clock.

The model knows of each trajectory who holds it under which attempt and what was streamed. It predicts every answer of
`stream`, `adopt` and `leases`, and all counts; what the shard is free to choose (which prompts, which groups) it takes
from the answer and checks for legality. After every operation the journal must audit clean.
"""

import asyncio
import copy
import dataclasses
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from laminar.data.audit import audit_rows
from laminar.data.experience_buffer import MIN_MEMBERS
from laminar.data.journal import MemoryJournal
from laminar.data.ports import DataRules
from laminar.data.rows import Row
from laminar.data.shard import DataShard
from laminar.schema.tokens import pack_ids, pack_logprobs
from laminar.schema.trajectories import (
    Append,
    Batch,
    Finish,
    Piece,
    Prompt,
    Scored,
    Unscorable,
    Update,
    response_ids,
    versions_of,
)
from laminar.simulator.clock import VirtualTimeLoop
from laminar.telemetry.events import MemoryEvents


class CountingJournal(MemoryJournal):
    """Knows how many operations were written and how many of them are durable."""

    num_written = 0

    def write(self, rows: tuple[Row, ...]) -> None:
        super().write(rows)
        self.num_written += 1

    @property
    def num_durable(self) -> int:
        return self.num_written - self.num_pending


class FewPrompts:
    """Some prompts are too long."""

    num_train = 5
    num_heldout = 3

    def prompt(self, split: str, index: int) -> Prompt:
        num_tokens = 9 if index == 2 else 2
        return Prompt(prompt_id=f"{split}-{index}", token_ids=(1,) * num_tokens, payload={"index": index})


@dataclasses.dataclass
class Trajectory:
    group_id: str
    purpose: str
    state: str = "waiting"
    attempt: int = 0
    lease: str = ""
    version: int | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    reward: float | None = None
    step: int | None = None
    data_failures: int = 0
    adopted_from: str = ""


@dataclasses.dataclass
class Model:
    trajectories: dict[str, Trajectory] = dataclasses.field(default_factory=dict)
    leases: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    ready: list[str] = dataclasses.field(default_factory=list)
    takes: dict[tuple[int, int], list[str]] = dataclasses.field(default_factory=dict)
    asked: set[int] = dataclasses.field(default_factory=set)
    learner: int = 0
    committed: int = 0

    def members(self, group_id: str) -> list[Trajectory]:
        return [t for t in self.trajectories.values() if t.group_id == group_id]

    def held(self, lease: str) -> dict[str, Trajectory]:
        return {i: t for i, t in self.trajectories.items() if t.state == "running" and t.lease == lease}

    def open_groups(self) -> set[str]:
        """Training groups that are not complete."""
        return {
            t.group_id
            for t in self.trajectories.values()
            if t.purpose == "training" and t.state in ("waiting", "running")
        }

    def start_over(self, trajectory: Trajectory) -> None:
        trajectory.state, trajectory.attempt = "waiting", trajectory.attempt + 1
        trajectory.tokens, trajectory.version, trajectory.adopted_from = [], None, ""


def token(trajectory_id: str, version: int, index: int) -> int:
    return (sum(trajectory_id.encode()) * 31 + version * 7 + index) % 1000


class ShardMachine(RuleBasedStateMachine):
    @initialize(
        sampler=st.sampled_from(["fifo", "freshest", "bounded_staleness"]),
        eviction=st.sampled_from(["none", "oldest_version"]),
        group_size=st.sampled_from([1, 2, 3]),
        total_groups=st.sampled_from([None, 12]),
    )
    def begin(self, sampler: str, eviction: str, group_size: int, total_groups: int | None) -> None:
        self.rules = DataRules(
            group_size=group_size,
            max_groups_ahead=4,
            max_prompt_tokens=5,
            data_failures=2,
            sampler=sampler,
            eviction=eviction,
            max_staleness=1 if sampler == "bounded_staleness" else None,
            total_groups=total_groups,
        )
        self.loop = VirtualTimeLoop()
        self.events = MemoryEvents(clock=self.loop.time)
        self.num_events_seen = 0
        self.num_leases = 0
        self.seeds: dict[str, int] = {}
        self.model = Model()
        self.journal = CountingJournal()
        self.snapshots: dict[int, Model] = {0: copy.deepcopy(self.model)}
        self.open()

    def open(self) -> None:
        async def build() -> DataShard:
            return DataShard(self.journal, FewPrompts(), self.rules, self.events)

        self.shard = self.run(build())

    def run(self, call: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(call, 1000))

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.run(self.shard.finish_run("over"))
            with self.journal.rows() as rows:
                report = audit_rows(rows)
            assert report.is_sound, report.problems
            assert not set(report.counts) & {"waiting", "running", "finished"}
            assert self.run(self.shard.claim("late", 99, 99, 1.0)) == Batch()
            self.loop.close()

    # ---- what happened, according to the events

    def see_drops(self) -> None:
        """Drops that the shard chose (eviction, staleness, too few members) are taken over, if they are legal."""
        events, self.num_events_seen = self.events.events[self.num_events_seen :], len(self.events.events)
        touched = set()
        for event in events:
            if event["kind"] != "dropped":
                continue
            t = self.model.trajectories.get(event["trajectory_id"])
            if t is None:
                assert "the prompt has 9 tokens" in event["reason"]
                group_id = event["trajectory_id"].rpartition("-")[0]
                purpose = "evaluation" if group_id.startswith("eval") else "training"
                t = self.model.trajectories[event["trajectory_id"]] = Trajectory(group_id, purpose)
            assert t.state in ("waiting", "running", "finished", "dropped"), (event, t)
            t.state = "dropped"
            touched.add(t.group_id)
        for group_id in touched:
            self.settle(group_id)

    def settle(self, group_id: str) -> None:
        """A member was graded or dropped."""
        members = self.model.members(group_id)
        states = [t.state for t in members]
        if members[0].purpose == "evaluation" or {"waiting", "running", "taken", "trained"} & set(states):
            return
        if "finished" in states:
            assert states.count("finished") >= min(MIN_MEMBERS, self.rules.group_size), states
            if group_id not in self.model.ready:
                self.model.ready.append(group_id)
        elif group_id in self.model.ready:
            self.model.ready.remove(group_id)

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.see_drops()
        stats = self.run(self.shard.stats())
        counts: dict[str, int] = {}
        for t in self.model.trajectories.values():
            counts[t.state] = counts.get(t.state, 0) + 1
        assert stats.counts == counts
        assert stats.num_ready_groups == len(self.model.ready)
        assert stats.num_in_flight_groups == len(self.model.open_groups())
        assert stats.learner_version == self.model.learner
        leases = {
            lease: (*about, len(self.model.held(lease)))
            for lease, about in self.model.leases.items()
            if self.model.held(lease)
        }
        seen = {le.lease_id: (le.version, le.purpose, le.num_unfinished) for le in self.run(self.shard.leases())}
        assert seen == leases
        with self.journal.after_crash(self.journal.num_pending).rows() as rows:
            report = audit_rows(rows)
        assert report.is_sound, report.problems
        assert report.counts == counts
        self.snapshots[self.journal.num_written] = copy.deepcopy(self.model)

    # ---- replicas

    @rule(behind=st.integers(0, 2), max_trajectories=st.sampled_from([1, 3, 6, 8]), wait_s=st.sampled_from([0.0, 5.0]))
    def claim(self, behind: int, max_trajectories: int, wait_s: float) -> None:
        version = max(0, self.model.learner - behind)
        self.num_leases += 1
        lease = f"lease-{self.num_leases}"
        before = self.loop.time()
        room = 4 - len(self.model.open_groups()) - len(self.model.ready)
        batch = self.run(self.shard.claim(lease, version, max_trajectories, wait_s))
        self.see_drops()
        assert self.loop.time() - before <= wait_s + 1e-6
        again = self.run(self.shard.claim(lease, version, max_trajectories, 0.0)) if batch.items else batch
        assert again == batch
        purpose = batch.items[0].purpose if batch.items else "training"
        if purpose == "training":
            assert len(batch.items) <= max_trajectories
            assert len(self.model.open_groups() | {i.group_id for i in batch.items}) <= 4
            if not batch.items and self.rules.total_groups is None and max_trajectories >= self.rules.group_size:
                assert room <= 0
        if batch.items:
            self.model.leases[lease] = (version, purpose)
        if purpose == "evaluation":
            self.redraw_evaluation(batch, version)
        self.take_over(lease, batch, version)

    def redraw_evaluation(self, batch: Batch, version: int) -> None:
        """Answers of another version than this claim's are void."""
        name = batch.items[0].group_id.partition("-")[0]
        members = [t for t in self.model.trajectories.values() if t.group_id.partition("-")[0] == name]
        assert not any(t.state == "running" for t in members)
        for t in members:
            if t.state == "evaluated" and t.version != version:
                t.attempt += 1
                t.state, t.tokens, t.version, t.reward = "waiting", [], None, None

    def take_over(self, lease: str, batch: Batch, version: int) -> None:
        for item in batch.items:
            t = self.model.trajectories.setdefault(item.trajectory_id, Trajectory(item.group_id, item.purpose))
            assert t.state == "waiting"
            if t.version != version:
                t.tokens, t.version = [], None
            assert (item.attempt, response_ids(item.pieces), item.version) == (t.attempt, t.tokens, t.version)
            assert item.prompt.prompt_id == item.group_id.partition("-")[2]
            assert self.seeds.setdefault(item.trajectory_id, item.seed) == item.seed
            t.state, t.lease, t.adopted_from = "running", lease, ""
        for group_id in {item.group_id for item in batch.items if item.purpose == "training"}:
            assert len(self.model.members(group_id)) == self.rules.group_size

    def lively_leases(self) -> list[str]:
        """Leases that hold something; if there are none, all that ever were."""
        lively = sorted({t.lease for t in self.model.trajectories.values() if t.state == "running"})
        return lively or sorted(self.model.leases)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(self.lively_leases()))
        version, purpose = self.model.leases[source]
        if data.draw(st.booleans()):
            self.num_leases += 1
            target = f"lease-{self.num_leases}"
        else:
            target = data.draw(st.sampled_from(sorted(self.model.leases)))
        under = data.draw(st.sampled_from([version, version, version + 1]))
        batch = self.run(self.shard.adopt(source, target, under))
        about = self.model.leases.get(target, (under, purpose))
        moved = {}
        if about[0] == under and source != target:
            held = self.model.held(source).items()
            pinned = {i for i, t in held if t.purpose == "evaluation" and under != version}
            moved = {i: t for i, t in held if t.version in (None, under) and i not in pinned}
        for t in moved.values():
            t.lease, t.attempt, t.adopted_from = target, t.attempt + 1, source
        if moved:
            self.model.leases[target] = about
        mine = {i: t for i, t in self.model.held(target).items() if t.adopted_from == source and about[0] == under}
        assert {i.trajectory_id: (i.attempt, response_ids(i.pieces), i.version) for i in batch.items} == {
            i: (t.attempt, t.tokens, t.version) for i, t in mine.items()
        }
        assert self.run(self.shard.adopt(source, target, under)) == batch

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def start_over(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.lively_leases()))
        self.run(self.shard.start_over(lease))
        for t in self.model.held(lease).values():
            if t.purpose == "training" or t.state == "running":
                self.model.start_over(t)
        self.run(self.shard.start_over(lease))

    @precondition(lambda self: self.model.trajectories and self.model.leases)
    @rule(data=st.data())
    def stream(self, data: st.DataObject) -> None:
        """Some of the updates are resent, late, of an old attempt or lease, or cannot be true."""
        lease = data.draw(st.sampled_from(sorted(self.model.leases)))
        held = sorted(self.model.held(lease)) or sorted(self.model.trajectories)
        num = data.draw(st.integers(1, 4))
        for trajectory_id in data.draw(st.lists(st.sampled_from(held), min_size=num, max_size=num)):
            self.stream_one(data, lease, trajectory_id)

    @precondition(lambda self: any(t.state == "running" for t in self.model.trajectories.values()))
    @rule(data=st.data(), share=st.sampled_from([0.5, 1.0, 1.0]))
    def work(self, data: st.DataObject, share: float) -> None:
        """A replica gets on: most of what it holds is answered and graded."""
        lease = data.draw(st.sampled_from(self.lively_leases()))
        held = sorted(self.model.held(lease))
        for trajectory_id in held[: max(1, int(share * len(held)))]:
            for kind in ("append", "finish"):
                self.stream_one(data, lease, trajectory_id, kind)

    def stream_one(self, data: st.DataObject, lease: str, trajectory_id: str, kind: str = "") -> None:
        t = self.model.trajectories[trajectory_id]
        is_late = not kind and data.draw(st.sampled_from([False, False, False, True]))
        attempt = max(0, t.attempt - is_late)
        is_holder = t.lease == lease and t.attempt == attempt and t.state != "waiting"
        is_known = t.state not in ("trained", "evaluated", "dropped")
        version = self.model.leases[lease][0]
        kind = kind or data.draw(st.sampled_from(["append", "resend", "gap", "differs", "foreign", "finish"]))
        if kind == "finish":
            update: Update = self.finish(data, trajectory_id, attempt)
        else:
            update = self.append(data, kind, trajectory_id, attempt, version)
        fenced = self.run(self.shard.stream(lease, (update,)))
        runs = t.state == "running"
        if is_holder and runs:
            is_refused = kind in ("gap", "foreign") or (kind == "differs" and len(t.tokens) > 0)
            assert fenced == ((trajectory_id,) if is_refused else ())
            self.apply(t, update, is_refused=is_refused)
            if kind == "append" or (isinstance(update, Finish) and t.state == "finished"):
                assert self.run(self.shard.stream(lease, (update,))) == ()
        elif not is_holder:
            assert fenced == (trajectory_id,)
        elif is_known:
            assert fenced == ()

    def append(self, data: st.DataObject, kind: str, trajectory_id: str, attempt: int, version: int) -> Append:
        known = len(self.model.trajectories[trajectory_id].tokens)
        num = data.draw(st.integers(1, 3))
        offset = known
        if kind in ("resend", "differs"):
            offset = data.draw(st.integers(0, known))
            offset = min(offset, max(0, known - 1))
        if kind == "gap":
            offset += 1
        drawn_by = version + 1 if kind == "foreign" else version
        ids = [token(trajectory_id, version, offset + i) + (kind == "differs" and known > 0) for i in range(num)]
        piece = Piece(token_ids=pack_ids(ids), logprobs=pack_logprobs([-0.5] * num), generated=True, version=drawn_by)
        return Append(trajectory_id=trajectory_id, attempt=attempt, offset=offset, pieces=(piece,))

    def finish(self, data: st.DataObject, trajectory_id: str, attempt: int) -> Finish:
        reward = data.draw(st.sampled_from([0.0, 1.0, 1.0, 1.0, float("nan"), None]))
        grade = Unscorable(reason="the sandbox broke") if reward is None else Scored(reward=reward)
        return Finish(trajectory_id=trajectory_id, attempt=attempt, stop_reason="stop", grade=grade)

    def apply(self, t: Trajectory, update: Update, *, is_refused: bool) -> None:
        version = self.model.leases[t.lease][0]
        match update:
            case Append():
                if is_refused:
                    if t.purpose == "training" or t.state == "running":
                        self.model.start_over(t)
                    return
                ids = response_ids(update.pieces)
                t.tokens += ids[max(0, len(t.tokens) - update.offset) :]
                t.version = version
            case Finish(grade=Scored(reward=reward)) if reward == reward:
                t.version, t.reward = version, reward
                t.state = "finished" if t.purpose == "training" else "evaluated"
                self.see_drops()
                self.settle_after_finish(t)
            case Finish():
                t.data_failures += 1
                if t.purpose == "training" and t.data_failures < 2:
                    self.model.start_over(t)
                else:
                    t.state = "dropped"
                    self.see_drops()
                    self.settle_after_finish(t)

    def settle_after_finish(self, t: Trajectory) -> None:
        if t.purpose == "training" and t.state != "dropped":
            self.settle(t.group_id)

    # ---- trainer

    @rule(
        ahead=st.integers(0, 1),
        part=st.integers(0, 1),
        num_groups=st.integers(1, 2),
        wait_s=st.sampled_from([0.0, 3.0]),
    )
    def sample(self, ahead: int, part: int, num_groups: int, wait_s: float) -> None:
        step = max([self.model.committed, *(step for step, _ in self.model.takes)]) + ahead
        if step <= self.model.committed:
            step = self.model.committed + 1
        self.model.learner = max(self.model.learner, step - 1)
        before = self.loop.time()
        groups = self.run(self.shard.sample(step, part, num_groups, wait_s))
        self.see_drops()
        assert self.loop.time() - before <= wait_s + 1e-6
        assert self.journal.num_pending == 0 or not groups
        if (step, part) in self.model.takes:
            assert [g.group_id for g in groups] == self.model.takes[step, part]
        elif groups:
            assert len(groups) == num_groups
            if self.rules.sampler == "fifo":
                assert [g.group_id for g in groups] == self.model.ready[:num_groups]
            self.model.takes[step, part] = [g.group_id for g in groups]
            for group in groups:
                self.model.ready.remove(group.group_id)
                for t in self.model.members(group.group_id):
                    if t.state == "finished":
                        t.state, t.step = "taken", step
        else:
            assert len(self.model.ready) < num_groups
        for group in groups:
            self.check_experience(group)

    def check_experience(self, group: Any) -> None:
        graded = {
            i: t for i, t in self.model.trajectories.items() if t.group_id == group.group_id and t.state == "taken"
        }
        assert {e.trajectory_id for e in group.members} == set(graded)
        for e in group.members:
            t = graded[e.trajectory_id]
            assert (response_ids(e.pieces), e.reward, e.version) == (t.tokens, t.reward, t.version)
            assert versions_of(e.pieces) <= {e.version}
            assert e.staleness >= 0

    @rule(back=st.integers(0, 1))
    def commit(self, back: int) -> None:
        step = max([self.model.committed, *(step for step, _ in self.model.takes)]) - back
        if step >= self.model.committed:
            self.run(self.shard.commit(step))
            self.committed(step)
            assert self.journal.num_pending == 0

    def committed(self, step: int) -> None:
        self.model.committed = step
        for key in [key for key in self.model.takes if key[0] <= step]:
            for group_id in self.model.takes.pop(key):
                for t in self.model.members(group_id):
                    t.state = "trained" if t.state == "taken" else t.state

    @rule(back=st.integers(0, 2))
    def rewind(self, back: int) -> None:
        last = max([self.model.committed, *(step for step, _ in self.model.takes)])
        step = max(self.model.committed, last - back)
        self.run(self.shard.rewind(step))
        self.go_back(step)
        self.run(self.shard.rewind(step))

    def go_back(self, step: int) -> None:
        self.model.learner = step
        for key in [key for key in self.model.takes if key[0] > step]:
            for group_id in self.model.takes.pop(key):
                self.model.ready.append(group_id)
                for t in self.model.members(group_id):
                    t.state, t.step = ("finished", None) if t.state == "taken" else (t.state, t.step)
        with self.journal.after_crash(self.journal.num_pending).rows() as rows:
            completed = {g.group_id: g.completed or 0 for g in rows.groups()}
        self.model.ready.sort(key=completed.__getitem__)
        self.see_drops()

    @rule(data=st.data(), max_trajectories=st.sampled_from([3, 6]), trains=st.booleans(), commits=st.booleans())
    def cycle(self, data: st.DataObject, max_trajectories: int, trains: bool, commits: bool) -> None:
        """What most of a run consists of; without it, few random walks would get as far as training."""
        self.claim(0, max_trajectories, 0.0)
        self.everything_adds_up()
        if any(t.state == "running" for t in self.model.trajectories.values()):
            self.work(data, 1.0)
            self.everything_adds_up()
        if trains:
            self.sample(1, 0, 1, 0.0)
            self.everything_adds_up()
        if commits:
            self.commit(0)

    # ---- evaluation

    @rule(ahead=st.integers(0, 1))
    def request_evaluation(self, ahead: int) -> None:
        version = self.model.learner + ahead
        known = {t.group_id for t in self.model.trajectories.values() if t.purpose == "evaluation"}
        self.run(self.shard.request_evaluation(version))
        with self.journal.after_crash(self.journal.num_pending).rows() as rows:
            for group in rows.groups():
                if group.purpose == "evaluation" and group.group_id not in known:
                    trajectory_id = f"{group.group_id}-0"
                    self.model.trajectories[trajectory_id] = Trajectory(group.group_id, "evaluation")
        self.see_drops()

    @rule()
    def evaluation(self) -> None:
        result = self.run(self.shard.evaluation(self.model.learner, 0.5))
        if result is not None:
            assert result.version >= result.asked_version
            name = f"eval{result.asked_version}"
            members = [
                t
                for t in self.model.trajectories.values()
                if t.group_id.partition("-")[0].partition(".")[0] == name and t.state == "evaluated"
            ]
            assert result.num <= len(members)

    # ---- crashes

    @rule(data=st.data(), resumes=st.booleans())
    def crash(self, data: st.DataObject, resumes: bool) -> None:
        durable, written = self.journal.num_durable, self.journal.num_written
        kept = data.draw(st.sampled_from([n for n in sorted(self.snapshots) if durable <= n <= written]))
        for num in range(kept - durable + 1):
            with self.journal.after_crash(num).rows() as rows:
                report = audit_rows(rows)
            assert report.is_sound, report.problems
        lost = self.journal.after_crash(kept - durable)
        self.journal = CountingJournal(lost._rows)
        self.model = copy.deepcopy(self.snapshots[kept])
        self.snapshots = {0: copy.deepcopy(self.model)}
        self.num_events_seen = len(self.events.events)
        self.open()
        if resumes:
            self.resume()

    def resume(self) -> None:
        """From the durable checkpoint, or one that was written and not yet reported."""
        last = max([self.model.committed, *(step for step, _ in self.model.takes)])
        self.run(self.shard.resume(last))
        self.committed(last)
        self.go_back(last)
        for t in self.model.trajectories.values():
            if t.state == "running":
                tokens, version = t.tokens, t.version
                self.model.start_over(t)
                if version == last:
                    t.tokens, t.version = tokens, version
            elif t.state == "waiting" and t.version != last:
                t.tokens, t.version = [], None
        self.model.leases.clear()
        for t in self.model.trajectories.values():
            t.lease = ""


TestDataShard = ShardMachine.TestCase
TestDataShard.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # Shrinking a failure takes minutes; add Phase.shrink to look at one.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
