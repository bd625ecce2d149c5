"""What every journal must do, and what the one in a file must survive."""

import asyncio
import contextlib
import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from laminar.data import sqlite_tables
from laminar.data.audit import audit, audit_rows
from laminar.data.journal import Journal, MemoryJournal, Rows
from laminar.data.ports import DataRules
from laminar.data.rows import (
    EvaluationRow,
    ForgetTokens,
    GroupRow,
    LeaseRow,
    LoseSteps,
    PieceRow,
    PositionRow,
    StintRow,
    TrajectoryRow,
)
from laminar.data.shard import DataShard
from laminar.data.sqlite_journal import SqliteJournal, read_journal
from laminar.schema.errors import RunFailed, UserError
from laminar.schema.tokens import pack_ids, pack_logprobs
from laminar.schema.trajectories import Append, Finish, Piece, Prompt, Scored, Update
from laminar.telemetry.events import NullEvents

RULES = DataRules(group_size=2, max_groups_ahead=8)

POSITION = PositionRow(cursor=3, num_groups=2, num_trajectories=3, num_leases=1, learner_version=4, now_s=1.5)
GROUP = GroupRow(
    num=1,
    group_id="0-84,36",
    purpose="training",
    prompt_id="84,36",
    prompt_index=7,
    position=0,
    first_trajectory=1,
    num_members=2,
    issued_s=0.25,
)
OTHER_GROUP = structs.replace(GROUP, num=2, group_id="0-ü'\"", prompt_id="ü'\"", first_trajectory=3)
OTHER_GROUP = structs.replace(OTHER_GROUP, settled=True, step=9)
FIRST = TrajectoryRow(num=1, trajectory_id="0-84,36-0", group=1, member=0, state="waiting", issued_s=0.25)
SECOND = structs.replace(FIRST, num=2, trajectory_id="0-84,36-1", member=1, state="running", lease=1, attempt=3)
GRADED = structs.replace(
    FIRST, num=3, trajectory_id="x", state="trained", reward=0.5, metrics={"a": 1.0}, version=2, staleness=1, step=9
)
LEASE = LeaseRow(num=1, lease_id="replica-0/0/1", version=2, purpose="training", opened_s=0.5)
STINT = StintRow(trajectory=2, attempt=3, lease=1, num_tokens=17, began_s=0.5)
EVALUATION = EvaluationRow(asked_version=4, round=0)


def piece(*token_ids: int, version: int = 2) -> Piece:
    return Piece(
        token_ids=pack_ids(token_ids), logprobs=pack_logprobs([-0.5] * len(token_ids)), generated=True, version=version
    )


class ManyPrompts:
    num_train = 1000
    num_heldout = 4

    def prompt(self, split: str, index: int) -> Prompt:
        return Prompt(prompt_id=f"{split}{index}", token_ids=(1, 2, 3), payload={})


# ---- every journal


