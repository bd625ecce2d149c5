"""Versions that the relay has let go come from checkpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from laminar.relay.fallback import CheckpointedWeights
from laminar.relay.memory_link import MemoryLink
from laminar.schema.errors import WeightsUnavailable

TENSORS = {"w": torch.linspace(-1, 1, 12).reshape(3, 4), "count": torch.tensor([7])}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


async def source(folder: Path | None, *, dtype: str = "keep") -> CheckpointedWeights:
    """A relay that holds version 9 alone; version 4 is in a checkpoint."""
    link = MemoryLink(dtype)
    await link.publish(9, TENSORS)
    return CheckpointedWeights(link, lambda version: folder if version == 4 else None, dtype)


async def test_the_relay_comes_first_and_a_checkpoint_when_it_has_let_go(folder: Path):
    weights = await source(folder)
    assert await weights.newest() == await weights.wait_newer(None, 0.0) == 9
    for asked, given in ((9, 9), (None, 9), (4, 4)):
        async with weights.lease(asked) as held:
            assert held.version == given
            assert torch.equal(held.tensors["w"], TENSORS["w"])


@pytest.mark.parametrize("version", [3, 12])
async def test_a_version_that_nobody_has_is_unavailable(folder: Path, version: int):
    with pytest.raises(WeightsUnavailable):
        async with (await source(folder)).lease(version):
            raise AssertionError("there are no weights")


async def test_a_checkpoint_gives_what_the_relay_would_have_given(folder: Path):
    weights = await source(folder, dtype="bfloat16")
    async with weights.lease(9) as published, weights.lease(4) as read:
        for name in TENSORS:
            assert read.tensors[name].dtype == published.tensors[name].dtype
            assert torch.equal(read.tensors[name], published.tensors[name])


async def test_a_checkpoint_that_is_deleted_meanwhile_is_unavailable(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    for gone in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(WeightsUnavailable):
            async with (await source(gone)).lease(4):
                raise AssertionError("there are no weights")
