"""Changes between versions are exact, small where little changed, and harmless where they are forged."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.relay import delta
from laminar.relay.chain_messages import VersionKey
from laminar.relay.delta import PROBE_BYTES, DeltaEncoder
from laminar.relay.frames import BadFrame


def view(words) -> memoryview:
    return memoryview(np.ascontiguousarray(words, np.uint16)).cast("B")


def changed(num_words: int, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << 16, num_words).astype(np.uint16)
    new = old.copy()
    new[rng.random(num_words) < share] ^= 1
    return old, new


@given(st.integers(1, 70_000), st.sampled_from([0.0, 1e-5, 1e-3, 0.01, 0.1, 0.3]), st.integers(0, 5))
def test_changes_give_back_every_bit_whatever_their_gaps(num_words, share, seed):
    old, new = changed(num_words, share, seed)
    changes = delta.encode(view(old), view(new))
    if changes is None:
        assert share > 0.09 or num_words < 100, "few words do not pay for the header"
        return
    into = np.zeros_like(old)
    delta.apply(memoryview(changes), view(old), view(into))
    assert (into == new).all()


@pytest.mark.parametrize("gap", [254, 255, 256, 257, 65_534, 65_535, 65_536, 65_537, 140_000])
def test_gaps_at_the_limit_of_their_width_are_exact(gap):
    old = np.zeros(300_000, np.uint16)
    new = old.copy()
    new[[0, gap, 2 * gap]] = 7
    changes = delta.encode(view(old), view(new))
    into = np.ones_like(old)
    delta.apply(memoryview(changes), view(old), view(into))
    assert (into == new).all()


def test_one_percent_of_changes_takes_less_than_two_percent_of_the_bytes():
    old, new = changed(1 << 19, 0.01)
    assert len(delta.encode(view(old), view(new))) < 0.02 * old.nbytes


def test_an_encoder_gives_up_on_dense_changes_and_answers_the_same_again():
    encoder = DeltaEncoder(VersionKey(1, 1))
    old, new = changed(1 << 18, 1.0)
    for index in range(20):
        assert encoder.encode(index, view(old), view(new)) is None
    sparse_old, sparse_new = changed(1 << 18, 0.001)
    assert (20 * old.nbytes) > PROBE_BYTES
    assert encoder.encode(20, view(sparse_old), view(sparse_new)) is None, "it has stopped looking"
    fresh = DeltaEncoder(VersionKey(1, 1))
    first = fresh.encode(0, view(sparse_old), view(sparse_new))
    assert first is not None
    assert fresh.encode(0, view(old), view(new)) is first
    assert fresh.num_bytes == len(first)


def test_an_encoder_gives_up_where_the_link_is_faster_than_the_search_and_not_where_it_is_slower():
    old, new = changed(1 << 19, 0.01)
    for bytes_per_s, goes_on in ((1e13, False), (5e7, True), (0.0, True)):
        encoder = DeltaEncoder(VersionKey(1, 1), bytes_per_s)
        found = [encoder.encode(index, view(old), view(new)) for index in range(300)]
        assert (found[-1] is not None) == goes_on
        assert found[0] is not None


@given(st.binary(max_size=80))
def test_forged_changes_are_refused_or_stay_inside_the_chunk(noise):
    memory = np.zeros(96, np.uint16)
    with contextlib.suppress(BadFrame):
        delta.apply(memoryview(bytearray(noise)), view(np.zeros(32, np.uint16)), view(memory[32:64]))
    assert not memory[:32].any()
    assert not memory[64:].any()


def test_changes_beyond_the_chunk_are_refused():
    changes = delta.HEADER.pack(1, 2) + bytes([200, 200]) + bytes(4)
    with pytest.raises(BadFrame, match="reach word 401 of 64"):
        delta.apply(memoryview(changes), view(np.zeros(64)), view(np.zeros(64)))
