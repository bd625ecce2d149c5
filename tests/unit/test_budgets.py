"""Sizes that keep the code readable, and imports that keep it light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "laminar"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80

LIGHT = ("laminar.config.loading", "laminar.scheduling.fleet", "laminar.scheduling.repack", "laminar.cli.main")
HEAVY = ("torch", "ray", "transformers", "vllm", "matplotlib")


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and length of every function, its docstring not counted."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring_lines = (ast.get_docstring(node) or "").count("\n") + 1
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_fit_in_the_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    assert [name for name, lines in functions(path) if lines > MAX_FUNCTION_LINES] == []


@pytest.mark.parametrize("module", LIGHT)
def test_what_users_wait_for_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert loaded.stdout.strip() == "[]"


def test_only_config_and_the_process_starter_touch_the_environment() -> None:
    """A part gets its settings as arguments; an environment variable below `config` would be a hidden one."""
    allowed = {"cluster/instance.py", "cluster/guardian.py"}
    users = {str(path.relative_to(SOURCE)) for path in source_files() if "os.environ" in path.read_text()}
    assert {user for user in users if not user.startswith("config/")} <= allowed
