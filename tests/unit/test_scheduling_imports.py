"""Decisions are light and pure: importing all of them brings in nothing that acts."""

import pkgutil
import subprocess
import sys

from laminar import scheduling

HEAVY = ("torch", "ray", "numpy", "transformers", "pydantic", "asyncio")


def test_importing_every_decision_loads_nothing_heavy():
    modules = [f"laminar.scheduling.{module.name}" for module in pkgutil.iter_modules(scheduling.__path__)]
    assert "laminar.scheduling.fleet" in modules
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
