"""Numbers as people read them; used by the live view, the plain lines and `status` alike."""

from collections.abc import Sequence
from itertools import pairwise

_BLOCKS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def elapsed(seconds: float) -> str:
    """`01:23` or `2:01:23`."""
    whole = max(0, int(seconds))
    hours, minutes, rest = whole // 3_600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def count(number: float) -> str:
    """`831`, `3.4k`, `12M`: two to three digits and a unit."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * size:
            scaled = number / size
            return f"{scaled:.1f}{unit}" if abs(scaled) < 9.95 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}" if abs(number) >= 9.95 or number == int(number) else f"{number:.1f}"


def fixed(number: float | None, digits: int = 2) -> str:
    """A number with so many decimals; a dash for what could not be measured."""
    return "–" if number is None else f"{number:.{digits}f}"


def percent(share: float) -> str:
    """`37%`; a share too small to round to 1 % is not shown as nothing."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def plural(number: int, word: str) -> str:
    """`1 repack`, `2 repacks`, `2 trajectories`."""
    many = f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
    return f"{number} {word if number == 1 else many}"


def bar(fraction: float, width: int) -> str:
    """A horizontal bar, exact to an eighth of a character."""
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def sparkline(values: Sequence[float], width: int, *, low: float | None = None, high: float | None = None) -> str:
    """The last values as a row of blocks; more values than `width` are averaged."""
    if not values:
        return ""
    shown = _averaged(values, width)
    low = min(shown) if low is None else low
    high = max(shown) if high is None else high
    span = (high - low) or 1.0
    last = len(_BLOCKS) - 1
    return "".join(_BLOCKS[min(last, max(0, round((value - low) / span * last)))] for value in shown)


def _averaged(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
