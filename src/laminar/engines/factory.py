"""The table of engines. Each is imported when it is built, so that naming one costs nothing."""

from collections.abc import Callable
from pathlib import Path

from laminar.engines.protocol import Engine
from laminar.engines.rules import ScriptedEngineRules, TorchEngineRules

EngineRules = TorchEngineRules | ScriptedEngineRules


def _torch(model_path: Path, rules: EngineRules) -> Engine:
    from laminar.engines.torch_engine import TorchEngine

    if not isinstance(rules, TorchEngineRules):
        raise TypeError(f"the torch engine takes TorchEngineRules, not {type(rules).__name__}")
    return TorchEngine(model_path, rules)


def _scripted(model_path: Path, rules: EngineRules) -> Engine:
    from laminar.engines.scripted_engine import ScriptedEngine

    if not isinstance(rules, ScriptedEngineRules):
        raise TypeError(f"the scripted engine takes ScriptedEngineRules, not {type(rules).__name__}")
    return ScriptedEngine(rules)


ENGINES: dict[str, Callable[[Path, EngineRules], Engine]] = {"torch": _torch, "scripted": _scripted}


def build_engine(kind: str, model_path: Path, rules: EngineRules) -> Engine:
    """An engine that is not started yet. `model_path` holds config.json; the scripted engine ignores it."""
    if kind not in ENGINES:
        raise ValueError(f"unknown engine {kind!r}; known are {', '.join(ENGINES)}")
    return ENGINES[kind](model_path, rules)
