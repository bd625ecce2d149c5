"""Problems from a file of prompts, graded by a function of the user's.

Invariant: a row is either a well-formed problem or an error that names file and row; none is skipped.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from laminar.schema.errors import UserError
from laminar.schema.trajectories import Grade
from laminar.tasks.loading import load_object
from laminar.tasks.protocol import Problem, Split

Row = tuple[int, dict[str, Any]]
"""Line or row number, counted from 1, and its fields."""


class PromptFileTask:
    """Prompts from JSONL, Parquet or a Hugging Face dataset saved on disk.

    `reward` is the dotted path of a function `(payload, answer) -> float`; `payload` holds all fields of the row but
    the prompt and the id. The prompt is a text or a list of chat messages. Without `id_field` a problem is named after
    its file and line. Relative paths are looked for like modules: in the current directory and the recipe's folder.
    `heldout_fraction` sets rows of the training file aside by a hash of their id, so adding rows moves no other row.
    """

    def __init__(
        self,
        train: str,
        reward: str,
        heldout: str | None = None,
        prompt_field: str = "prompt",
        id_field: str | None = None,
        heldout_fraction: float = 0.0,
    ) -> None:
        if not 0.0 <= heldout_fraction < 1.0:
            raise UserError(f"heldout_fraction must be at least 0 and below 1, but is {heldout_fraction}.")
        if heldout is not None and heldout_fraction > 0:
            raise UserError(
                "Give either heldout (a file) or heldout_fraction (a share of the training file), not both."
            )
        self._train = train
        self._heldout = heldout
        self._prompt_field = prompt_field
        self._id_field = id_field
        self._heldout_fraction = heldout_fraction
        self._reward: Callable[[dict[str, Any], str], float | Grade] = load_object(reward)
        if not callable(self._reward):
            raise UserError(f"{reward} is not a function; the reward must be called as reward(payload, answer).")

    def problems(self, split: Split) -> Sequence[Problem]:
        """Problems in the order of the file; reads it at every call."""
        if split == "heldout" and self._heldout is not None:
            return self._read(self._heldout)
        if split == "heldout" and self._heldout_fraction == 0:
            return []
        want_heldout = split == "heldout"
        return [p for p in self._read(self._train) if self._is_held_out(p.problem_id) == want_heldout]

    def grade(self, problem: Problem, answer: str) -> float | Grade:
        """Whatever the user's function says."""
        return self._reward(problem.payload, answer)

    def _is_held_out(self, problem_id: str) -> bool:
        digest = int.from_bytes(blake2b(problem_id.encode(), digest_size=8).digest(), "big")
        return digest < self._heldout_fraction * 2**64

    def _read(self, path: str) -> list[Problem]:
        file = _find(path)
        first_row: dict[str, int] = {}
        problems = []
        for number, fields in _rows(file):
            problem = self._problem(fields, file=file, number=number)
            known = first_row.setdefault(problem.problem_id, number)
            if known != number:
                raise UserError(
                    f"{file}:{number}: the id {problem.problem_id!r} was already used in line {known}; "
                    f"ids must be unique."
                )
            problems.append(problem)
        if not problems:
            raise UserError(f"{file} holds no prompts.")
        return problems

    def _problem(self, fields: dict[str, Any], *, file: Path, number: int) -> Problem:
        where = f"{file}:{number}"
        prompt = _prompt(_take(fields, self._prompt_field, where), where=where, field=self._prompt_field)
        problem_id = f"{file.name}:{number}"
        if self._id_field is not None:
            problem_id = str(_take(fields, self._id_field, where))
        # Parquet has values that JSON has not, such as dates; they become text.
        payload = msgspec.to_builtins(fields)
        return Problem(problem_id=problem_id, prompt=prompt, payload=payload)


def _take(fields: dict[str, Any], name: str, where: str) -> Any:
    if fields.get(name) is None:
        raise UserError(f"{where}: the field {name!r} is missing; this row has {', '.join(fields) or 'no fields'}.")
    return fields.pop(name)


def _prompt(value: Any, *, where: str, field: str) -> str | tuple[dict[str, str], ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return tuple({"role": message["role"], "content": message["content"]} for message in value)
    raise UserError(
        f"{where}: the field {field!r} must be a text or a list of messages like "
        f'{{"role": "user", "content": "..."}}, but is {str(value)[:60]!r}.'
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _find(path: str) -> Path:
    folders = [Path.cwd(), *map(Path, sys.path)]
    for folder in folders:
        if (folder / path).exists():
            return folder / path
    if Path(path).is_absolute():
        raise UserError(f"{path} does not exist; give the path of a .jsonl or .parquet file or of a saved dataset.")
    raise UserError(f"{path} lies neither in the current directory {Path.cwd()} nor in the recipe's folder.")


def _rows(file: Path) -> Iterator[Row]:
    if file.is_dir():
        return _dataset_rows(file)
    reader = READERS.get(file.suffix)
    if reader is None:
        raise UserError(f"{file}: prompts are read from {', '.join(READERS)} files or from a saved dataset's folder.")
    return reader(file)


def _jsonl_rows(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise UserError(f"{file}:{number}: not JSON ({error}); each line must be one JSON object.") from error
            if not isinstance(fields, dict):
                raise UserError(f"{file}:{number}: each line must be one JSON object, not a {type(fields).__name__}.")
            yield number, fields


def _parquet_rows(file: Path) -> Iterator[Row]:
    parquet = _import("pyarrow.parquet", extra="parquet", file=file)
    number = 0
    with parquet.ParquetFile(file) as table:
        for batch in table.iter_batches():
            for fields in batch.to_pylist():
                number += 1
                yield number, fields


def _dataset_rows(folder: Path) -> Iterator[Row]:
    datasets = _import("datasets", extra="datasets", file=folder)
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        raise UserError(
            f"{folder} holds several datasets; name one of them: {', '.join(f'{folder}/{s}' for s in splits)}."
        )
    try:
        dataset = datasets.load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise UserError(f"{folder} is not a dataset saved with save_to_disk.") from error
    for number, fields in enumerate(dataset, start=1):
        yield number, dict(fields)


def _import(module: str, *, extra: str, file: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"Reading {file} needs {module}: pip install laminar-rl[{extra}]") from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
