"""What each engine may use; importable without any engine."""

from dataclasses import dataclass
from typing import Literal

from laminar.engines.batching import BatchRules
from laminar.engines.emulated_pace import Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchEngineRules:
    """What the torch engine may use.

    KV memory holds `kv_capacity_tokens`, rounded down to whole pages; a request reserves the pages of its present
    tokens. `prefill_chunk_tokens` bounds the prompt tokens of one iteration, so that decoding is not starved.
    """

    max_running: int
    kv_capacity_tokens: int
    prefill_chunk_tokens: int
    quantum_s: float = 0.05
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    page_tokens: int = 32

    def batch_rules(self) -> BatchRules:
        return BatchRules(
            max_running=self.max_running,
            num_pages=self.kv_capacity_tokens // self.page_tokens,
            page_tokens=self.page_tokens,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedEngineRules:
    """Bounds and pace of the scripted engine: every iteration draws one token per running request.

    An iteration takes `token_s`, plus `prefill_token_s` for each prompt token it covers, in the event loop's time.
    """

    max_running: int
    kv_capacity_tokens: int
    prefill_chunk_tokens: int = 512
    iterations_per_step: int = 8
    token_s: float = 0.0
    prefill_token_s: float = 0.0
    vocab: int = 64
    page_tokens: int = 16

    def batch_rules(self) -> BatchRules:
        return BatchRules(
            max_running=self.max_running,
            num_pages=self.kv_capacity_tokens // self.page_tokens,
            page_tokens=self.page_tokens,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedEngineRules:
    """Bounds and pace of the emulated engine.

    One token id stands for `tokens_per_id` tokens, so that memory and time of the emulation follow from trajectories
    and not from tokens; KV and pace are in tokens. Emulated seconds pass `time_scale` times as fast as the event
    loop's. Unfinished answers are reported every `report_every_s` emulated seconds.
    """

    pace: Pace
    max_running: int
    kv_capacity_tokens: int
    tokens_per_id: int = 1
    report_every_s: float = 1.0
    time_scale: float = 1.0
    vocab: int = 64