@pytest.fixture(params=["memory", "sqlite"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    if request.param == "memory":
        yield MemoryJournal()
    else:
        with SqliteJournal(tmp_path / "journal.sqlite", flush_s=0.01) as journal:
            yield journal


def content(rows: Rows) -> dict[str, Any]:
    return {
        "position": rows.position(),
        "groups": list(rows.groups()),
        "trajectories": list(rows.trajectories()),
        "stints": list(rows.stints()),
        "leases": list(rows.leases()),
        "evaluations": list(rows.evaluations()),
        "pieces": list(rows.pieces()),
        "counts": rows.counts(),
        "trained": rows.trained_by_step(),
        "trained groups": rows.trained_groups_by_step(),
    }


async def test_an_empty_journal_reads_as_nothing(journal: Journal):
    with journal.rows() as rows:
        found = content(rows)
    assert found.pop("position") == PositionRow()
    assert not any(found.values())


async def test_what_is_durable_reads_back_unchanged(journal: Journal):
    journal.write((GROUP, FIRST, SECOND, LEASE, STINT))
    journal.write((OTHER_GROUP, GRADED, EVALUATION, POSITION))
    journal.write((PieceRow(trajectory=2, piece=piece(5, 6)), PieceRow(trajectory=2, piece=piece(7))))
    await journal.durable()
    with journal.rows() as rows:
        assert content(rows) == {
            "position": POSITION,
            "groups": [GROUP, OTHER_GROUP],
            "trajectories": [FIRST, SECOND, GRADED],
            "stints": [STINT],
            "leases": [LEASE],
            "evaluations": [EVALUATION],
            "pieces": [PieceRow(trajectory=2, piece=piece(5, 6)), PieceRow(trajectory=2, piece=piece(7))],
            "counts": {"waiting": 1, "running": 1, "trained": 1},
            "trained": {9: 1},
            "trained groups": {9: 1},
        }
        assert list(rows.groups(open_only=True)) == [GROUP]
        assert list(rows.groups(prompt_id="ü'\"")) == [OTHER_GROUP]
        assert list(rows.groups(prompt_id="ü'\"", open_only=True)) == []
        assert list(rows.trajectories(within=range(2, 4))) == [SECOND, GRADED]
        assert list(rows.trajectories(within=range(1, 4), state="running")) == [SECOND]
        assert list(rows.trajectories(state="trained")) == [GRADED]
        assert list(rows.stints(within=range(1, 2))) == []


async def test_a_later_row_replaces_an_earlier_one(journal: Journal):
    ended = structs.replace(STINT, ended_s=2.0, end="finished")
    done = structs.replace(EVALUATION, done=True, accuracy=0.25, num=4, mean_tokens=3.0, version=5)
    moved = structs.replace(SECOND, state="finished", metrics={"x": float("nan")}, stop_reason="length")
    journal.write((GROUP, FIRST, SECOND, STINT, EVALUATION, POSITION))
    await journal.durable()
    journal.write((structs.replace(GROUP, completed=8), structs.replace(FIRST, state="dropped", reason="no"), moved))
    journal.write((ended, done, structs.replace(POSITION, cursor=4)))
    journal.write((structs.replace(POSITION, cursor=5),))
    await journal.durable()
    with journal.rows() as rows:
        found = content(rows)
    assert found["position"].cursor == 5
    assert found["groups"] == [structs.replace(GROUP, completed=8)]
    assert [row.state for row in found["trajectories"]] == ["dropped", "finished"]
    assert str(found["trajectories"][1].metrics) == "{'x': nan}"
    assert (found["stints"], found["evaluations"]) == ([ended], [done])


async def test_forgotten_tokens_are_gone_and_new_ones_stay(journal: Journal):
    journal.write((PieceRow(trajectory=1, piece=piece(1)), PieceRow(trajectory=2, piece=piece(2))))
    await journal.durable()
    journal.write((PieceRow(trajectory=1, piece=piece(3)),))
    journal.write((ForgetTokens(trajectory=1), PieceRow(trajectory=1, piece=piece(4))))
    await journal.durable()
    with journal.rows() as rows:
        kept = sorted((row.trajectory, row.piece.token_ids) for row in rows.pieces())
    assert kept == [(1, pack_ids([4])), (2, pack_ids([2]))]


async def test_lost_steps_turn_their_trained_into_dropped(journal: Journal):
    settled = structs.replace(GROUP, settled=True, step=5, part=0, place=0)
    kept = structs.replace(FIRST, state="trained", step=5)
    journal.write((settled, structs.replace(settled, num=2, step=6), kept))
    journal.write((structs.replace(kept, num=2, step=6),))
    journal.write((LoseSteps(after_step=5, reason="gone"), structs.replace(FIRST, num=3, state="trained", step=7)))
    await journal.durable()
    with journal.rows() as rows:
        assert [(row.state, row.reason) for row in rows.trajectories()] == [
            ("trained", None),
            ("dropped", "gone"),
            ("trained", None),
        ]
        assert [(row.step, row.part, row.place) for row in rows.groups()] == [(5, 0, 0), (None, None, None)]
        assert (rows.trained_by_step(), rows.trained_groups_by_step()) == ({5: 1, 7: 1}, {5: 1})


async def test_a_shard_goes_on_after_a_restart_where_it_was(journal: Journal):
    shard = DataShard(journal, ManyPrompts(), RULES, NullEvents())
    await play(shard, steps=3)
    batch = await shard.claim("last/0/1", 3, 4, 0.0)
    await shard.stream("last/0/1", appends(batch.items, 3, 8))
    before = await shard.stats()
    again = DataShard(await reopened(journal), ManyPrompts(), RULES, NullEvents())
    after = await again.stats()
    assert after == before
    assert (await again.claim("last/0/1", 3, 4, 0.0)).items[0].pieces[0].num_tokens == 8
    with journal.rows() as rows:
        assert audit_rows(rows).is_sound


async def reopened(journal: Journal) -> Journal:
    await journal.durable()
    return journal


def appends(items: Any, version: int, num_tokens: int) -> tuple[Update, ...]:
    new = piece(*range(num_tokens), version=version)
    return tuple(
        Append(trajectory_id=item.trajectory_id, attempt=item.attempt, offset=0, pieces=(new,)) for item in items
    )


async def play(
    shard: DataShard, steps: int, first: int = 1, tell: Callable[[str, int, Any], None] | None = None
) -> None:
    """Some steps of a whole run."""
    for step in range(first, first + steps):
        if step % 3 == 0:
            await shard.request_evaluation(step - 1)
        lease = f"r/0/{step}"
        for n in range(4):
            batch = await shard.claim(f"{lease}.{n}", step - 1, 4, 0.0)
            finishes = [
                Finish(trajectory_id=i.trajectory_id, attempt=i.attempt, stop_reason="stop", grade=Scored(reward=1.0))
                for i in batch.items
            ]
            for half in (appends(batch.items, step - 1, 5), tuple(finishes[n:])):
                await shard.stream(f"{lease}.{n}", half)
        groups = await shard.sample(step, 0, 1, 0.0)
        if tell:
            tell("taken", step, [group.group_id for group in groups])
        if step % 2 == 0:
            await shard.commit(step)
            if tell:
                tell("committed", step, None)
        await shard.start_over(f"{lease}.2")


# ---- the journal in a file


def test_the_tables_have_the_columns_of_their_rows(tmp_path: Path):
    with SqliteJournal(tmp_path / "j", flush_s=0.01):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / "j")) as connection:
        for row_type, table in {**sqlite_tables.TABLES, PositionRow: "position"}.items():
            columns = [column[1] for column in connection.execute(f"PRAGMA table_info({table})")]
            assert tuple(columns) == row_type.__struct_fields__


