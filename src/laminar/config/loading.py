"""From a recipe file and `key.sub=value` overrides to a RunConfig, or one sentence per mistake."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from laminar.config.base import sections_of
from laminar.config.mistakes import sentences
from laminar.config.run_config import RunConfig
from laminar.config.simulation import SimulationConfig
from laminar.schema.errors import ConfigError

Root = TypeVar("Root", bound=BaseModel)


def load_recipe(recipe: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe; raises `ConfigError` with one sentence per mistake, each naming its dotted path."""
    config = parse_config(_values(recipe, overrides, RunConfig), source=str(recipe))
    return _with_absolute_paths(config, recipe.resolve().parent)


def load_simulation(settings: Path | None, overrides: Sequence[str] = ()) -> SimulationConfig:
    """Settings of a simulation from a YAML file, or the defaults; errors as in `load_recipe`."""
    source = str(settings) if settings else "simulate"
    return _validated(SimulationConfig, _values(settings, overrides, SimulationConfig), source)


def parse_config(values: dict[str, Any], *, source: str) -> RunConfig:
    """Validate plain values; `source` names them in messages."""
    return _validated(RunConfig, values, source)


def dump_config(config: RunConfig | SimulationConfig) -> str:
    """The resolved configuration as YAML; loading it again gives the same value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _values(file: Path | None, overrides: Sequence[str], root: type[BaseModel]) -> dict[str, Any]:
    values = _without_empty_sections(_read_yaml(file), root) if file else {}
    for override in overrides:
        _apply_override(values, override)
    return values


def _validated(root: type[Root], values: dict[str, Any], source: str) -> Root:
    try:
        return root.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{source}: " + "; ".join(sentences(error.errors(), root))) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"recipe {path} does not exist; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"recipe {path} must be a mapping of sections such as model, task and trainer")
    return values


def _without_empty_sections(values: dict[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """A section whose keys are all commented out is an empty one to the user and None to YAML."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        field = section.model_fields.get(key) if isinstance(key, str) else None
        below = sections_of(field.annotation) if field else []
        if below and value is None:
            continue
        kept[key] = _without_empty_sections(value, below[0]) if below and isinstance(value, dict) else value
    return kept


def _apply_override(values: dict[str, Any], override: str) -> None:
    path, found, text = override.partition("=")
    keys = path.split(".")
    if not found or not all(keys):
        raise ConfigError(f"override {override!r} must look like trainer.num_steps=10")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from None
    node = values
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {key} is a value, not a section")
    node[keys[-1]] = value


def _with_absolute_paths(config: RunConfig, folder: Path) -> RunConfig:
    model_path = folder / config.model.path
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": model_path.resolve()})})
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(
            f"model.path: {config.model.path} has no config.json; give a folder in Hugging Face format "
            "(relative to the recipe)"
        )
    return config
