"""Settings of the engines; each kind has exactly its own fields."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from laminar.config.base import DottedPath, Section


class TorchEngineConfig(Section):
    """Our own engine: ordinary PyTorch, CPU or CUDA, Llama and Qwen2 families."""

    kind: Literal["torch"] = "torch"
    max_running: PositiveInt = 256
    """Sequences that may decode together."""
    kv_capacity_tokens: PositiveInt = 65_536
    """Size of the KV cache, in tokens."""
    prefill_chunk_tokens: PositiveInt = 2_048
    """Prompt tokens computed between two decode steps, at most."""
    quantum_s: PositiveFloat = 0.05
    """Compute time between two looks at the outside world."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and KV cache in the engine."""


class ScriptedEngineConfig(Section):
    """A real engine without a model, for tests of all around it: answers follow from prompt, seed and version."""

    kind: Literal["scripted"] = "scripted"
    max_running: PositiveInt = 256
    """Sequences that may decode together."""
    kv_capacity_tokens: PositiveInt = 65_536
    """Size of the emulated KV cache, in tokens."""
    token_s: NonNegativeFloat = 0.001
    """Time of one decode step, whatever the batch."""


class CustomEngineConfig(Section):
    """An engine of your own, by dotted path (docs/extending.md)."""

    kind: Literal["custom"] = "custom"
    path: DottedPath
    """`module:Name` of a class that keeps the Engine protocol."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class, besides `model_path`."""
    device: str = "cpu"
    """`cpu`, or `cuda` if Ray must set a GPU aside for it."""
    max_running: PositiveInt = 256
    """Sequences that it runs together."""
    kv_capacity_tokens: PositiveInt = 65_536
    """Size of its KV cache, in tokens."""


EngineConfig = Annotated[TorchEngineConfig | ScriptedEngineConfig | CustomEngineConfig, Field(discriminator="kind")]
