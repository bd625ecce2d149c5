"""The command line speaks to a live run through a socket that is its user's alone."""

import asyncio
import json
import os
import socket
import stat
from pathlib import Path

import pytest

from laminar.cluster.control import ADDRESS, Scale, ask, control_socket
from laminar.schema.errors import RunFailed, UserError


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, Path]:
    run, scratch = tmp_path / "run", tmp_path / "s"
    run.mkdir()
    scratch.mkdir()
    return run, scratch


def path_of(run: Path) -> str:
    return (run / ADDRESS).read_text().split("\n")[0]


async def obey(question: Scale) -> None:
    match question.num_replicas:
        case 0:
            raise UserError("less than manager.min_replicas")
        case 99:
            raise RunFailed("no machine left")


async def test_what_is_asked_is_done_or_refused_in_the_words_of_the_launcher(place: tuple[Path, Path]):
    run, scratch = place
    async with control_socket(run, scratch, obey):
        await asyncio.to_thread(ask, run, Scale(num_replicas=3))
        with pytest.raises(UserError, match=r"less than manager\.min_replicas"):
            await asyncio.to_thread(ask, run, Scale(num_replicas=0))
        with pytest.raises(RunFailed, match="no machine left"):
            await asyncio.to_thread(ask, run, Scale(num_replicas=99))


async def test_only_the_same_user_may_ask_and_nothing_is_left_when_the_run_ends(place: tuple[Path, Path]):
    run, scratch = place
    async with control_socket(run, scratch, obey):
        assert stat.S_IMODE(os.stat(path_of(run)).st_mode) == 0o600
    assert not (run / ADDRESS).exists()
    with pytest.raises(UserError, match="is not a run that is alive"):
        ask(run, Scale(num_replicas=1))


async def test_an_address_that_a_dead_run_left_is_told_from_a_live_one(place: tuple[Path, Path]):
    run, scratch = place
    (run / ADDRESS).write_text(f"{scratch / 'control'}\n{socket.gethostname()}")
    with pytest.raises(UserError, match="is not alive"):
        ask(run, Scale(num_replicas=1))


async def test_who_asks_on_another_machine_is_told_where_the_run_was_started(place: tuple[Path, Path]):
    run, scratch = place
    (run / ADDRESS).write_text(f"{scratch / 'control'}\nanother-host")
    with pytest.raises(UserError, match="was started on another-host"):
        ask(run, Scale(num_replicas=1))


@pytest.mark.parametrize("question", [b"\n", b"nonsense\n", b'{"type": "shrink"}\n', b"[" * 100_000 + b"\n"])
async def test_nonsense_is_answered_and_the_next_question_is_heard(place: tuple[Path, Path], question: bytes):
    run, scratch = place

    def send() -> dict[str, object]:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(path_of(run))
            sock.sendall(question)
            return dict(json.loads(sock.makefile("rb").readline()))

    async with control_socket(run, scratch, obey):
        assert "that was no question" in str((await asyncio.to_thread(send))["error"])
        await asyncio.to_thread(ask, run, Scale(num_replicas=2))
