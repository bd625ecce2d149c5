"""What a Hugging Face config.json says about a decoder, or a sentence why our decoder cannot run it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.engines.rope import SCALINGS, rope_parameters

FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of model_type that we run."""

DIFFERS_BY_FAMILY = frozenset(
    {
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "hidden_act",
        "rope_parameters",
    }
)
"""Keys whose defaults only transformers knows; what it saves itself has them all. Also `head_dim` of Qwen3, which for
the other families is hidden_size / num_attention_heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder with RMSNorm, RoPE, grouped-query attention and SwiGLU."""

    num_layers: int
    hidden: int
    mlp: int
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: dict[str, Any]


def read_shape(model_path: Path) -> DecoderShape:
    """Read `model_path`/config.json; transformers fills in what the file leaves to the family's defaults."""
    config = json.loads((model_path / "config.json").read_text())
    needed = DIFFERS_BY_FAMILY | ({"head_dim"} if config.get("model_type") == "qwen3" else set())
    if not config.keys() >= needed:
        from transformers import AutoConfig  # costs a second

        config = AutoConfig.from_pretrained(model_path).to_dict()
    return shape_of(config)


def shape_of(config: dict[str, Any]) -> DecoderShape:
    """Raises ValueError for what would silently be computed wrongly."""
    family = config["model_type"]
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not supported; the torch engine knows {', '.join(FAMILIES)}")
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    for problem in (
        config["hidden_act"] != "silu" and f"hidden_act {config['hidden_act']!r} (only 'silu')",
        kind not in SCALINGS and f"RoPE variant {kind!r} (only {', '.join(SCALINGS)})",
        rope.get("partial_rotary_factor", 1.0) != 1.0 and "partial rotary embeddings",
        {*(config.get("layer_types") or ())} > {"full_attention"} and "sliding-window attention",
        config.get("use_sliding_window") and "sliding-window attention",
    ):
        if problem:
            raise ValueError(f"the torch engine does not support {problem}")
    attention_bias = bool(config.get("attention_bias"))
    num_heads = config["num_attention_heads"]
    return DecoderShape(
        num_layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        mlp=config["intermediate_size"],
        vocab=config["vocab_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        max_positions=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        tied=config["tie_word_embeddings"],
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias")),
        qk_norm=family == "qwen3",
        rope=rope,
    )
