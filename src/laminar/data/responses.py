"""The answer of one trajectory as far as it is known."""

from itertools import groupby

from laminar.schema.tokens import ITEM_BYTES
from laminar.schema.trajectories import Piece, Pieces, num_tokens


class Refused(Exception):
    """An append that cannot be true; the text says why."""


class Response:
    """Tokens in order, without gaps; `version` is that of the last generated one."""

    __slots__ = ("_pieces", "num_generated", "num_tokens", "version")

    def __init__(self, pieces: Pieces = ()) -> None:
        self._pieces: list[Piece] = []
        self.num_tokens = 0
        self.num_generated = 0
        self.version: int | None = None
        for piece in pieces:
            self.add(piece)

    def add(self, piece: Piece) -> None:
        """Put a piece at the end, unchecked."""
        length = piece.num_tokens
        self._pieces.append(piece)
        self.num_tokens += length
        if piece.generated:
            self.num_generated += length
            self.version = piece.version

    def extend(self, offset: int, pieces: Pieces, version: int, *, mixes_versions: bool = False) -> Pieces:
        """Take in pieces, drawn under `version`, that begin `offset` tokens into the answer; returns what is new.

        What is known already is skipped if it is the same. An answer goes on under the version that began it, unless
        it `mixes_versions`. Raises `Refused`, and then nothing has changed.
        """
        for piece in pieces:
            if len(piece.token_ids) != len(piece.logprobs) or len(piece.token_ids) % ITEM_BYTES:
                raise Refused("its token ids and log-probs differ in number")
            if piece.generated and piece.version != version:
                raise Refused(f"it has tokens of version {piece.version} in a lease of version {version}")
        if self.version not in (None, version) and not mixes_versions:
            raise Refused(f"it goes on under version {version} after tokens of version {self.version}")
        if offset > self.num_tokens:
            raise Refused(f"its tokens {self.num_tokens} to {offset} are missing")
        if offset < self.num_tokens:
            pieces = self._cut_known(offset, pieces)
        new = tuple(piece for piece in pieces if piece.token_ids)
        for piece in new:
            self.add(piece)
        return new

    def pieces(self) -> Pieces:
        """The answer, merged where origin and version agree."""
        if len(self._pieces) > 1:
            self._pieces = _merged(self._pieces)
        return tuple(self._pieces)

    def _cut_known(self, offset: int, pieces: Pieces) -> Pieces:
        num_known = min(num_tokens(pieces), self.num_tokens - offset)
        start, stop = offset * ITEM_BYTES, (offset + num_known) * ITEM_BYTES
        ours = b"".join(piece.token_ids for piece in self._pieces)[start:stop]
        theirs = b"".join(piece.token_ids for piece in pieces)[: stop - start]
        if ours != theirs:
            raise Refused(f"its tokens from {offset} on differ from those that were sent before")
        return cut(pieces, num_known)


def cut(pieces: Pieces, num: int) -> Pieces:
    """What is left of pieces without their first `num` tokens."""
    left = []
    for piece in pieces:
        at = min(num, piece.num_tokens)
        num -= at
        start = at * ITEM_BYTES
        left.append(_piece_like(piece, piece.token_ids[start:], piece.logprobs[start:]))
    return tuple(left)


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Like `schema.join_pieces`, but linear in the number of pieces."""
    runs = [list(run) for _, run in groupby(pieces, key=lambda piece: (piece.generated, piece.version))]
    return [_piece_like(run[0], b"".join(p.token_ids for p in run), b"".join(p.logprobs for p in run)) for run in runs]


def _piece_like(piece: Piece, token_ids: bytes, logprobs: bytes) -> Piece:
    return Piece(token_ids=token_ids, logprobs=logprobs, generated=piece.generated, version=piece.version)
