"""Slots cannot be written through what readers get, and nobody can make them shrink."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from laminar.relay.manifest import layout
from laminar.relay.slots import PrivateSlot, SharedSlot, checksum, map_readable, map_writable, populate, whole_pages
from laminar.relay.tensors import view, whole


@pytest.fixture
def slot():
    slot = SharedSlot(1, 100_000)
    yield slot
    slot.close()


def test_readers_see_what_writers_write_and_cannot_write(slot: SharedSlot) -> None:
    slot.prefault()
    writer, reader = map_writable(slot.write_fd, slot.num_bytes), map_readable(slot.read_fd, slot.num_bytes)
    populate(writer)
    writer[99_999] = 7
    assert reader[99_999] == 7
    with pytest.raises(TypeError):
        reader[0] = 1
    with pytest.raises(PermissionError):
        map_writable(slot.read_fd, slot.num_bytes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(slot.read_fd, b"x", 0)


def test_nobody_can_cut_memory_off_under_a_reader(slot: SharedSlot) -> None:
    for size in (0, 2 * slot.num_bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(slot.write_fd, size)


def test_slots_have_no_name_anywhere(slot: SharedSlot) -> None:
    assert not list(Path("/dev/shm").glob("*laminar*"))
    assert "deleted" in os.readlink(f"/proc/self/fd/{slot.write_fd}")


def test_prefault_makes_every_page(slot: SharedSlot) -> None:
    assert os.fstat(slot.write_fd).st_blocks == 0
    slot.prefault()
    assert os.fstat(slot.write_fd).st_blocks * 512 >= slot.num_bytes


def test_closing_twice_is_fine_and_maps_outlive_the_slot() -> None:
    slot = SharedSlot(1, 10)
    reader = map_readable(slot.read_fd, slot.num_bytes)
    slot.close()
    slot.close()
    assert reader[0] == 0


@pytest.mark.parametrize("make", [SharedSlot, PrivateSlot])
def test_clear_zeroes_the_padding_only(make) -> None:
    slot = make(1, 4096)
    memory = map_writable(slot.write_fd, 4096) if make is SharedSlot else slot.memory
    memory[:] = b"\xff" * 4096
    slot.clear(layout({"a": ((10,), "int8"), "b": ((100,), "int8")}))
    assert memory[:192] == b"\xff" * 10 + bytes(54) + b"\xff" * 100 + bytes(28)
    assert memory[192:] == b"\xff" * (4096 - 192)
    assert slot.checksum(192) == checksum(memory, 192) != checksum(memory, 191)
    slot.close()


def test_tensors_beyond_four_gib_can_be_written_and_read() -> None:
    manifest = layout({"big": ((5 << 30,), "int8"), "last": ((3, 3), "float32")})
    slot = SharedSlot(1, manifest.total_bytes)  # not prefaulted: takes no memory
    writer, reader = map_writable(slot.write_fd, slot.num_bytes), map_readable(slot.read_fd, slot.num_bytes)
    slot.close()
    weights = torch.randn(3, 3)
    view(whole(writer), manifest.entries[1]).copy_(weights)
    view(whole(writer), manifest.entries[0])[-1] = 5
    assert torch.equal(view(whole(reader), manifest.entries[1]), weights)
    assert view(whole(reader), manifest.entries[0])[-1] == 5
    assert reader[(5 << 30) - 1] == 5


def test_sizes_are_whole_pages() -> None:
    page = mmap.PAGESIZE
    assert [whole_pages(n) for n in (0, 1, page, page + 1)] == [page, page, page, 2 * page]
