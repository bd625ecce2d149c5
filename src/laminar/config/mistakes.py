"""What pydantic says about a configuration, as sentences that name the dotted key.

Invariant: one sentence per key, whatever number of alternatives its value failed to be.
"""

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from laminar.config.base import kind_of, sections_of


def sentences(details: Iterable[Any], root: type[BaseModel]) -> list[str]:
    """One sentence per mistake in values for `root`, from `ValidationError.errors()`."""
    by_key: dict[str, list[dict[str, Any]]] = {}
    for detail in details:
        dotted, _ = _locate(detail["loc"], root)
        by_key.setdefault(dotted, []).append(dict(detail))
    return [_sentence(dotted, found, root) for dotted, found in by_key.items()]


def _sentence(dotted: str, details: list[dict[str, Any]], root: type[BaseModel]) -> str:
    first = details[0]
    match first["type"]:
        case "extra_forbidden":
            return f"{dotted} is not a known key{_suggestion(first['loc'], root)}"
        case "missing":
            return f"{dotted} is missing"
        case "union_tag_not_found":
            return f"{dotted}.kind is missing; it is one of {', '.join(_kinds(first['loc'], root))}"
        case "union_tag_invalid":
            return (
                f"{dotted}.kind is {first['ctx']['tag']!r}; it must be one of {', '.join(_kinds(first['loc'], root))}"
            )
        case "value_error" if not dotted or isinstance(first["input"], dict):
            text = str(first["ctx"]["error"])
            return f"{dotted}: {text}" if dotted else text
        case _:
            wanted = ", or ".join(_wanted(detail) for detail in details)
            return f"{dotted}: {wanted}, got {first['input']!r}"


def _wanted(detail: dict[str, Any]) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    message = str(detail["msg"]).removeprefix("Input ")
    return message[:1].lower() + message[1:]


def _suggestion(location: tuple[Any, ...], root: type[BaseModel]) -> str:
    _, section = _locate(location[:-1], root)
    names = list(section.model_fields) if section else []
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known here: {', '.join(names)}" if names else ""


def _kinds(location: tuple[Any, ...], root: type[BaseModel]) -> list[str]:
    _, section = _locate(location[:-1], root)
    assert section is not None
    return [kind_of(alternative) for alternative in sections_of(section.model_fields[str(location[-1])].annotation)]


def _locate(location: tuple[Any, ...], root: type[BaseModel]) -> tuple[str, type[BaseModel] | None]:
    """The dotted key of pydantic's location, and the section that it names, if it names one.

    Pydantic puts the alternative that it tried into the location; that is not part of the key.
    """
    keys: list[str] = []
    section: type[BaseModel] | None = root
    alternatives: dict[Any, type[BaseModel]] = {}
    for part in location:
        if section is None:
            section = alternatives.get(part)
            continue
        keys.append(str(part))
        field = section.model_fields.get(str(part))
        below = sections_of(field.annotation) if field else []
        section = below[0] if len(below) == 1 else None
        alternatives = {kind_of(one): one for one in below} if len(below) > 1 else {}
    return ".".join(keys), section
