"""User code by dotted path: it is found, or a sentence says what would be right."""

import pytest

from laminar.schema.errors import UserError
from laminar.tasks.gcd import GcdTask
from laminar.tasks.loading import build_task, load_object


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe's folder on the module search path, with one module to try."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "loading_recipe.py").write_text(
        "class Task:\n"
        "    def __init__(self, *, size, level=1): self.size = size\n"
        "    def problems(self, split): return []\n"
        "    def grade(self, problem, answer): return 0.0\n"
        "class NoTask:\n"
        "    pass\n"
        "def factory(**options): return Task(**options)\n"
        "class Holder:\n"
        "    @staticmethod\n"
        "    def reward(payload, answer): return 1.0\n"
    )
    (tmp_path / "loading_broken.py").write_text("x = 1\nraise ValueError('no luck')\n")
    (tmp_path / "loading_needs.py").write_text("import not_installed_anywhere\n")
    return tmp_path


def test_objects_are_found_by_dotted_path(recipe):
    assert load_object("laminar.tasks.gcd:GcdTask") is GcdTask
    assert load_object("loading_recipe:Holder.reward")({}, "") == 1.0


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("laminar.tasks.gcd.GcdTask", r"write it as `package\.module:name`"),
        (
            "no_such_package.mod:Task",
            r"there is no module 'no_such_package'; it must be installed, or lie in the recipe",
        ),
        ("laminar.tasks.gdc:GcdTask", r"there is no module 'laminar\.tasks\.gdc'"),
        ("loading_recipe:Tusk", r"loading_recipe has no 'Tusk', did you mean 'Task'\?"),
        ("loading_needs:Task", r"loading_needs needs the module 'not_installed_anywhere', which is not installed"),
        ("loading_broken:Task", r"importing loading_broken failed with ValueError: no luck \(.*loading_broken\.py:2\)"),
    ],
)
def test_a_wrong_path_is_explained(recipe, path, sentence):
    with pytest.raises(UserError, match=sentence):
        load_object(path)


def test_tasks_are_built_from_classes_and_factories(recipe):
    assert build_task("loading_recipe:Task", {"size": 3}).size == 3
    assert build_task("loading_recipe:factory", {"size": 4}).size == 4
    assert isinstance(build_task("laminar.tasks.gcd:GcdTask", {}), GcdTask)


@pytest.mark.parametrize(
    ("path", "options", "sentence"),
    [
        (
            "loading_recipe:Task",
            {"size": 1, "levle": 2},
            r"no option 'levle', did you mean 'level'\?: it accepts size, lev",
        ),
        ("loading_recipe:Task", {}, r"needs the option 'size': it accepts size, level"),
        ("loading_recipe:NoTask", {"size": 1}, r"no option 'size': it accepts no options"),
        ("loading_recipe:NoTask", {}, r"is not a task: NoTask lacks the method problems and grade"),
        ("laminar.tasks.gcd:HELDOUT_ONE_IN", {}, r"is a int, not a task class"),
    ],
)
def test_wrong_options_are_explained(recipe, path, options, sentence):
    with pytest.raises(UserError, match=sentence):
        build_task(path, options)
