"""Find user code by dotted path and build tasks from a recipe's options.

Invariant: whatever the user wrote wrongly comes back as a `UserError` that says what would be right.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from laminar.schema.errors import UserError
from laminar.tasks.protocol import Task
from laminar.tasks.verdicts import user_line


def load_object(path: str) -> Any:
    """What `package.module:name` names; the module is imported if need be."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise UserError(f"{path!r} is not a dotted path: write it as `package.module:name`.")
    module = _import(module_name, path)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"{path}: {module_name} has no {name!r}{_hint(name, vars(module))}.")
        found = getattr(found, part)
    return found


def build_task(path: str, options: Mapping[str, Any]) -> Task:
    """Construct the task class (or factory) at `path` with `options` as keyword arguments."""
    factory = load_object(path)
    if not callable(factory):
        raise UserError(f"{path} is a {type(factory).__name__}, not a task class.")
    _check_options(path, factory, options)
    task = factory(**options)
    missing = [method for method in ("problems", "grade") if not callable(getattr(task, method, None))]
    if missing:
        raise UserError(
            f"{path} is not a task: {type(task).__name__} lacks the method {' and '.join(missing)} "
            f"(see laminar.tasks.protocol.Task)."
        )
    return cast(Task, task)


def _import(module_name: str, path: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module itself or a package above it is missing, rather than something that it imports.
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{path}: there is no module {error.name!r}; it must be installed, or lie in the recipe's folder or "
                f"the current directory."
            ) from error
        raise UserError(f"{path}: {module_name} needs the module {error.name!r}, which is not installed.") from error
    except Exception as error:
        raise UserError(
            f"{path}: importing {module_name} failed with {type(error).__name__}: {error} ({user_line(error)})."
        ) from error


def _check_options(path: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    accepted = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    listing = f"it accepts {', '.join(accepted)}" if accepted else "it accepts no options"
    for name in options:
        if name not in accepted:
            raise UserError(f"{path} has no option {name!r}{_hint(name, accepted)}: {listing}.")
    for parameter in parameters:
        if parameter.name in accepted and parameter.default is parameter.empty and parameter.name not in options:
            raise UserError(f"{path} needs the option {parameter.name!r}: {listing}.")


def _hint(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
