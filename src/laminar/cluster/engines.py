"""From the engine's section of the configuration to the engine."""

from typing import assert_never

from laminar.config.engines import CustomEngineConfig, ScriptedEngineConfig, TorchEngineConfig
from laminar.config.run_config import RunConfig
from laminar.engines.factory import build_engine as build
from laminar.engines.protocol import Engine
from laminar.engines.rules import ScriptedEngineRules, TorchEngineRules
from laminar.tasks.loading import load_object


def build_engine(config: RunConfig) -> Engine:
    """The engine of one replica."""
    engine, model_path = config.rollout.engine, config.model.path
    if config.deterministic:
        # What is computed together changes the last bits of every sum.
        engine = engine.model_copy(update={"max_running": 1})
    match engine:
        case TorchEngineConfig():
            return build(engine.kind, model_path, TorchEngineRules(**engine.model_dump(exclude={"kind"})))
        case ScriptedEngineConfig():
            return build(engine.kind, model_path, ScriptedEngineRules(**engine.model_dump(exclude={"kind"})))
        case CustomEngineConfig():
            custom: Engine = load_object(engine.path)(model_path=model_path, **engine.options)
            return custom
        case _:
            assert_never(engine)
