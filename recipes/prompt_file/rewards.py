"""Rewards for a file of prompts: plain functions of the row's other fields and the model's answer."""

from typing import Any


def last_number_is_right(payload: dict[str, Any], answer: str) -> float:
    """1.0 if what follows the last `#` is the row's `solution`, as in GSM8K and much like it; else 0.0."""
    return float(answer.rpartition("#")[2].strip() == payload["solution"])
