"""What is asked, what was answered so far, and how good it was.

Invariant: a trajectory keeps its id for life. Each time it changes hands its attempt number grows by one, and whatever
arrives under an older attempt is fenced.
"""

from typing import Any, Literal

from msgspec import Struct

from laminar.schema.tokens import ITEM_BYTES, unpack_ids

Purpose = Literal["training", "evaluation"]

StopReason = Literal["stop", "length", "aborted", "environment"]
"""Why an answer ended: stop token, length limit, abort by us, or the environment closed the episode."""


class Sampling(Struct, frozen=True, kw_only=True):
    """How tokens are drawn. Temperature 0 is greedy; top_p 1 and top_k 0 cut nothing off.

    Recorded log-probs are those of softmax(logits / temperature) before top-p and top-k (temperature 1 when greedy).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


class Prompt(Struct, frozen=True, kw_only=True):
    """One problem: token ids plus what its task needs to grade an answer."""

    prompt_id: str
    token_ids: tuple[int, ...]
    payload: dict[str, Any]


class Piece(Struct, frozen=True, kw_only=True):
    """Consecutive tokens of one origin: drawn by the model at one version, or put in by the environment.

    `token_ids` and `logprobs` are packed (`schema.tokens`) and equally long; log-probs of environment tokens are 0.
    """

    token_ids: bytes
    logprobs: bytes
    generated: bool
    version: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // ITEM_BYTES


Pieces = tuple[Piece, ...]


def num_tokens(pieces: Pieces) -> int:
    """Length in tokens, environment tokens included."""
    return sum(piece.num_tokens for piece in pieces)


def num_generated(pieces: Pieces) -> int:
    """Tokens drawn by the model."""
    return sum(piece.num_tokens for piece in pieces if piece.generated)


def response_ids(pieces: Pieces) -> list[int]:
    """All token ids after the prompt, in order."""
    return unpack_ids(b"".join(piece.token_ids for piece in pieces))


def versions_of(pieces: Pieces) -> frozenset[int]:
    """Weight versions that drew at least one token; one element except under the `partial` schedule."""
    return frozenset(piece.version for piece in pieces if piece.generated and piece.token_ids)


def join_pieces(first: Pieces, then: Pieces) -> Pieces:
    """Append `then` to `first`, merging where origin and version agree, so that a stream does not fragment."""
    merged = list(first)
    for piece in then:
        last = merged[-1] if merged else None
        if last is not None and (last.generated, last.version) == (piece.generated, piece.version):
            merged[-1] = Piece(
                token_ids=last.token_ids + piece.token_ids,
                logprobs=last.logprobs + piece.logprobs,
                generated=last.generated,
                version=last.version,
            )
        elif piece.token_ids:
            merged.append(piece)
    return tuple(merged)


class WorkItem(Struct, frozen=True, kw_only=True):
    """One trajectory to run or to go on with: the prompt and whatever was already answered.

    `version` is None until the first token is drawn; then it never changes (except under the `partial` schedule).
    `seed` makes the draw reproducible: token i depends on (seed, i) and the logits alone, not on batch or replica.
    """

    trajectory_id: str
    group_id: str
    attempt: int
    prompt: Prompt
    pieces: Pieces
    version: int | None
    seed: int
    purpose: Purpose = "training"


class Batch(Struct, frozen=True, kw_only=True):
    """What one claim or adoption brought; empty if nothing was to be had before the deadline."""

    items: tuple[WorkItem, ...] = ()


class Scored(Struct, frozen=True, kw_only=True, tag="scored"):
    """A graded answer. `metrics` are averaged per step and shown."""

    reward: float
    metrics: dict[str, float] = {}


class Unscorable(Struct, frozen=True, kw_only=True, tag="unscorable"):
    """An answer whose reward could not be computed; never a number."""

    reason: str


Grade = Scored | Unscorable


class Append(Struct, frozen=True, kw_only=True, tag="append"):
    """New pieces of a running trajectory; `offset` counts the response tokens before them, so resending is safe."""

    trajectory_id: str
    attempt: int
    offset: int
    pieces: Pieces


class Finish(Struct, frozen=True, kw_only=True, tag="finish"):
    """A trajectory ended and was graded; all its tokens were appended before."""

    trajectory_id: str
    attempt: int
    stop_reason: StopReason
    grade: Grade


Update = Append | Finish


class Experience(Struct, frozen=True, kw_only=True):
    """A finished, graded trajectory.

    `staleness` is inherent: learner version when it finished minus the version that generated it.
    """

    trajectory_id: str
    pieces: Pieces
    reward: float
    metrics: dict[str, float]
    stop_reason: StopReason
    version: int
    staleness: int


class ExperienceGroup(Struct, frozen=True, kw_only=True):
    """All gradable members of one group, released to the trainer together."""

    group_id: str
    prompt: Prompt
    members: tuple[Experience, ...]
