"""One trajectory while it runs on this replica: what is answered, what the pool already knows, what comes next.

Invariant: tokens are only ever appended; `take_unsent` hands each of them out once.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from laminar.engines.protocol import Request
from laminar.schema.tokens import pack_ids, pack_logprobs, unpack_ids
from laminar.schema.trajectories import (
    Append,
    Piece,
    Pieces,
    Sampling,
    StopReason,
    WorkItem,
    join_pieces,
    num_tokens,
    response_ids,
)
from laminar.tasks.protocol import Problem

NextStep = Literal["generate", "turn_over"]


class EpisodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When an answer ends at the latest."""

    max_new_tokens: int
    max_turns: int
    stop_token_ids: tuple[int, ...]


class RunningTrajectory:
    """The mutable side of a `WorkItem`."""

    def __init__(self, item: WorkItem, version: int) -> None:
        self.item = item
        self.problem = msgspec.convert(item.prompt.payload, Problem)
        self._version = version
        self._pieces: Pieces = item.pieces
        self._unsent: Pieces = ()
        self._num_tokens = num_tokens(item.pieces)
        self._num_unsent = 0

    @property
    def num_tokens(self) -> int:
        """Answer length, environment tokens included."""
        return self._num_tokens

    @property
    def num_unsent(self) -> int:
        """Tokens that the partial response pool does not know yet."""
        return self._num_unsent

    @property
    def pieces(self) -> Pieces:
        """Everything answered so far."""
        return join_pieces(self._pieces, self._unsent)

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Take in tokens that the model drew."""
        self._append(pack_ids(token_ids), pack_logprobs(logprobs), generated=True)

    def reply(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that the environment put into the context."""
        self._append(pack_ids(token_ids), pack_logprobs([0.0] * len(token_ids)), generated=False)

    def take_unsent(self) -> Append | None:
        """The tokens that the pool has not seen; None if there are none."""
        if not self._num_unsent:
            return None
        update = Append(
            trajectory_id=self.item.trajectory_id,
            attempt=self.item.attempt,
            offset=self._num_tokens - self._num_unsent,
            pieces=self._unsent,
        )
        self._pieces, self._unsent, self._num_unsent = self.pieces, (), 0
        return update

    def request(self, limits: EpisodeLimits, sampling: Sampling) -> Request:
        """What the engine must do to go on."""
        prompt_ids = self.item.prompt.token_ids
        return Request(
            request_id=self.item.trajectory_id,
            group_id=self.item.group_id,
            token_ids=(*prompt_ids, *response_ids(self.pieces)),
            num_shared=len(prompt_ids),
            num_answered=self._num_tokens,
            max_new_tokens=limits.max_new_tokens - self._num_tokens,
            stop_token_ids=limits.stop_token_ids,
            sampling=sampling,
            seed=self.item.seed,
        )

    def _append(self, ids: bytes, logprobs: bytes, *, generated: bool) -> None:
        piece = Piece(token_ids=ids, logprobs=logprobs, generated=generated, version=self._version)
        self._unsent = join_pieces(self._unsent, (piece,))
        self._num_tokens += piece.num_tokens
        self._num_unsent += piece.num_tokens


def next_step(pieces: Pieces, limits: EpisodeLimits) -> NextStep:
    """Whether the model goes on, or its turn is over and environment or grader come next.

    Decides from the tokens alone, so that a trajectory taken up elsewhere goes on exactly where it stood.
    """
    if num_tokens(pieces) >= limits.max_new_tokens:
        return "turn_over"
    last = pieces[-1] if pieces else None
    if last is None or not last.generated:
        return "generate"
    return "turn_over" if unpack_ids(last.token_ids[-4:])[0] in limits.stop_token_ids else "generate"


def model_turns(pieces: Pieces) -> list[list[int]]:
    """Token ids of each turn of the model, in order."""
    return [unpack_ids(piece.token_ids) for piece in pieces if piece.generated]


def stop_reason(pieces: Pieces, limits: EpisodeLimits) -> StopReason:
    """Why a finished single-turn answer ended."""
    ids = response_ids(pieces)
    return "stop" if ids and ids[-1] in limits.stop_token_ids else "length"
