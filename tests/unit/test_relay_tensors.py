"""Copies are exact, whatever path they take."""

import mmap

import pytest
import torch

from laminar.relay.copying import PIECE_BYTES, copy_all
from laminar.relay.tensors import dtype_name, layout_of, whole


@pytest.mark.parametrize("num_threads", [1, 3])
def test_copies_are_exact_for_equal_dtypes_casts_and_strides(num_threads: int) -> None:
    sources = [
        torch.randn(1_000),
        torch.randn(40, 30).t(),
        torch.randn(2 * PIECE_BYTES // 4 + 77),
        torch.randint(0, 255, (9, 9), dtype=torch.uint8)[:, ::2],
        torch.tensor(4, dtype=torch.uint8),
        torch.empty(0, 3),
        torch.randn(8, requires_grad=True),
        torch.randn(6, dtype=torch.complex64).conj(),
        torch.randn(5, PIECE_BYTES // 16).t(),
    ]
    pairs = [(torch.zeros(s.shape, dtype=s.dtype), s) for s in sources]
    pairs += [(torch.zeros(s.shape, dtype=torch.bfloat16), s) for s in sources[:3]]
    copy_all(pairs, num_threads)
    for target, source in pairs:
        assert torch.equal(target, source.to(target.dtype))


def test_threads_share_the_copies_and_a_failure_of_one_is_raised() -> None:
    pairs = [(torch.zeros(1_000), torch.full((1_000,), float(n))) for n in range(200)]
    copy_all(pairs, num_threads=4)
    assert all(torch.equal(target, source) for target, source in pairs)
    with pytest.raises(NotImplementedError, match="meta"):
        copy_all([*pairs, (torch.zeros(3), torch.ones(3, device="meta"))], num_threads=4)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_wrong_shape_is_an_error_never_a_broadcast(num_threads: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match=r"shape \(3,\) where \(2, 3\)"):
            copy_all([(torch.zeros(2, 3), torch.ones(3, dtype=dtype))], num_threads)


def test_a_tensor_over_a_map_keeps_the_map_alive() -> None:
    memory = mmap.mmap(-1, 4096)
    tensor = whole(memory)
    with pytest.raises(BufferError):
        memory.close()
    memory[5] = 9
    del memory
    assert tensor[5] == 9


def test_parameters_that_share_storage_are_tied_only_if_they_are_the_same_view() -> None:
    base = torch.randn(4, 4)
    manifest = layout_of({"a": base, "b": base[:], "c": base.t(), "d": base[:2], "e": base.view(torch.int32)}, None)
    offsets = [entry.offset for entry in manifest.entries]
    assert offsets[0] == offsets[1]
    assert len(set(offsets)) == 4


def test_a_conjugated_and_a_negated_view_are_not_tied_to_what_they_show() -> None:
    base = torch.randn(4, dtype=torch.complex64)
    manifest = layout_of({"a": base, "conj": base.conj(), "neg": torch._neg_view(base)}, None)
    assert len({entry.offset for entry in manifest.entries}) == 3


def test_every_dtype_has_the_name_that_torch_gives_it() -> None:
    assert [dtype_name(d) for d in (torch.bfloat16, torch.float8_e4m3fn)] == ["bfloat16", "float8_e4m3fn"]