async def test_rows_are_written_without_being_waited_for(tmp_path: Path):
    with SqliteJournal(tmp_path / "j", flush_s=0.01) as journal:
        journal.write((FIRST,))
        for _ in range(200):
            with read_journal(tmp_path / "j") as rows:
                if list(rows.trajectories()):
                    return
            await asyncio.sleep(0.01)
    raise AssertionError("2 s were not enough for a flush of 0.01 s")


async def test_closing_writes_what_is_queued_and_ends_the_journal(tmp_path: Path):
    journal = SqliteJournal(tmp_path / "j", flush_s=60.0)
    journal.write((FIRST,))
    journal.close()
    journal.close()
    with read_journal(tmp_path / "j") as rows:
        assert list(rows.trajectories()) == [FIRST]
    with pytest.raises(RunFailed, match="is closed"):
        journal.write((FIRST,))


def foreign_database(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (a)")


def journal_of_version(version: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        SqliteJournal(path, flush_s=0.01).close()
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA user_version = {version}")

    return write


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda path: path.write_text("no database at all, but long enough to be looked at"),
            "not a journal of Laminar",
        ),
        (foreign_database, "another program"),
        (journal_of_version(sqlite_tables.SCHEMA_VERSION + 1), "newer Laminar"),
        (journal_of_version(sqlite_tables.SCHEMA_VERSION - 1), "older Laminar"),
    ],
)
def test_a_file_that_is_not_ours_is_refused_in_one_sentence(
    make: Callable[[Path], None], sentence: str, tmp_path: Path
):
    path = tmp_path / "j"
    make(path)
    before = path.read_bytes()
    for act in (lambda: SqliteJournal(path, flush_s=0.01), lambda: audit(path)):
        with pytest.raises(UserError, match=sentence) as caught:
            act()
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def test_a_missing_journal_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no journal"):
        audit(tmp_path / "j")
    with pytest.raises(UserError, match="cannot be opened"):
        SqliteJournal(tmp_path / "nowhere" / "j", flush_s=0.01)


