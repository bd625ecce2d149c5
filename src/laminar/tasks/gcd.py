"""The built-in task: the greatest common divisor by repeated subtraction, worked out in plain text.

The prompt `84,36:` has the working `84-36=48,48-36=12,36-12=24,24-12=12#12`. Only the number after `#` is graded, so
the length of an answer is the model's own choice: between one step and almost a hundred.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b

from laminar.schema.errors import UserError
from laminar.tasks.protocol import Problem, Split

HELDOUT_ONE_IN = 8
"""One pair in eight is never trained on."""


class GcdTask:
    """Pairs of different numbers up to `max_number` whose greatest common divisor is at most `max_gcd`.

    `84,36` and `36,84` are two problems of the same split, since they share all steps but the first. The split depends
    on the pair alone, so it does not change with the options.
    """

    def __init__(self, max_number: int = 99, max_gcd: int = 8) -> None:
        if max_number < 3 or max_gcd < 1:
            raise UserError(
                f"GcdTask has no pairs with max_number={max_number} and max_gcd={max_gcd}: use at least 3 and 1."
            )
        self._max_number = max_number
        self._max_gcd = max_gcd

    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems of a split, ordered by a hash, so that any first n of them are a fair sample."""
        numbers = range(1, self._max_number + 1)
        pairs = [
            (a, b)
            for a in numbers
            for b in numbers
            if a != b and math.gcd(a, b) <= self._max_gcd and is_held_out(a, b) == (split == "heldout")
        ]
        return [_problem(a, b) for a, b in sorted(pairs, key=_stable_hash)]

    def grade(self, problem: Problem, answer: str) -> float:
        """1.0 if the right number follows the only `#` and ends the answer, else 0.0. How it was found is free."""
        working, mark, stated = answer.partition("#")
        del working
        return float(mark == "#" and stated == str(problem.payload["gcd"]))


def is_held_out(a: int, b: int) -> bool:
    """Whether this pair, in either order, is kept for evaluation."""
    return _stable_hash((min(a, b), max(a, b))) % HELDOUT_ONE_IN == 0


def subtraction_steps(a: int, b: int) -> list[tuple[int, int, int]]:
    """The steps (larger, smaller, difference) that make both numbers equal; `84,36` takes four."""
    steps = []
    while a != b:
        larger, smaller = max(a, b), min(a, b)
        steps.append((larger, smaller, larger - smaller))
        a, b = smaller, larger - smaller
    return steps


def _problem(a: int, b: int) -> Problem:
    return Problem(problem_id=f"{a},{b}", prompt=f"{a},{b}:", payload={"a": a, "b": b, "gcd": math.gcd(a, b)})


def _stable_hash(pair: tuple[int, int]) -> int:
    """The same on every machine and in every process, unlike `hash` of a string."""
    return int.from_bytes(blake2b(f"{pair[0]},{pair[1]}".encode(), digest_size=8).digest(), "big")
