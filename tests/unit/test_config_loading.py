import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from laminar.config.base import sections_of
from laminar.config.loading import dump_config, load_recipe, parse_config
from laminar.config.run_config import RunConfig
from laminar.scheduling.eviction import EVICTIONS
from laminar.scheduling.sampling import SAMPLERS
from laminar.schema.errors import ConfigError


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {path: model}\ntask: {path: 'my_task:Task'}\n")
    return path


def _mistake(recipe: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, overrides)
    return str(caught.value).removeprefix(f"{recipe}: ")


def _section_types(section: type[BaseModel] = RunConfig) -> set[type[BaseModel]]:
    below = [one for field in section.model_fields.values() for one in sections_of(field.annotation)]
    return {section}.union(*(_section_types(one) for one in below))


def test_two_keys_make_a_run_and_paths_are_relative_to_the_recipe(recipe: Path):
    config = load_recipe(recipe)
    assert config.model.path == recipe.parent / "model"
    assert config.max_groups_ahead == 4 * config.trainer.groups_per_step
    assert config.rollout.engine.kind == "torch"


def test_what_is_dumped_loads_as_the_same_value(recipe: Path):
    engine = "rollout.engine={kind: custom, path: 'a.b:C', options: {depth: 3}}"
    config = load_recipe(recipe, ["trainer.optimizer.lr=1e-5", "manager.repack.max_running=7", engine])
    assert parse_config(yaml.safe_load(dump_config(config)), source="dump") == config
    recipe.with_name("again.yaml").write_text(dump_config(config))
    assert load_recipe(recipe.with_name("again.yaml")) == config


def test_overrides_replace_single_keys_and_the_last_one_counts(recipe: Path):
    with recipe.open("a") as file:
        file.write("trainer: {num_steps: 5, groups_per_step: 8}\n")
    config = load_recipe(recipe, ["trainer.num_steps=6", "trainer.num_steps=7", "data.sampler=freshest"])
    assert (config.trainer.num_steps, config.trainer.groups_per_step, config.data.sampler) == (7, 8, "freshest")


def test_sections_whose_keys_are_all_commented_out_are_empty(recipe: Path):
    with recipe.open("a") as file:
        file.write("trainer:\n  optimizer:\n    # lr: 1\nrollout:\n  engine:\nmanager:\n")
    assert load_recipe(recipe) == load_recipe(recipe, ["manager={}"])
    assert load_recipe(recipe, ["trainer.num_steps=3"]).trainer.num_steps == 3


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.num_step=3", "trainer.num_step is not a known key; did you mean num_steps?"),
        ("rolout.num_replicas=3", "rolout is not a known key; did you mean rollout?"),
        (
            "rollout.engine={kind: scripted, token_z: 3}",
            "rollout.engine.token_z is not a known key; did you mean token_s?",
        ),
        (
            "rollout.engine={kind: scripted, prefill_chunk_tokens: 3}",
            "rollout.engine.prefill_chunk_tokens is not a known key; "
            "known here: kind, max_running, kv_capacity_tokens, token_s",
        ),
        ("rollout.engine={kind: custom}", "rollout.engine.path is missing"),
        ("rollout.engine.max_running=8", "rollout.engine.kind is missing; it is one of torch, scripted, custom"),
        ("rollout.engine.kind=vlm", "rollout.engine.kind is 'vlm'; it must be one of torch, scripted, custom"),
        ("trainer.num_steps=0", "trainer.num_steps: should be greater than 0, got 0"),
        ("trainer.dtype=fp16", "trainer.dtype: should be 'float32' or 'bfloat16', got 'fp16'"),
        (
            "manager.repack.max_running=0",
            "manager.repack.max_running: should be greater than 0, or should be 'auto', got 0",
        ),
        (
            "data.sampler=freshst",
            "data.sampler: should be 'fifo', 'prompt_order', 'freshest', 'bounded_staleness' or 'priority', or must "
            "look like module:Name, got 'freshst'",
        ),
        ("task.path=my_task.Task", "task.path: must look like module:Name, got 'my_task.Task'"),
        ("trainer.algorithm.objective=klip", "trainer.algorithm.objective: should be 'clip', or must look like"),
        ("trainer=3", "trainer: should be a valid dictionary"),
        (
            "schedule=synchronous",
            "schedule: should be 'laminar', 'sync', 'one_step', 'stream' or 'partial', got 'synchronous'",
        ),
        ("schedule=partial", "schedule: partial mixes versions"),
        ("max_lag=2", "max_lag goes with schedule: partial"),
        ("trainer", "override 'trainer' must look like trainer.num_steps=10"),
        ("=3", "override '=3' must look like trainer.num_steps=10"),
        ("trainer.num_steps=[", "override 'trainer.num_steps=[': the value is not valid YAML"),
        ("model.path.x=3", "override 'model.path.x=3': path is a value, not a section"),
        ("model.path=elsewhere", "model.path: "),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_key(recipe: Path, override: str, sentence: str):
    assert _mistake(recipe, override).startswith(sentence)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["rollout.batch_trajectories=15"], ["rollout.batch_trajectories is 15", "data.group_size = 16"]),
        (["data.group_size=1"], ["data.group_size is 1", "trainer.algorithm.advantage = grpo"]),
        (["data.max_groups_ahead=15"], ["data.max_groups_ahead is 15", "trainer.groups_per_step = 16"]),
        (["rollout.max_new_tokens=65536"], ["rollout.engine.kv_capacity_tokens is 65536", "rollout.max_new_tokens"]),
        (["data.max_staleness=2"], ["data.max_staleness goes with data.sampler = bounded_staleness"]),
        (["data.sampler=bounded_staleness"], ["data.max_staleness goes with data.sampler = bounded_staleness"]),
        (["manager.suspect_after_s=0.5"], ["manager.heartbeat_s < manager.suspect_after_s < manager.dead_after_s"]),
        (["manager.suspect_after_s=5"], ["manager.heartbeat_s < manager.suspect_after_s < manager.dead_after_s"]),
        (["manager.min_replicas=3"], ["manager.min_replicas is 3", "rollout.num_replicas is 2"]),
        (["trainer.mini_batches=3"], ["trainer: groups_per_step must be a multiple of mini_batches"]),
    ],
)
def test_keys_that_contradict_each_other_are_named_together(recipe: Path, overrides: list[str], named: list[str]):
    text = _mistake(recipe, *overrides)
    assert all(part in text for part in named), text


