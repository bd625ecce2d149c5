"""The audit finds what is wrong with a journal, and tells what became of each trajectory."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from laminar.data.audit import audit, audit_rows, describe_prompt, describe_trajectory, dropped
from laminar.data.journal import Journal, MemoryJournal
from laminar.data.ports import DataRules
from laminar.data.rows import ForgetTokens, PieceRow, Row, TrajectoryRow
from laminar.data.shard import DataShard
from laminar.data.sqlite_journal import SqliteJournal
from laminar.schema.errors import UserError
from laminar.schema.tokens import pack_ids, pack_logprobs
from laminar.schema.trajectories import Append, Finish, Grade, Piece, Prompt, Scored, Unscorable, WorkItem
from laminar.telemetry.events import NullEvents


class Prompts:
    num_train = 10
    num_heldout = 2

    def prompt(self, split: str, index: int) -> Prompt:
        return Prompt(prompt_id=f"{split}{index}", token_ids=(1,), payload={})


def piece(num_tokens: int, version: int = 1) -> Piece:
    ids, logprobs = pack_ids(range(num_tokens)), pack_logprobs([0.0] * num_tokens)
    return Piece(token_ids=ids, logprobs=logprobs, generated=True, version=version)


async def answer(shard: DataShard, lease: str, item: WorkItem, num_tokens: int, grade: Grade) -> None:
    new = Append(trajectory_id=item.trajectory_id, attempt=item.attempt, offset=0, pieces=(piece(num_tokens),))
    finish = Finish(trajectory_id=item.trajectory_id, attempt=item.attempt, stop_reason="stop", grade=grade)
    assert await shard.stream(lease, (new, finish)) == ()


async def play(journal: Journal) -> None:
    """Groups 0 and 1 are trained but for one member, group 2 is taken, 3 is complete, 4 runs, after a hand-over."""
    rules = DataRules(group_size=3, max_groups_ahead=9, shuffle=False, data_failures=1)
    shard = DataShard(journal, Prompts(), rules, NullEvents())
    await shard.request_evaluation(0)
    for item in (await shard.claim("e", 1, 9, 0.0)).items:
        await answer(shard, "e", item, 2, Scored(reward=1.0))
    items = (await shard.claim("a", 1, 15, 0.0)).items
    for n, item in enumerate(items[:12]):
        grade = Unscorable(reason="no sandbox") if n == 1 else Scored(reward=n / 10, metrics={"n": n})
        await answer(shard, "a", item, 10 + n, grade)
    await shard.sample(1, 0, 2, 0.0)
    await shard.sample(2, 0, 1, 0.0)
    await shard.commit(1)
    await shard.stream("a", (Append(trajectory_id=items[12].trajectory_id, attempt=0, offset=0, pieces=(piece(4),)),))
    await shard.adopt("a", "b", 1)


async def test_a_sound_journal_has_no_problems_and_its_numbers_add_up():
    journal = MemoryJournal()
    await play(journal)
    with journal.rows() as rows:
        report = audit_rows(rows)
    assert report.is_sound, report.problems
    assert report.num_issued == 17 == sum(report.counts.values())
    assert report.counts == {"evaluated": 2, "trained": 5, "dropped": 1, "taken": 3, "finished": 3, "running": 3}
    assert report.drop_reasons == {"1 data failures, the last one: no sandbox": 1}
    assert (report.trained.num, report.trained.mean_tokens, report.dropped.mean_tokens) == (5, 12.8, 11.0)
    assert sum(report.dropped.prompts.values()) == report.dropped.num
    assert report.dropped.num_prompts == len(report.dropped.prompts) > 0
    assert report.trained.mean_reward == pytest.approx(1.4 / 5)
    assert report.dropped.mean_reward is None


def trajectory(num: int, **changes: object) -> Callable[[MemoryJournal], tuple[Row, ...]]:
    def corrupt(journal: MemoryJournal) -> tuple[Row, ...]:
        with journal.rows() as rows:
            (row,) = rows.trajectories(within=range(num, num + 1))
        return (structs.replace(row, **changes),)

    return corrupt


def group(num: int, **changes: object) -> Callable[[MemoryJournal], tuple[Row, ...]]:
    def corrupt(journal: MemoryJournal) -> tuple[Row, ...]:
        with journal.rows() as rows:
            (row,) = [row for row in rows.groups() if row.num == num]
        return (structs.replace(row, **changes),)

    return corrupt


def position(**changes: object) -> Callable[[MemoryJournal], tuple[Row, ...]]:
    def corrupt(journal: MemoryJournal) -> tuple[Row, ...]:
        with journal.rows() as rows:
            return (structs.replace(rows.position(), **changes),)

    return corrupt


def stint(num: int, attempt: int, **changes: object) -> Callable[[MemoryJournal], tuple[Row, ...]]:
    def corrupt(journal: MemoryJournal) -> tuple[Row, ...]:
        with journal.rows() as rows:
            (row,) = [row for row in rows.stints(within=range(num, num + 1)) if row.attempt == attempt]
        return (structs.replace(row, **changes),)

    return corrupt


def lease(lease_id: str, **changes: object) -> Callable[[MemoryJournal], tuple[Row, ...]]:
    def corrupt(journal: MemoryJournal) -> tuple[Row, ...]:
        with journal.rows() as rows:
            (row,) = [row for row in rows.leases() if row.lease_id == lease_id]
        return (structs.replace(row, **changes),)

    return corrupt


def extra(*rows: Row) -> Callable[[MemoryJournal], tuple[Row, ...]]:
    return lambda journal: rows


LOOSE = TrajectoryRow(num=18, trajectory_id="x", group=6, member=3, state="waiting", issued_s=0.0)


# Numbers 1 and 2 are evaluated, 3 to 8 trained (4 dropped), 9 to 11 taken, 12 to 14 finished, 15 to 17 run.
@pytest.mark.parametrize(
    ("corrupt", "sentence"),
    [
        (trajectory(5, state="waiting"), "is settled, but has members that are waiting"),
        (trajectory(12, state="trained", step=3, settled_s=1.0), "only dropped, finished go together"),
        (trajectory(15, state="taken", step=2), "has members that are taken"),
        (trajectory(9, step=7), "is of step 7, its group of step 2"),
        (trajectory(4, reason=None), "was dropped without a reason"),
        (trajectory(3, settled_s=None), "has no time of settlement"),
        (trajectory(3, staleness=2), "has staleness 2, but version 1 finished at 0"),
        (trajectory(3, reward=None), "lacks its reward"),
        (trajectory(3, version=2, learner_version=2), "has version 2, but its last attempt had another one"),
        (trajectory(12, group=1), "belongs to another group"),
        (trajectory(12, member=2), "are not the trajectories that were issued for it"),
        (trajectory(3, state="evaluated"), "is for training, but was evaluated"),
        (trajectory(15, lease=None), "runs in no lease"),
        (trajectory(12, num_tokens=99), "has 99 tokens, but 19 are kept"),
        (extra(LOOSE), "there are 1 trajectories without a group, not 0"),
        (group(4, group_id="0-train0"), "was drawn twice"),
        (group(3, settled=False), "is not settled, but all its members are"),
        (group(4, place=0), "step 1 part 0 do not stand in places"),
        (group(4, position=7), "was drawn at position 7, the next one was 1"),
        (group(6, completed=1), "is number 1 in the order of completion, and so is another one"),
        (group(3, num_members=2), "are not the trajectories that were issued for it"),
        (position(committed_step=0), "is trained by step 1, but no checkpoint covers that"),
        (position(committed_step=2), "was taken by step 2, which a checkpoint covers"),
        (position(cursor=6), "there are 5 training groups, not 6"),
        (position(num_trajectories=18), "there are 17 trajectories, not 18"),
        (stint(15, 1, end="finished"), "is running, but its last attempt is over"),
        (stint(15, 0, end=None), "has an attempt 0 that never ended"),
        (stint(12, 0, end=None), "is finished, but its last attempt goes on"),
        (stint(15, 1, lease=9), "was in a lease that is not known"),
        (lease("b", version=2), "went on under version 2 with tokens of 1"),
        (extra(PieceRow(trajectory=3, piece=piece(5))), "is trained, but 5 of its tokens are kept"),
        (extra(PieceRow(trajectory=99, piece=piece(5))), "trajectory 99 has tokens, but was not issued"),
        (extra(ForgetTokens(trajectory=9)), "has 16 tokens, but 0 are kept"),
        (extra(PieceRow(trajectory=15, piece=piece(5, version=3))), "has tokens of versions [1, 3]"),
    ],
)
async def test_a_corrupted_row_is_found(corrupt: Callable[[MemoryJournal], tuple[Row, ...]], sentence: str):
    journal = MemoryJournal()
    await play(journal)
    journal.write(corrupt(journal))
    with journal.rows() as rows:
        report = audit_rows(rows)
    assert not report.is_sound
    assert any(sentence in problem for problem in report.problems), report.problems


async def test_a_report_spells_out_only_the_first_of_many_problems():
    journal = MemoryJournal()
    rules = DataRules(group_size=10, max_groups_ahead=30)
    shard = DataShard(journal, Prompts(), rules, NullEvents())
    await shard.claim("a", 0, 300, 0.0)
    with journal.rows() as rows:
        journal.write(tuple(structs.replace(row, lease=None) for row in rows.trajectories()))
    with journal.rows() as rows:
        report = audit_rows(rows)
    assert len(report.problems) == 100
    assert report.num_problems >= 300


async def test_the_story_of_a_prompt_and_of_a_trajectory_can_be_read(tmp_path: Path):
    path = tmp_path / "j"
    with SqliteJournal(path, flush_s=0.01) as journal:
        await play(journal)
    assert audit(path).is_sound
    (story,) = describe_prompt(path, "train4")
    assert [t.row.trajectory_id for t in story.trajectories] == ["0-train4-0", "0-train4-1", "0-train4-2"]
    first = describe_trajectory(path, "0-train4-0")
    assert first == story.trajectories[0]
    assert [(s.attempt, s.lease_id, s.version, s.num_tokens, s.end) for s in first.stints] == [
        (0, "a", 1, 0, "adopted"),
        (1, "b", 1, 4, None),
    ]
    assert describe_trajectory(path, "eval0-heldout1-0").purpose == "evaluation"
    trained = describe_trajectory(path, "0-train1-2")
    assert (trained.row.state, trained.row.step, trained.row.num_generated, trained.row.reward) == (
        "trained",
        1,
        15,
        0.5,
    )
    (lost,) = dropped(path)
    assert (lost.trajectory_id, lost.reason) == ("0-train0-1", "1 data failures, the last one: no sandbox")
    for ask in (lambda: describe_prompt(path, "train9"), lambda: describe_trajectory(path, "0-train4-3")):
        with pytest.raises(UserError, match=r"was not (drawn|issued) \(so far\)"):
            ask()
