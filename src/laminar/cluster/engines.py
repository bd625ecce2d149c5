"""From the engine's section of the configuration to the engine."""

from typing import assert_never

from laminar.config.engines import CustomEngineConfig, ScriptedEngineConfig, TorchEngineConfig
from laminar.config.run_config import RunConfig
from laminar.engines.protocol import Engine


def build_engine(config: RunConfig) -> Engine:
    """The engine of one replica; each kind is imported on use."""
    engine = config.rollout.engine
    match engine:
        case TorchEngineConfig():
            from laminar.engines.torch_engine import TorchEngine, TorchEngineRules

            return TorchEngine(config.model.path, TorchEngineRules(**engine.model_dump(exclude={"kind"})))
        case ScriptedEngineConfig():
            from laminar.engines.scripted_engine import ScriptedEngine, ScriptedEngineRules

            return ScriptedEngine(ScriptedEngineRules(**engine.model_dump(exclude={"kind"})))
        case CustomEngineConfig():
            from laminar.tasks.loading import load_object

            custom: Engine = load_object(engine.path)(model_path=config.model.path, **engine.options)
            return custom
        case _:
            assert_never(engine)
