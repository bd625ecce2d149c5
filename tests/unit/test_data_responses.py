"""The answer of one trajectory: what may be added to it, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.data.responses import Refused, Response, cut
from laminar.schema.tokens import pack_ids, pack_logprobs, unpack_logprobs
from laminar.schema.trajectories import Piece, join_pieces, num_generated, num_tokens, response_ids


def piece(ids: list[int], *, generated: bool = True, version: int = 3) -> Piece:
    logprobs = pack_logprobs([-float(i) for i in ids])
    return Piece(token_ids=pack_ids(ids), logprobs=logprobs, generated=generated, version=version)


ANSWER = [(list(range(5)), True), (list(range(5, 7)), False), (list(range(7, 12)), True)]
"""Twelve tokens: the model's, the environment's, the model's."""


def answer(start: int, stop: int) -> tuple[Piece, ...]:
    pieces = [piece([i for i in ids if start <= i < stop], generated=generated) for ids, generated in ANSWER]
    return tuple(p for p in pieces if p.token_ids)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12))))
def test_any_order_of_resends_gives_the_answer_or_is_refused(spans: list[tuple[int, int]]):
    response, known = Response(), 0
    for a, b in spans:
        start, stop = min(a, b), max(a, b)
        if start > known:
            with pytest.raises(Refused, match=f"tokens {known} to {start} are missing"):
                response.extend(start, answer(start, stop), 3)
        else:
            new = response.extend(start, answer(start, stop), 3)
            assert response_ids(new) == list(range(known, stop))
            known = max(known, stop)
        assert response_ids(response.pieces()) == list(range(known))
        assert response.num_tokens == num_tokens(response.pieces()) == known
        assert response.num_generated == num_generated(response.pieces())
        assert [p.generated for p in response.pieces()] == [p.generated for p in answer(0, known)]
        assert unpack_logprobs(b"".join(p.logprobs for p in response.pieces())) == [-float(i) for i in range(known)]


@given(st.integers(0, 13))
def test_cut_takes_tokens_from_the_front(num: int):
    assert response_ids(cut(answer(0, 12), num)) == list(range(num, 12))


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.booleans(), st.integers(0, 1)), max_size=8))
def test_pieces_are_merged_like_the_schema_merges_them(parts: list[tuple[list[int], bool, int]]):
    pieces = tuple(piece(ids, generated=generated, version=version) for ids, generated, version in parts if ids)
    assert Response(pieces).pieces() == join_pieces((), pieces)


def test_tokens_of_another_version_are_refused():
    response = Response()
    with pytest.raises(Refused, match="version 4 in a lease of version 3"):
        response.extend(0, (piece([1], version=4),), 3)
    response.extend(0, (piece([1]),), 3)
    with pytest.raises(Refused, match="goes on under version 4"):
        response.extend(1, (piece([2], version=4),), 4)
    assert response_ids(response.pieces()) == [1]


def test_a_resend_that_differs_is_refused():
    response = Response((piece([1, 2, 3]),))
    with pytest.raises(Refused, match="from 1 on differ"):
        response.extend(1, (piece([2, 9]),), 3)
    assert response.extend(1, (piece([2, 3, 4]),), 3) == (piece([4]),)


def test_tokens_without_their_logprobs_are_refused():
    torn = Piece(token_ids=pack_ids([1, 2]), logprobs=pack_logprobs([0.0]), generated=True, version=3)
    with pytest.raises(Refused, match="differ in number"):
        Response().extend(0, (torn,), 3)
