"""Which bytes have arrived, and what is still to be sent."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from laminar.scheduling.chunks import (
    chunk_range,
    chunks_touching,
    is_covered,
    may_overtake,
    missing_ranges,
    num_chunks,
    num_covered,
    overlap,
    with_range,
)

TOTAL = 60
ranges_st = st.lists(st.tuples(st.integers(0, TOTAL), st.integers(0, TOTAL)), max_size=12)


def covered(pieces: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    ranges: tuple[tuple[int, int], ...] = ()
    for piece in pieces:
        ranges = with_range(ranges, piece)
    return ranges


def bytes_of(ranges: tuple[tuple[int, int], ...] | list[tuple[int, int]]) -> set[int]:
    return {byte for start, end in ranges for byte in range(start, end)}


@given(ranges_st)
def test_a_set_of_ranges_holds_the_bytes_that_were_put_in_and_is_kept_minimal(pieces):
    ranges = covered(pieces)
    assert bytes_of(ranges) == bytes_of(pieces)
    assert num_covered(ranges) == len(bytes_of(pieces))
    assert all(start < end for start, end in ranges)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))


@given(ranges_st, st.tuples(st.integers(0, TOTAL), st.integers(0, TOTAL)))
def test_missing_covered_and_overlapping_bytes_are_what_sets_say(pieces, window):
    ranges, there, wanted = covered(pieces), bytes_of(pieces), bytes_of([window])
    assert bytes_of(missing_ranges(ranges, TOTAL)) == set(range(TOTAL)) - there
    assert is_covered(ranges, window) == (wanted <= there)
    assert bytes_of(overlap(ranges, window)) == there & wanted


@given(st.integers(0, 500), st.integers(1, 70))
def test_chunks_are_all_bytes_once_in_order(total, chunk):
    pieces = [chunk_range(index, total, chunk) for index in range(num_chunks(total, chunk))]
    assert [byte for start, end in pieces for byte in range(start, end)] == list(range(total))


@given(ranges_st, st.integers(1, 70))
def test_a_relay_is_sent_every_chunk_with_a_missing_byte_and_no_other(pieces, chunk):
    missing = missing_ranges(covered(pieces), TOTAL)
    expected = [
        i for i in range(num_chunks(TOTAL, chunk)) if bytes_of([chunk_range(i, TOTAL, chunk)]) & bytes_of(missing)
    ]
    assert chunks_touching(missing, TOTAL, chunk) == expected


def test_a_version_is_overtaken_early_and_only_once():
    assert may_overtake(0, 100, overtook=False)
    assert may_overtake(49, 100, overtook=False)
    assert not may_overtake(50, 100, overtook=False)
    assert not may_overtake(0, 100, overtook=True)


@given(st.integers(1, 400), st.integers(1, 300))
def test_a_trainer_that_publishes_faster_than_the_chain_carries_never_starves_it(transfer, every):
    """A clock in ticks: a version takes `transfer` ticks to send, and a new one appears after every `every` ticks."""
    current, sent, overtook, last_done, longest = 0, 0, False, 0, 0
    for tick in range(8 * transfer):
        newest = tick // every
        if newest > current and may_overtake(sent, transfer, overtook=overtook):
            current, sent, overtook = newest, 0, True
        sent += 1
        if sent >= transfer:
            longest = max(longest, tick + 1 - last_done)
            current, sent, overtook, last_done = max(newest, current + 1), 0, False, tick + 1
    assert longest <= 1.5 * transfer + 1