def test_only_one_writes(tmp_path: Path):
    with SqliteJournal(tmp_path / "j", flush_s=0.01):
        with pytest.raises(UserError, match="in use by a run that is still alive"):
            SqliteJournal(tmp_path / "j", flush_s=0.01)
        assert audit(tmp_path / "j").is_sound
    SqliteJournal(tmp_path / "j", flush_s=0.01).close()


async def test_a_journal_is_audited_while_it_is_written(tmp_path: Path):
    journal = SqliteJournal(tmp_path / "j", flush_s=0.001)
    async with DataShard.open(journal, ManyPrompts(), RULES, NullEvents()) as shard:
        num_issued = 0
        for step in range(1, 15):
            await play(shard, 1, step)
            report = audit(tmp_path / "j")
            assert report.is_sound, report.problems
            assert report.num_issued >= num_issued
            num_issued = report.num_issued
    assert num_issued > 0


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


async def test_tokens_of_trained_trajectories_leave_the_file(tmp_path: Path):
    journal = SqliteJournal(tmp_path / "j", flush_s=0.01)
    sizes = []
    async with DataShard.open(journal, ManyPrompts(), RULES, NullEvents()) as shard:
        for step in range(1, 61):
            batch = await shard.claim(f"r/0/{step}", step - 1, 4, 0.0)
            for update in appends(batch.items, step - 1, 20_000):
                finish = Finish(
                    trajectory_id=update.trajectory_id, attempt=0, stop_reason="stop", grade=Scored(reward=1.0)
                )
                await shard.stream(f"r/0/{step}", (update, finish))
            assert len(await shard.sample(step, 0, 2, 0.0)) == 2
            await shard.commit(step)
            sizes.append(folder_bytes(tmp_path))
    assert 1.5 * max(sizes) < 60 * 4 * 20_000 * 8
    assert max(sizes[40:]) <= 1.1 * max(sizes[:40])
    with read_journal(tmp_path / "j") as rows:
        assert {row.num_generated for row in rows.trajectories()} == {20_000}
        assert list(rows.pieces()) == []


FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_journals as t

async def main():
    journal = t.SqliteJournal(Path(sys.argv[1]), flush_s=0.001)
    shard = t.DataShard(journal, t.ManyPrompts(), t.RULES, t.NullEvents())
    watch = asyncio.ensure_future(shard.run())
    batch = await shard.claim("r/0/1", 0, 4, 0.0)
    await journal.durable()
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
    calls = []
    try:
        for n in range(1000):
            calls.append(n)
            await shard.stream("r/0/1", t.appends(batch.items[:1], 0, 1000 * (n + 1)))
            await asyncio.sleep(0.01)
    except t.RunFailed as error:
        print("stream:", error)
    for act in (shard.commit(1), shard.claim("r/0/2", 0, 4, 0.0), watch):
        try:
            await act
        except t.RunFailed as error:
            print("then:", error)
    journal.close()

asyncio.run(main())
"""


def test_a_full_disk_fails_the_next_call_and_every_later_one(tmp_path: Path):
    path = tmp_path / "j"
    child = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    lines = child.stdout.splitlines()
    assert len(lines) == 4, child.stdout + child.stderr
    assert all("cannot be written" in line and "resume the run" in line for line in lines)
    assert audit(path).is_sound


async def test_a_disk_that_hangs_is_reported(tmp_path: Path):
    with SqliteJournal(tmp_path / "j", flush_s=0.01, deadline_s=0.1) as journal:
        with contextlib.closing(sqlite3.connect(tmp_path / "j", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # stands for a disk that does not answer
            journal.write((FIRST,))
            with pytest.raises(RunFailed, match=r"within 0\.1 s|is locked"):
                await journal.durable()
            await asyncio.sleep(0.5)
            other.execute("ROLLBACK")
        with pytest.raises(RunFailed, match="is locked"):
            await journal.durable()


# ---- sudden death

VICTIM = """
import asyncio, json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_journals as t

def tell(what, step, groups):
    print(json.dumps([what, step, groups]), flush=True)

async def main():
    journal = t.SqliteJournal(Path(sys.argv[1]), flush_s=0.005)
    first = int(sys.argv[3])
    resume = first - 1 if first > 1 else None
    async with t.DataShard.open(journal, t.ManyPrompts(), t.RULES, t.NullEvents(), resume) as shard:
        print(json.dumps(["ready", first, None]), flush=True)
        await t.play(shard, 100_000, first, tell)

