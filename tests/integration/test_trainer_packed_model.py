"""Packed streams against the model's own forward, one sequence at a time."""

import numpy as np
import pytest
import torch
from torch import nn
from trainer_kit import VOCABULARY, llama, qwen2
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from laminar.schema.errors import UserError
from laminar.trainer.packed_attention import PACKED_ATTENTION, causal_attention
from laminar.trainer.packed_model import PackedModel, check_packed_forward
from laminar.trainer.packing import pack
from laminar.trainer.sequences import TrainSequence

MODELS = {
    "llama, grouped queries, tied": llama,
    "qwen2, untied": qwen2,
    "llama, all heads": lambda: llama(num_key_value_heads=4, tie_word_embeddings=False),
}


def sequences(lengths: list[int]) -> list[TrainSequence]:
    generator = np.random.default_rng(1)
    return [
        TrainSequence(
            group_id="g",
            token_ids=generator.integers(0, VOCABULARY, length, dtype=np.int32),
            trained=generator.random(length) < 0.7,
            behaviour_logprobs=np.zeros(length, np.float32),
            advantage=1.0,
            weight=1.0,
        )
        for length in sorted(lengths, reverse=True)
    ]


def own_logprobs(model: PreTrainedModel, sequence: TrainSequence, temperature: float) -> torch.Tensor:
    """Log-probs of the trained tokens by the ordinary forward of this sequence alone."""
    token_ids = torch.from_numpy(sequence.token_ids).long()
    logits = model(input_ids=token_ids.unsqueeze(0), use_cache=False).logits[0, :-1] / temperature
    logprobs = logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
    return logprobs[torch.from_numpy(sequence.trained[1:])]


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("chunked", [False, True])
def test_packed_log_probs_and_gradients_are_those_of_each_sequence_alone(build, chunked):
    model = build()
    batch = sequences([2, 3, 17, 20, 20, 22, 45, 90])
    own = torch.cat([own_logprobs(model, sequence, 0.7) for sequence in batch])
    wanted = gradients(model, (own * own.detach()).sum())
    model.set_attn_implementation(PACKED_ATTENTION)
    chunk_tokens = 7 if chunked else 1_000
    packed = PackedModel(model, temperature=0.7, max_chunk_logits=chunk_tokens * VOCABULARY)(pack(batch, "cpu"))
    torch.testing.assert_close(packed, own, atol=1e-5, rtol=1e-5)
    for got, want in zip(gradients(model, (packed * packed.detach()).sum()), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4 * want.abs().max().item(), rtol=1e-4)


def test_another_sequence_of_the_stream_changes_nothing():
    model = llama()
    model.set_attn_implementation(PACKED_ATTENTION)
    scorer = PackedModel(model)
    batch = sequences([30, 25, 9])
    together, alone = scorer(pack(batch, "cpu")), scorer(pack(batch[1:2], "cpu"))
    first = batch[0].num_trained
    torch.testing.assert_close(together[first : first + len(alone)], alone, atol=1e-5, rtol=1e-5)


def test_repeated_heads_give_what_grouped_heads_give():
    query, key, value = (torch.randn(2, heads, 9, 8, generator=torch.Generator().manual_seed(1)) for heads in (6, 2, 2))
    grouped, repeated = (causal_attention(query, key, value, 0.3, kernel_groups_heads=known) for known in (True, False))
    torch.testing.assert_close(grouped, repeated)


def test_bfloat16_autocast_stays_close():
    model = llama()
    model.set_attn_implementation(PACKED_ATTENTION)
    batch = pack(sequences([30, 25, 9]), "cpu")
    exact = PackedModel(model)(batch)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = PackedModel(model)(batch)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().mean().item() < 0.1


def test_an_architecture_that_the_packed_path_gets_wrong_is_refused():
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        final_logit_softcapping=1.0,
        initializer_range=0.3,
    )
    model = Gemma2ForCausalLM(config)
    model.set_attn_implementation(PACKED_ATTENTION)
    with pytest.raises(UserError, match="Gemma2"):
        check_packed_forward(model)
