"""docs/configuration.md, generated from the schema: `python -m laminar.config.docs` writes it.

Invariant: every key is there, with its type, its default and the docstring that stands below it in the code; a test
compares the committed file with what this module generates.
"""

import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from laminar.config.base import DottedPath, kind_of, sections_of
from laminar.config.run_config import RunConfig, SamplingConfig

_HEAD = """\
# Configuration

Every key of a recipe, generated from `src/laminar/config/` by `python -m laminar.config.docs`. A recipe is a YAML file
of these sections; `laminar train RECIPE key.sub=value ...` overrides single keys. Unknown keys are errors. Paths are
relative to the recipe. `laminar train RECIPE --explain` prints what follows from the values.
"""

_USED_TWICE = (SamplingConfig,)
"""Sections whose own docstring does not say what they are for; the docstrings of their fields do."""


def configuration_page() -> str:
    """The whole page."""
    lines = [_HEAD]
    own, sections = _split(RunConfig)
    lines += _table("", own)
    for name, field in sections:
        lines += _section(name, field, level=2)
    return "\n".join(lines).rstrip() + "\n"


def _section(path: str, field: FieldInfo, level: int) -> list[str]:
    """A section and those below it; of a union each alternative by its `kind`."""
    alternatives = sections_of(field.annotation)
    title = f"{'#' * level} `{path}`"
    if len(alternatives) == 1:
        model = alternatives[0]
        text = _sentence(field.description) if model in _USED_TWICE else _first(model)
        return [title, "", text, "", *_section_body(path, model, level)]
    lines = [title, "", _sentence(field.description), ""]
    default = field.get_default(call_default_factory=True)
    chosen = "" if default is None else f" The default is `kind: {default.kind}`."
    lines += [f"One of these, chosen by `{path}.kind`.{chosen}", ""]
    for model in alternatives:
        lines += [f"{'#' * (level + 1)} `{path}`, `kind: {kind_of(model)}`", "", _first(model), ""]
        lines += _section_body(path, model, level + 1)
    return lines


def _section_body(path: str, model: type[BaseModel], level: int) -> list[str]:
    own, sections = _split(model)
    lines = _table(path, [(name, field) for name, field in own if name != "kind"])
    for name, field in sections:
        lines += _section(f"{path}.{name}", field, level + 1)
    return lines


def _split(model: type[BaseModel]) -> tuple[list[tuple[str, FieldInfo]], list[tuple[str, FieldInfo]]]:
    """Fields that are values, and fields that are sections."""
    fields = list(model.model_fields.items())
    sections = [(name, field) for name, field in fields if sections_of(field.annotation)]
    return [(name, field) for name, field in fields if not sections_of(field.annotation)], sections


def _table(path: str, fields: list[tuple[str, FieldInfo]]) -> list[str]:
    if not fields:
        return []
    prefix = f"{path}." if path else ""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in fields:
        cells = [f"`{prefix}{name}`", _type_text(field), _default_text(field), _sentence(field.description)]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return [*lines, ""]


def _type_text(field: FieldInfo) -> str:
    # Pydantic takes the outermost Annotated apart.
    whole = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return _annotation_text(whole)


def _annotation_text(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_annotation_text(argument) for argument in arguments if argument is not NoneType)
    if annotation == DottedPath:
        return "`module:name`"
    if origin is Annotated:
        return f"{_annotation_text(arguments[0])} {_bounds_text(list(arguments[1:]))}".strip()
    names = {int: "integer", float: "number", bool: "true or false", str: "text", Path: "path"}
    return names.get(annotation, "mapping" if origin is dict else str(annotation))


def _bounds_text(metadata: list[Any]) -> str:
    bounds = []
    for entry in metadata:
        match entry:
            case annotated_types.Gt(gt=bound):
                bounds.append(f"> {bound}")
            case annotated_types.Ge(ge=bound):
                bounds.append(f">= {bound}")
            case annotated_types.Lt(lt=bound):
                bounds.append(f"< {bound}")
            case annotated_types.Le(le=bound):
                bounds.append(f"<= {bound}")
    return ", ".join(bounds)


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    default = field.get_default(call_default_factory=True)
    match default:
        case None:
            return "none"
        case bool():
            return f"`{str(default).lower()}`"
        case {}:
            return "`{}`"
        case _:
            return f"`{default}`"


def _sentence(description: str | None) -> str:
    return " ".join((description or "").split())


def _first(model: type[BaseModel]) -> str:
    return _sentence(model.__doc__)


def main() -> None:
    """Write the page to the path given, by default docs/configuration.md."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/configuration.md")
    path.write_text(configuration_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
