"""Tiny models and experience for the trainer's tests; everything is made from a seed."""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from laminar.config.training import TrainerConfig
from laminar.schema.tokens import pack_ids, pack_logprobs
from laminar.schema.trajectories import Experience, ExperienceGroup, Piece, Prompt

VOCABULARY = 23

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # so that log-probs differ by whole numbers, and a mistake is seen
}


def llama(**sizes) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": True} | sizes))


def qwen2(**sizes) -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES | {"num_key_value_heads": 4, "tie_word_embeddings": False} | sizes))


def save_tiny_model(folder: Path, model: PreTrainedModel | None = None) -> Path:
    """A model folder as a user has it, with a file of a tokenizer."""
    (model or llama()).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"a": "tokenizer"}')
    (folder / "notes.md").write_text("not part of the model")
    return folder


def random_groups(seed: int, *, num_groups: int = 4, size: int = 4, max_tokens: int = 40) -> list[ExperienceGroup]:
    """Groups of random answers with plausible log-probs and rewards of 0 or 1; each group has both."""
    generator = np.random.default_rng(seed)
    return [_random_group(generator, f"group-{index}", size, max_tokens) for index in range(num_groups)]


def _random_group(generator: np.random.Generator, group_id: str, size: int, max_tokens: int) -> ExperienceGroup:
    members = tuple(
        answer(
            generator.integers(0, VOCABULARY, generator.integers(1, max_tokens)).tolist(),
            reward=float(index % 2),
            trajectory_id=f"{group_id}/{index}",
            logprob=-3.0,
        )
        for index in range(size)
    )
    prompt = tuple(generator.integers(0, VOCABULARY, generator.integers(1, 12)).tolist())
    return ExperienceGroup(
        group_id=group_id, prompt=Prompt(prompt_id=group_id, token_ids=prompt, payload={}), members=members
    )


def answer(
    token_ids: list[int], *, reward: float, trajectory_id: str = "t", logprob: float | list[float] = -3.0
) -> Experience:
    logprobs = logprob if isinstance(logprob, list) else [logprob] * len(token_ids)
    piece = Piece(token_ids=pack_ids(token_ids), logprobs=pack_logprobs(logprobs), generated=True, version=0)
    return Experience(
        trajectory_id=trajectory_id,
        pieces=(piece,),
        reward=reward,
        metrics={"correct": reward},
        stop_reason="stop",
        version=0,
        staleness=0,
    )


def trainer_config(**changes) -> TrainerConfig:
    """Settings that move a tiny model visibly; sections are given as dictionaries."""
    optimizer = {"lr": 1e-2} | changes.pop("optimizer", {})
    return TrainerConfig(**{"groups_per_step": 4, "optimizer": optimizer} | changes)
