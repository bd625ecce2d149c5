"""Turn whatever a task's `grade` does into a `Grade`.

Invariant: a reward is a finite number or the answer is `Unscorable`, with a reason that points into the user's code.
"""

import math
import numbers
import sysconfig
import traceback
from typing import Any

from laminar.schema.trajectories import Grade, Scored, Unscorable
from laminar.tasks.protocol import Problem, Task


def verdict(task: Task, problem: Problem, answer: str) -> Grade:
    """Call `task.grade` and judge the result; only KeyboardInterrupt and its like get through."""
    try:
        return as_grade(task.grade(problem, answer))
    except (Exception, SystemExit) as error:  # noqa: BLE001  a failure of user code is a value here, never ours
        return Unscorable(reason=f"{type(error).__name__}: {error} ({user_line(error)})")


def as_grade(result: Any) -> Grade:
    """A finite number or a Scored with finite numbers is a reward; everything else says why it is not."""
    match result:
        case Unscorable():
            return result
        case Scored():
            reward, metrics = result.reward, result.metrics
        case _:
            reward, metrics = result, {}
    values = {"the reward": reward, **{f"the metric {name!r}": value for name, value in metrics.items()}}
    checked = {}
    for name, value in values.items():
        number = _number(value)
        if number is None:
            return Unscorable(reason=f"{name} is not a number but a {type(value).__name__}: {value!r:.80}")
        if not math.isfinite(number):
            return Unscorable(reason=f"{name} is {number}")
        checked[name] = number
    return Scored(reward=checked["the reward"], metrics={name: checked[f"the metric {name!r}"] for name in metrics})


def user_line(error: BaseException) -> str:
    """`file:line` of the innermost frame that is neither in the standard library nor in an installed package."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    own = [frame for frame in frames if not frame.filename.startswith((*installed, "<"))]
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno}"


def _number(value: Any) -> float | None:
    """Python and numpy numbers, booleans, and zero-dimensional arrays or tensors."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) else None
