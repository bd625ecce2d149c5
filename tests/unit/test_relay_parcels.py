"""A plan is used again exactly as long as it is what would be planned anew."""

import mmap
import weakref
from collections.abc import Callable

import pytest
import torch

from laminar.relay.copying import PIECE_BYTES
from laminar.relay.manifest import ManifestError, layout
from laminar.relay.parcels import Packer, Parcel, Part, Piece, parcel_of
from laminar.relay.tensors import facts_of, view, whole

Tensors = dict[str, torch.Tensor]


def written(parcel: Parcel, num_threads: int = 1) -> Tensors:
    """What lies in fresh memory afterwards."""
    manifest = parcel.plan.manifest
    memory_bytes = whole(mmap.mmap(-1, max(1, manifest.total_bytes)))
    assert parcel.write(memory_bytes, num_threads) == parcel.plan.num_bytes
    return {entry.name: view(memory_bytes, entry) for entry in manifest.entries}


def same(found: Tensors, tensors: Tensors) -> bool:
    return list(found) == list(tensors) and all(torch.equal(found[name], tensors[name]) for name in tensors)


def model() -> Tensors:
    square = torch.randn(6, 6)
    return {"a": square, "b": torch.randn(4, dtype=torch.complex64), "tied": square, "none": torch.empty(0)}


CHANGES: dict[str, Callable[[Tensors], Tensors]] = {
    "name": lambda m: {("c" if name == "b" else name): tensor for name, tensor in m.items()},
    "order": lambda m: {name: m[name] for name in reversed(m)},
    "one more": lambda m: {**m, "more": torch.randn(3)},
    "one less": lambda m: {name: m[name] for name in ("a", "tied", "none")},
    "memory": lambda m: {**m, "b": m["b"].clone()},
    "shape": lambda m: {**m, "a": m["a"][:3]},
    "strides": lambda m: {**m, "a": m["a"].t()},
    "dtype": lambda m: {**m, "a": m["a"].view(torch.int32)},
    "conjugation": lambda m: {**m, "b": m["b"].conj()},
    "negation": lambda m: {**m, "b": torch._neg_view(m["b"])},
    "tie": lambda m: {**m, "tied": m["tied"].clone()},
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_about_tensors_but_their_contents_makes_a_new_plan(change: str) -> None:
    before = model()
    after = CHANGES[change](before)
    packer = Packer()
    packer.pack(before)
    parcel = packer.pack(after)
    assert parcel.plan == Packer().pack(after).plan
    assert same(written(parcel), after)


def test_equal_addresses_on_two_devices_are_not_taken_for_the_same() -> None:
    nowhere, elsewhere = torch.empty(0), torch.empty(0, device="meta")
    assert nowhere.data_ptr() == elsewhere.data_ptr()
    assert facts_of("w", nowhere) != facts_of("w", elsewhere)


def test_a_plan_serves_as_long_as_nothing_but_contents_changes_for_any_memory() -> None:
    tensors, packer = model(), Packer()
    plan = packer.pack(tensors).plan
    tensors["a"].fill_(3.0)
    again = packer.pack({name: tensor.detach() for name, tensor in tensors.items()})
    assert again.plan is plan
    in_two_places = [written(again), written(again)]
    assert all(same(found, tensors) for found in in_two_places)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_what_is_cast_or_strided_is_written_from_the_tensors_of_today(num_threads: int) -> None:
    packer = Packer("bfloat16")
    storage = torch.randn(40, 30)
    for _ in range(2):
        tensors = {"wide": storage, "turned": storage.t(), "kept": torch.arange(7)}
        found = written(packer.pack(tensors), num_threads)
        assert same(found, {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()})
        storage.normal_()


def test_a_plan_keeps_no_tensor_alive() -> None:
    tensors, packer = {"a": torch.randn(5), "cast": torch.randn(3, dtype=torch.float64)}, Packer("float32")
    seen = [weakref.ref(tensor) for tensor in tensors.values()]
    assert same(written(packer.pack(tensors)), {name: tensor.float() for name, tensor in tensors.items()})
    tensors.clear()
    assert [tensor() for tensor in seen] == [None, None]


def test_a_model_that_cannot_be_published_is_refused_every_time() -> None:
    packer = Packer()
    for _ in range(2):
        with pytest.raises(ValueError, match="b: only dense tensors can be published"):
            packer.pack({"a": torch.ones(2), "b": torch.eye(3).to_sparse()})


def test_memory_that_is_too_small_is_refused_before_the_first_byte() -> None:
    memory_bytes = whole(mmap.mmap(-1, mmap.PAGESIZE))
    parcel = Packer().pack({"a": torch.ones(10), "b": torch.ones(mmap.PAGESIZE)})
    with pytest.raises(ManifestError, match="do not fit into a slot of"):
        parcel.write(memory_bytes)
    assert not memory_bytes.any()


def test_the_parts_of_several_ranks_together_are_the_model() -> None:
    tensors = {f"t{n}": torch.randn(50 + n) for n in range(20)}
    memory_bytes = whole(mmap.mmap(-1, 1 << 16))
    parcels = [Packer(part=Part(index=index, count=3)).pack(tensors) for index in range(3)]
    assert sum(parcel.write(memory_bytes) for parcel in parcels) == parcels[0].plan.manifest.payload_bytes
    assert same({entry.name: view(memory_bytes, entry) for entry in parcels[0].plan.manifest.entries}, tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_any_kind_land_where_they_belong(dtype: str) -> None:
    full = torch.randn(6, 4, 5)
    manifest = layout({"w": (tuple(full.shape), dtype)})
    starts = [(0, 0, 0), (2, 0, 0), (2, 2, 0), (3, 0, 0), (3, 0, 2)]
    blocks = [full[:2], full[2:3, :2], full[2:3, 2:], full[3:, :, :2], full[3:, :, 2:]]
    pieces = [Piece(name="w", start=start, data=block) for start, block in zip(starts, blocks, strict=True)]
    parcel = parcel_of(manifest, [*pieces, Piece(name="w", start=(1, 1, 1), data=full[:0, :0, :0])])
    assert torch.equal(written(parcel)["w"], full.to(getattr(torch, dtype)))
    assert [(p.name, p.start) for p in parcel.pieces[:5]] == [(p.name, p.start) for p in pieces]
    if dtype == "float32":
        assert parcel.plan.others == [3, 4], "rows are plain bytes"


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (Piece(name="v", start=(0,), data=torch.ones(2)), "v is not in the manifest"),
        (Piece(name="w", start=(0, 0), data=torch.ones(2)), "w: no block of shape"),
        (Piece(name="w", start=(0,), data=torch.ones(4, 3)), "w: no block of shape"),
        (Piece(name="w", start=(3, 0), data=torch.ones(2, 3)), "w: no block of shape"),
        (Piece(name="w", start=(0, 0), data=torch.ones(1, 4)), "w: no block of shape"),
        (Piece(name="w", start=(-1, 0), data=torch.ones(1, 3)), "w: no block of shape"),
    ],
)
def test_a_piece_that_fits_nowhere_is_refused(piece: Piece, reason: str) -> None:
    with pytest.raises(ManifestError, match=reason):
        parcel_of(layout({"w": ((4, 3), "float32")}), [piece])


def test_large_tensors_are_moved_in_pieces() -> None:
    tensors = {"a": torch.arange(PIECE_BYTES // 4 + 5)}
    parcel = Packer().pack(tensors)
    assert len(parcel.plan.moves) == 3
    assert same(written(parcel, num_threads=2), tensors)
