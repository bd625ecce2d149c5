"""`laminar relay status` and `laminar bench relay` say what is, and what is wrong with a question."""

import asyncio
import subprocess
import sys
from pathlib import Path

import chain_kit as kit
import pytest
import torch

from laminar.relay.address import ADDRESS, RelayAddress, write_address
from laminar.relay.publisher import WeightPublisher
from laminar.relay.reader import WeightReader


def laminar(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "laminar.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


async def test_status_shows_what_a_relay_holds_and_the_chain_it_stands_in(tmp_path: Path) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_bytes(kit.SECRET)
    with kit.chain_of_processes(tmp_path, ("a", "b"), beat_s=0.1) as chain:
        write_address(tmp_path, RelayAddress(socket_path=str(chain.socket("a")), secret=kit.SECRET))
        assert (tmp_path / ADDRESS).stat().st_mode & 0o777 == 0o600
        empty = await asyncio.to_thread(laminar, "relay", "status", str(tmp_path))
        assert "no version yet" in empty.stdout
        async with WeightPublisher(chain.socket("a"), kit.SECRET) as publisher:
            await publisher.publish(4, {"w": torch.zeros(1 << 20)})
        async with (
            WeightReader(chain.socket("b"), kit.SECRET) as reader,
            WeightReader(chain.socket("a"), kit.SECRET) as own,
        ):
            assert await reader.wait_newer(None, 10.0) == 4
            async with own.lease():
                held = await asyncio.to_thread(laminar, "relay", "status", str(tmp_path))
            await asyncio.sleep(0.3)  # a beat
            keeper = "{}:{}".format(*chain.keeper.address)
            asked = ("relay", "status", "--keeper", keeper, "--secret-file", str(secret_file))
            whole = await asyncio.to_thread(laminar, *asked)
    assert held.returncode == whole.returncode == 0, held.stderr + whole.stderr
    assert "newest version 4" in held.stdout
    version, age, unit, size, _, readers = held.stdout.splitlines()[2].split()[:6]
    assert (version, unit, size, readers) == ("4", "s", "4.0", "1")
    assert float(age) < 60
    assert "epoch 2, 2 relays" in whole.stdout
    first, second = (line.split() for line in whole.stdout.splitlines()[2:4])
    assert (first[0], first[2], second[0], second[2]) == ("a", "4", "b", "4")
    assert second[7].endswith("/s"), "the rate of the hop to it"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "give the folder of a live run, or --keeper"),
        (("somewhere", "--keeper", "h:1"), "not both"),
        (("nowhere",), "nowhere is not a run that is alive"),
        (("--keeper", "h:1"), "--keeper needs --secret-file"),
        (("--keeper", "h", "--secret-file", "x"), "--keeper h must look like HOST:PORT"),
        (("--keeper", "127.0.0.1:9", "--secret-file", "missing"), "--secret-file missing cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...], sentence: str) -> None:
    asked = laminar("relay", "status", *arguments)
    assert asked.returncode == 2
    assert sentence in asked.stderr
    assert len(asked.stderr.strip().splitlines()) == 1


def test_a_keeper_or_relay_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_bytes(b"x")
    asked = laminar("relay", "status", "--keeper", "127.0.0.1:9", "--secret-file", str(secret_file))
    assert (asked.returncode, len(asked.stderr.strip().splitlines())) == (1, 1)
    assert "no keeper of a chain at 127.0.0.1:9" in asked.stderr
    write_address(tmp_path, RelayAddress(socket_path=str(tmp_path / "gone"), secret=b"x"))
    asked = laminar("relay", "status", str(tmp_path))
    assert (asked.returncode, len(asked.stderr.strip().splitlines())) == (2, 1)
    assert "not a run that is alive" in asked.stderr


def test_the_benchmark_prints_a_table_of_each_model() -> None:
    asked = laminar("bench", "relay", "--mib", "8", "--repeat", "1", "--threads", "2")
    assert asked.returncode == 0, asked.stderr
    assert "8 MiB: " in asked.stdout
    assert "SmolLM2-135M: 256.6 MiB in 273 tensors" in asked.stdout
    assert asked.stdout.count("the learner stands still") == 2
