"""A Hugging Face causal language model that scores packed streams.

Invariant: the log-prob of a token equals that of the ordinary forward of its sequence alone, at any packing. The model
runs in evaluation mode also while it learns: dropout would turn the ratio to the behaviour policy into noise.

Axes: S tokens of the stream, T trained tokens, C tokens of one chunk, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from laminar.schema.errors import UserError
from laminar.trainer.linear import use_fast_linear
from laminar.trainer.packed_attention import PACKED_ATTENTION, gather
from laminar.trainer.packing import Pack, pack
from laminar.trainer.sequences import TrainSequence

MAX_CHUNK_LOGITS = 1 << 25
"""Logits in memory at a time: 128 MiB in float32, 220 tokens at a vocabulary of 152,000."""

SELF_CHECK_TOLERANCE = 1e-3
"""Largest difference in log-prob to the model's own forward; an unknown architecture is off by 0.1 and more."""


class PackedModel(nn.Module):
    """Log-probs of the trained tokens of a `Pack`, under softmax(logits / temperature)."""

    def __init__(
        self, language_model: PreTrainedModel, *, temperature: float = 1.0, max_chunk_logits: int = MAX_CHUNK_LOGITS
    ) -> None:
        super().__init__()
        self._chunk_tokens = max(1, max_chunk_logits // language_model.config.vocab_size)
        self.language_model = language_model.train(False)
        self.temperature = temperature

    def forward(self, batch: Pack) -> Tensor:
        """logprobs_T in float32."""
        hidden_1SE = self.language_model.base_model(
            input_ids=batch.input_ids_S.unsqueeze(0),
            position_ids=batch.position_ids_S.unsqueeze(0),
            use_cache=False,
            packed_layout=batch.layout,
        ).last_hidden_state
        hidden_TE = gather(hidden_1SE.squeeze(0), batch.predictors_T)
        if len(hidden_TE) <= self._chunk_tokens:
            return self._logprobs(hidden_TE, batch.targets_T)
        return torch.cat(
            [
                checkpoint(self._logprobs, hidden_CE, targets_C, use_reentrant=False)
                for hidden_CE, targets_C in zip(
                    torch.split(hidden_TE, self._chunk_tokens),
                    torch.split(batch.targets_T, self._chunk_tokens),
                    strict=True,
                )
            ]
        )

    def _logprobs(self, hidden_CE: Tensor, targets_C: Tensor) -> Tensor:
        logits_CV = self.language_model.get_output_embeddings()(hidden_CE).float()
        if self.temperature != 1.0:
            logits_CV = logits_CV / self.temperature
        return -nn.functional.cross_entropy(logits_CV, targets_C, reduction="none")


def load_language_model(path: Path | str, device: torch.device | str) -> PreTrainedModel:
    """Load float32 weights from a folder in Hugging Face format, ready for packed streams."""
    hide_bars: Callable[[], None] = disable_progress_bar
    hide_bars()  # the trainer's process has no terminal; a bar would end up in its log
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=PACKED_ATTENTION, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise UserError(f"model.path {path} is not a language model in Hugging Face format: {error}") from error
    nn.Module.to(model, torch.device(device))
    use_fast_linear(model)
    check_packed_forward(model)
    return model


@torch.no_grad()
def check_packed_forward(language_model: PreTrainedModel) -> None:
    """Refuse an architecture whose own forward differs from ours (soft caps, scaled logits, attention of its own)."""
    batch, rows = _probe(language_model.config.vocab_size, language_model.device)
    packed_T = PackedModel(language_model)(batch)
    language_model.set_attn_implementation("sdpa")
    logits = [language_model(input_ids=row.unsqueeze(0), use_cache=False).logits[0, :-1].float() for row in rows]
    language_model.set_attn_implementation(PACKED_ATTENTION)
    own_T = -nn.functional.cross_entropy(torch.cat(logits), torch.cat([row[1:] for row in rows]), reduction="none")
    difference = (packed_T - own_T).abs().max().item()
    if not difference < SELF_CHECK_TOLERANCE:
        raise UserError(
            f"the learner cannot train {type(language_model).__name__}: its log-probs on packed sequences differ from "
            f"the model's own by {difference:.2g}"
        )


def _probe(vocab_size: int, device: torch.device) -> tuple[Pack, list[Tensor]]:
    """Three short sequences, packed and as they are; enough to see a wrong mask, position, scale or cap."""
    generator = np.random.default_rng(0)
    sequences = []
    for length in (12, 11, 5):
        token_ids = generator.integers(0, vocab_size, length, dtype=np.int32)
        sequences.append(
            TrainSequence(
                group_id="",
                token_ids=token_ids,
                trained=np.ones(length, bool),
                behaviour_logprobs=np.zeros(length, np.float32),
                advantage=0.0,
                weight=1.0,
            )
        )
    return pack(sequences, device), [torch.from_numpy(s.token_ids).long().to(device) for s in sequences]
