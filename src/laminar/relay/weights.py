"""A weight version mapped into this process."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Zero-copy, read-only tensors of one version, by Hugging Face name; valid while their lease is open."""

    version: int
    tensors: Mapping[str, Any]
