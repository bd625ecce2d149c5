"""Layouts place every tensor once, and lying ones are found out."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from laminar.relay.manifest import ALIGN_BYTES, DTYPE_BYTES, Manifest, ManifestError, TensorEntry, layout

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
models = st.dictionaries(st.text(min_size=1, max_size=5), st.tuples(shapes, st.sampled_from(sorted(DTYPE_BYTES))))


@given(models)
def test_a_layout_is_valid_dense_and_survives_the_wire(tensors: dict[str, tuple[tuple[int, ...], str]]) -> None:
    manifest = layout(tensors)
    manifest.validate()
    assert msgpack.decode(msgpack.encode(manifest), type=Manifest) == manifest
    assert [entry.name for entry in manifest.entries] == list(tensors)
    gap_bytes = sum(end - start for start, end in manifest.gaps())
    assert manifest.payload_bytes + gap_bytes == manifest.total_bytes
    assert gap_bytes < ALIGN_BYTES * max(1, len(tensors))


@given(models, st.data())
def test_any_single_change_of_a_place_is_refused_or_harmless(
    tensors: dict[str, tuple[tuple[int, ...], str]], data: st.DataObject
) -> None:
    manifest = layout(tensors)
    if not manifest.entries:
        return
    index = data.draw(st.integers(0, len(manifest.entries) - 1))
    entry = manifest.entries[index]
    moved = msgspec.structs.replace(entry, offset=data.draw(st.integers(-ALIGN_BYTES, manifest.total_bytes * 2)))
    entries = (*manifest.entries[:index], moved, *manifest.entries[index + 1 :])
    lying = Manifest(total_bytes=manifest.total_bytes, entries=entries)
    if moved == entry or not entry.num_bytes:
        return
    same_place = [e for e in entries if e is not moved and e.offset == moved.offset]
    if any((e.shape, e.dtype) == (moved.shape, moved.dtype) for e in same_place):
        return  # tied to another tensor: allowed, if what it left is not missed
    with pytest.raises(ManifestError):
        lying.validate()


def test_sizes_beyond_four_gib_are_exact() -> None:
    manifest = layout(
        {"experts": ((256, 7168, 4096), "bfloat16"), "norm": ((3,), "float32"), "last": ((1 << 33,), "int8")}
    )
    manifest.validate()
    assert [entry.offset for entry in manifest.entries] == [0, 15_032_385_536, 15_032_385_536 + 64]
    assert manifest.total_bytes == 15_032_385_536 + 64 + (1 << 33)
    assert msgpack.decode(msgpack.encode(manifest), type=Manifest) == manifest


def test_ties_share_bytes_and_must_agree() -> None:
    shape = ((4, 4), "float32")
    manifest = layout({"a": shape, "b": shape, "c": shape}, ties={"c": "a"})
    manifest.validate()
    assert manifest.entries[2].offset == manifest.entries[0].offset
    assert manifest.total_bytes == manifest.payload_bytes == 128
    assert [block.name for block in manifest.blocks()] == ["a", "b"]
    with pytest.raises(ManifestError, match="c is tied to a"):
        layout({"a": shape, "c": ((16,), "float32")}, ties={"c": "a"})


@pytest.mark.parametrize(
    ("entries", "total_bytes", "reason"),
    [
        ([("a", "float32", (4,), 0), ("a", "float32", (4,), 64)], 128, "same name"),
        ([("", "float32", (4,), 0)], 64, "no name"),
        ([("a", "float33", (4,), 0)], 64, "unknown dtype 'float33'"),
        ([("a", "__import__", (4,), 0)], 64, "unknown dtype"),
        ([("a", "float32", (-4,), 0)], 64, "impossible shape"),
        ([("a", "float32", (1,) * 65, 0)], 64, "impossible shape"),
        ([("a", "float32", (4,), 4)], 64, "offset 4 is not a multiple of 64"),
        ([("a", "float32", (4,), -64)], 64, "offset -64"),
        ([("a", "float32", (17,), 0)], 64, "ends at byte 68 of 64"),
        ([("a", "int8", (1 << 62, 1 << 62), 0)], 64, "ends at byte"),
        ([("a", "float32", (32,), 0), ("b", "float32", (16,), 64)], 128, "a and b overlap"),
        ([("a", "float32", (16,), 0), ("b", "int32", (16,), 0)], 64, "overlap"),
        ([("a", "float32", (16,), 0)], 1 << 40, "belong to nothing"),
        ([("a", "float32", (16,), 128)], 192, "belong to nothing"),
    ],
)
def test_a_lying_manifest_is_refused_with_the_reason(entries: list[tuple], total_bytes: int, reason: str) -> None:
    manifest = Manifest(total_bytes=total_bytes, entries=tuple(TensorEntry(*entry) for entry in entries))
    with pytest.raises(ManifestError, match=reason):
        manifest.validate()