asyncio.run(main())
"""


def killed_after(path: Path, delay_s: float, first_step: int) -> list[Any]:
    """What a child that writes the journal had been promised before it was killed."""
    child = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(path), str(Path(__file__).parent), str(first_step)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    ready = child.stdout.readline()
    assert ready, child.stderr.read()
    time.sleep(delay_s)
    child.send_signal(signal.SIGKILL)
    said = [json.loads(line) for line in child.stdout.read().splitlines() if line.endswith("]")]
    child.wait()
    child.stdout.close()
    child.stderr.close()
    return said


def test_a_killed_shard_keeps_every_promise(tmp_path: Path):
    """SIGKILL at random instants, again and again on the same journal: it audits clean and what was told is there."""
    path = tmp_path / "j"
    rng = random.Random(7)
    committed = 0
    for _ in range(5):
        said = killed_after(path, rng.uniform(0.0, 0.4), committed + 1)
        report = audit(path)
        assert report.is_sound, report.problems
        with read_journal(path) as rows:
            step_of = {group.group_id: group.step for group in rows.groups()}
            assert rows.position().committed_step >= max(
                [committed, *(s for what, s, _ in said if what == "committed")]
            )
            committed = rows.position().committed_step
        for what, step, groups in said:
            if what == "taken":
                assert [step_of[group] for group in groups] == [step] * len(groups)
    assert committed > 0


def copies_with_truncated_wal(path: Path, folder: Path, num: int) -> Iterator[Path]:
    """The journal as a crash may leave it: its WAL ends anywhere."""
    wal = path.with_name(path.name + "-wal").read_bytes()
    rng = random.Random(3)
    frame = 24 + sqlite_tables.PAGE_BYTES
    ends = {0, 1, 31, 32, 33, 32 + frame, 32 + frame - 1, len(wal) - 1, len(wal)}
    ends |= {rng.randrange(len(wal)) for _ in range(num)}
    ends |= {32 + frame * rng.randrange(len(wal) // frame) for _ in range(num)}
    for end in sorted(ends):
        copy = folder / f"cut-{end}"
        shutil.copy(path, copy)
        copy.with_name(copy.name + "-wal").write_bytes(wal[:end])
        yield copy


async def test_a_journal_cut_at_any_byte_of_its_last_writes_audits_clean_and_is_a_prefix_of_the_history(tmp_path: Path):
    path, cut = tmp_path / "j", tmp_path / "cut"
    with SqliteJournal(path, flush_s=0.001) as journal:
        await play(DataShard(journal, ManyPrompts(), RULES, NullEvents()), steps=4)
        await journal.durable()
        wal, main = path.with_name(path.name + "-wal").read_bytes(), path.read_bytes()
    rng, num_issued = random.Random(11), []
    for end in sorted(rng.sample(range(len(wal) + 1), 1_000)):
        cut.write_bytes(main)
        cut.with_name("cut-wal").write_bytes(wal[:end])
        cut.with_name("cut-shm").unlink(missing_ok=True)
        report = audit(cut)
        assert report.is_sound, (end, report.problems)
        num_issued.append(report.num_issued)
    assert num_issued == sorted(num_issued)
    assert len(set(num_issued)) > 4


async def test_a_truncated_wal_opens_and_audits_clean(tmp_path: Path):
    path = tmp_path / "j"
    (tmp_path / "cuts").mkdir()
    with SqliteJournal(path, flush_s=0.001) as journal:
        await play(DataShard(journal, ManyPrompts(), RULES, NullEvents()), steps=8)
        await journal.durable()
        cuts = list(copies_with_truncated_wal(path, tmp_path / "cuts", 20))
    num_issued = []
    for cut in cuts:
        report = audit(cut)
        assert report.is_sound, (cut, report.problems)
        num_issued.append(report.num_issued)
        with read_journal(cut) as rows:
            committed = rows.position().committed_step
        async with DataShard.open(
            SqliteJournal(cut, flush_s=0.01), ManyPrompts(), RULES, NullEvents(), committed
        ) as shard:
            await play(shard, 2, committed + 1)
        assert audit(cut).is_sound
    assert num_issued == sorted(num_issued)
    assert num_issued[0] == 0
    assert len(set(num_issued)) > 4
