"""The order of prompts and the seeds of draws: functions of a position, so that one integer is the whole state.

Invariant: within an epoch every prompt comes exactly once; position, seed and number of prompts determine everything,
across restarts, machines and Python versions.
"""

from typing import Final

MASK_64: Final = (1 << 64) - 1
GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: the increment of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""

NUM_ROUNDS: Final = 6
"""Feistel rounds. Four make a pseudo-random permutation of large domains; small ones need some more to look even."""

MIN_HALF_BITS: Final = 3
"""Smallest half of a block: permutations of few points are cut out of one of 64, as tiny networks reach few orders."""


def prompt_at(position: int, num_prompts: int, seed: int, shuffle: bool) -> tuple[int, int]:
    """The epoch and the index of the prompt that is drawn at `position`, counted from 0 over the whole run.

    Each epoch has a permutation of its own, computed point by point: a keyed Feistel network permutes a power of four
    that is at least `num_prompts`, and a point that falls outside is permuted on until it falls inside (cycle walking).
    So time per position and memory do not depend on the size of the data set.
    """
    if num_prompts < 1 or position < 0:
        raise ValueError(f"there is no position {position} in a data set of {num_prompts} prompts")
    epoch, index = divmod(position, num_prompts)
    if not shuffle:
        return epoch, index
    return epoch, _permute(index, num_prompts, key=stable_hash(seed, epoch))


def trajectory_seed(run_seed: int, position: int, member: int) -> int:
    """Seed of one trajectory, 63 bits: member `member` of the group whose prompt was drawn at `position`.

    It does not depend on replica, batch or attempt, so a trajectory that changes hands goes on as it would have.
    """
    return stable_hash(run_seed, position, member) >> 1


def stable_hash(*numbers: int) -> int:
    """64 well-mixed bits of some integers, the same everywhere and for ever (unlike `hash`)."""
    state = len(numbers)
    for number in numbers:
        state = _splitmix64(state ^ _splitmix64(number & MASK_64))
    return state


def _splitmix64(value: int) -> int:
    value = (value + GOLDEN_GAMMA) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def _permute(index: int, size: int, *, key: int) -> int:
    half_bits = max(MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
    point = _feistel(index, half_bits, key)
    while point >= size:
        point = _feistel(point, half_bits, key)
    return point


def _feistel(block: int, half_bits: int, key: int) -> int:
    """A bijection of blocks of 2 x `half_bits` bits, whatever the round function is."""
    mask = (1 << half_bits) - 1
    left, right = block >> half_bits, block & mask
    for round_number in range(NUM_ROUNDS):
        left, right = right, left ^ (_splitmix64(key ^ (round_number << 56) ^ right) & mask)
    return (left << half_bits) | right
