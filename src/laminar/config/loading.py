"""From a recipe file and `key.sub=value` overrides to a RunConfig, or one sentence per mistake."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from laminar.config.run_config import RunConfig
from laminar.schema.errors import ConfigError

_UNION_TAGS = frozenset({"torch", "scripted", "custom", "constrained-int", "literal['auto']"})


def load_recipe(recipe: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe; raises `ConfigError` with one sentence per mistake, each naming its dotted path."""
    values = _read_yaml(recipe)
    for override in overrides:
        _apply_override(values, override)
    config = parse_config(values, source=str(recipe))
    return _with_absolute_paths(config, recipe.resolve().parent)


def parse_config(values: dict[str, Any], *, source: str) -> RunConfig:
    """Validate plain values; `source` names them in messages."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        sentences = [_sentence(dict(detail)) for detail in error.errors()]
        raise ConfigError(f"{source}: " + "; ".join(sentences)) from None


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; loading it again gives the same value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


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


def _sentence(detail: dict[str, Any]) -> str:
    """One mistake in one sentence; union tags that pydantic puts into the location are left out."""
    location = tuple(part for part in detail["loc"] if part not in _UNION_TAGS)
    dotted = ".".join(str(part) for part in location)
    match detail["type"]:
        case "extra_forbidden":
            return f"{dotted} is not a known key{_suggestion(location)}"
        case "missing":
            return f"{dotted} is missing"
        case "value_error":
            text = str(detail["ctx"]["error"])
            return f"{dotted}: {text}" if dotted else text
        case _:
            return f"{dotted}: {detail['msg'][:1].lower()}{detail['msg'][1:]}, got {detail['input']!r}"


def _suggestion(location: tuple[Any, ...]) -> str:
    names = _field_names(location[:-1])
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known here: {', '.join(names)}" if names else ""


def _field_names(location: tuple[Any, ...]) -> list[str]:
    section: type[BaseModel] = RunConfig
    for part in location:
        field = section.model_fields.get(str(part))
        if field is None:
            return []
        candidates = [field.annotation, *get_args(field.annotation)]
        sections = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not sections:
            return []
        section = sections[0]
    return list(section.model_fields)
