"""What every section of the configuration has in common."""

import re
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


def _dotted(value: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
        raise ValueError("must look like module:Name")
    return value


DottedPath = Annotated[str, AfterValidator(_dotted)]
"""Something of the user's own, as `module:Name`; whether it can be imported shows when it is."""


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """The section, or the alternatives, that a field holds; [] for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return [section for argument in get_args(annotation) for section in sections_of(argument)]
    return []


def kind_of(section: type[BaseModel]) -> str:
    """The value of `kind` that chooses this alternative."""
    return str(section.model_fields["kind"].default)