def test_just_within_the_rules_is_allowed(recipe: Path):
    load_recipe(recipe, ["rollout.batch_trajectories=16", "data.max_groups_ahead=16", "rollout.max_new_tokens=65535"])
    load_recipe(recipe, ["data.sampler=bounded_staleness", "data.max_staleness=2", "data.group_size=2"])
    load_recipe(recipe, ["data.sampler=my.rules:newest", "data.eviction=my_rules:drop", "manager.min_replicas=2"])


def test_all_mistakes_are_told_at_once(recipe: Path):
    text = _mistake(recipe, "trainer.num_step=3", "rollout.num_replicas=0", "zzz=1")
    assert all(key in text for key in ("trainer.num_step ", "rollout.num_replicas", "zzz is not a known key"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "must be a mapping of sections"),
        ("[1]", "must be a mapping of sections"),
        ("a: [", "is not valid YAML"),
        ("model: {path: model}", "task is missing"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(recipe: Path, text: str, sentence: str):
    recipe.write_text(text)
    assert sentence in _mistake(recipe)


def test_a_recipe_that_is_missing_or_unreadable_is_refused(recipe: Path):
    assert "does not exist" in _mistake(recipe.with_name("no.yaml"))
    assert "cannot be read" in _mistake(recipe.parent)
    recipe.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in _mistake(recipe)


def test_the_names_of_rules_are_those_that_scheduling_has(recipe: Path):
    for name in SAMPLERS:
        extra = ["data.max_staleness=2"] if name == "bounded_staleness" else []
        assert load_recipe(recipe, [f"data.sampler={name}", *extra]).data.sampler == name
    for name in EVICTIONS:
        assert load_recipe(recipe, [f"data.eviction={name}"]).data.eviction == name


def test_every_section_and_key_says_what_it_is_for():
    for section in _section_types():
        assert section.__doc__, section
        for name, field in section.model_fields.items():
            assert field.description or name == "kind", f"{section.__name__}.{name}"


def test_configurations_are_frozen_and_default_values_are_not_shared(recipe: Path):
    config = load_recipe(recipe)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]
    assert config.task.options is not load_recipe(recipe).task.options


def test_loading_a_configuration_is_light():
    code = "import sys, laminar.config.loading, laminar.config.explain; print([m for m in {} if m in sys.modules])"
    heavy: list[Any] = ["torch", "ray", "numpy", "transformers", "rich", "matplotlib"]
    done = subprocess.run([sys.executable, "-c", code.format(heavy)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
