"""The model that is trained: one call of `step` is one optimizer update on one mini-batch.

Invariant: the update depends on the mini-batch alone, not on how it was split into micro-batches or over ranks (up to
floating-point order); and an update that is not finite is never applied.

`step` may run with any number of ranks (`distributed.py`); the numbers below are those of one.
"""

import copy
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from laminar.config.training import OptimizerConfig, TrainerConfig
from laminar.schema.errors import RunFailed, UserError
from laminar.schema.trajectories import ExperienceGroup
from laminar.trainer import distributed, learner_state
from laminar.trainer.checkpoints import MODEL_FOLDER
from laminar.trainer.losses import (
    TokenBatch,
    TokenMetrics,
    load_objective,
    weighted_loss,
    zero_advantage_is_idle,
)
from laminar.trainer.packed_model import PackedModel, load_language_model
from laminar.trainer.packing import Pack, pack, plan_micro_batches
from laminar.trainer.sequences import TrainSequence, build_sequences

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

MAX_NAMED_GROUPS = 8
"""Groups named in an error message; more of them say nothing more."""


def learning_rate(rules: OptimizerConfig, iteration: int) -> float:
    """Rises linearly from 0 over the warm-up, then constant; the first iteration is number 1."""
    return rules.lr * min(1.0, iteration / max(rules.warmup_steps, 1))


class TorchLearner:
    """A causal language model in torch with AdamW. Implements `ports.Learner`.

    `temperature` is that of `rollout.sampling` (1 if greedy): the recorded log-probs are those of
    softmax(logits / temperature), so the learner's must be, too.

    Besides the model there are up to two frozen copies in memory: the reference of the KL term, and, with
    `proximal: recomputed` and several mini-batches, the learner as it was before the first of them.
    """

    def __init__(self, model_path: Path | str, config: TrainerConfig, seed: int, *, temperature: float = 1.0) -> None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        self._source = Path(model_path)
        self._config = config
        self._rules = config.algorithm
        self._device = _usable(config.device)
        self._objective = load_objective(self._rules.objective)
        model = PackedModel(load_language_model(self._source, self._device), temperature=temperature)
        several_updates = config.mini_batches > 1 and self._rules.proximal == "recomputed"
        self._proximal = self._frozen_copy(model) if several_updates else None
        self._reference = self._frozen_copy(model) if self._rules.kl_coefficient else None
        self._model = distributed.shard(model, DTYPES[config.dtype])
        self._optimizer = _build_optimizer(self._model, config.optimizer)
        self._num_updates = 0

    def step(self, groups: Sequence[ExperienceGroup]) -> dict[str, float]:
        """One optimizer update on one mini-batch; returns metrics.

        Sequences whose advantage is exactly 0 are not run where that changes nothing but the time; they still count in
        the mean.
        """
        sequences = build_sequences(groups, self._rules)
        skip_idle = zero_advantage_is_idle(self._rules)
        active = [sequence for sequence in sequences if sequence.advantage != 0 or not skip_idle]
        self._start_update()
        metrics = TokenMetrics()
        losses = self._backward(active, metrics)
        grad_norm = distributed.whole(
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.optimizer.max_grad_norm)
        ).item()
        loss = distributed.add_up(torch.stack([part for part, _ in losses]).sum()).item() if losses else 0.0
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise RunFailed(self._not_finite(loss, grad_norm, losses))
        self._optimizer.step()
        self._num_updates += 1
        return metrics.result(distributed.add_up, distributed.largest) | {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": self._optimizer.param_groups[0]["lr"],
            "sequences": len(sequences),
            "sequences_skipped": len(sequences) - len(active),
        }

    @property
    def _iteration(self) -> int:
        """The iteration that the next update belongs to; the first is 1."""
        return self._num_updates // self._config.mini_batches + 1

    @property
    def _part(self) -> int:
        """Index of the next update within its iteration."""
        return self._num_updates % self._config.mini_batches

    def _start_update(self) -> None:
        """Set learning rate and gradients; keep the weights before the iteration as the proximal policy.

        Gradients are zeros, not absent: the optimizer's moments must decay also when no sequence was run.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._config.optimizer, self._iteration)
        for parameter in self._model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.zero_()
        if self._proximal is not None and self._part == 0:
            with torch.no_grad():
                for kept, parameter in zip(self._proximal.parameters(), self._model.parameters(), strict=True):
                    kept.copy_(parameter)

    def _backward(
        self, sequences: Sequence[TrainSequence], metrics: TokenMetrics
    ) -> list[tuple[Tensor, Sequence[TrainSequence]]]:
        """Add the gradient of every micro-batch; returns the parts of the loss with the sequences that made them."""
        losses: list[tuple[Tensor, Sequence[TrainSequence]]] = []
        for micro_batch, is_filler in self._micro_batches(sequences):
            batch = pack(micro_batch, self._device)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._config.dtype == "bfloat16"):
                tokens = self._score(batch)
            loss = weighted_loss(tokens, self._objective, self._rules) * (0.0 if is_filler else 1.0)
            # FSDP averages gradients over ranks; the weights of the tokens already add up to 1 over all of them.
            torch.autograd.backward(loss * distributed.num_ranks())
            losses.append((loss.detach(), micro_batch))
            if not is_filler:
                metrics.add(tokens, self._rules)
        return losses

    def _micro_batches(self, sequences: Sequence[TrainSequence]) -> Iterator[tuple[list[TrainSequence], bool]]:
        """This rank's micro-batches. A rank that is left without one runs a filler, so that all make the same calls."""
        num_ranks = distributed.num_ranks()
        plan = plan_micro_batches(
            [sequence.num_inputs for sequence in sequences],
            budget_tokens=self._config.micro_batch_tokens,
            multiple_of=num_ranks,
        )
        for members in plan[distributed.rank() :: num_ranks]:
            yield [sequences[index] for index in members or (0,)], not members

    def _score(self, batch: Pack) -> TokenBatch:
        logprobs_T = self._model(batch)
        with torch.no_grad():
            return TokenBatch(
                logprobs_T=logprobs_T,
                behaviour_logprobs_T=batch.behaviour_logprobs_T,
                proximal_logprobs_T=self._proximal_logprobs(batch, logprobs_T),
                advantages_T=batch.advantages_T,
                weights_T=batch.weights_T,
                reference_logprobs_T=self._reference(batch) if self._reference is not None else None,
            )

    def _proximal_logprobs(self, batch: Pack, logprobs_T: Tensor) -> Tensor:
        """Log-probs under the reference of the ratio. Before the first update that is the learner: no extra forward."""
        if self._rules.proximal == "behaviour":
            return batch.behaviour_logprobs_T
        if self._proximal is None or self._part == 0:
            return logprobs_T.detach()
        proximal_logprobs_T: Tensor = self._proximal(batch)
        return proximal_logprobs_T

    def _frozen_copy(self, model: PackedModel) -> PackedModel:
        return distributed.shard(copy.deepcopy(model).requires_grad_(False), DTYPES[self._config.dtype])

    def _not_finite(
        self, loss: float, grad_norm: float, losses: Sequence[tuple[Tensor, Sequence[TrainSequence]]]
    ) -> str:
        guilty = [members for part, members in losses if not torch.isfinite(part)] or [m for _, m in losses]
        names = sorted({sequence.group_id for members in guilty for sequence in members})
        rest = f" and {len(names) - MAX_NAMED_GROUPS} more" if len(names) > MAX_NAMED_GROUPS else ""
        return (
            f"step {self._iteration}, mini-batch {self._part}: the loss is {loss} and the gradient norm {grad_norm}; "
            f"the update was not applied. Groups concerned: {', '.join(names[:MAX_NAMED_GROUPS])}{rest}. Resume from "
            "the last checkpoint, with a lower trainer.optimizer.lr if the loss had been growing"
        )

    def tensors(self) -> Mapping[str, Tensor]:
        """Current weights by Hugging Face name, a tied one once; they may be read until the next `step`."""
        named = learner_state.named_tensors(self._model.language_model)
        return {name: distributed.whole(tensor.detach()) for name, tensor in named.items()}

    def save(self, folder: Path) -> None:
        """Write model, optimizer and random generators into an existing empty folder, between two iterations.

        Within an iteration the proximal policy would be missing.
        """
        if self._part != 0:
            raise RuntimeError(f"a learner is saved between iterations; this one is in mini-batch {self._part}")
        learner_state.save_model(self._model.language_model, self._source, folder / MODEL_FOLDER)
        learner_state.save_optimizer(self._model, self._optimizer, folder)
        learner_state.save_counters({"num_updates": self._num_updates}, folder)
        distributed.wait_for_all()

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote."""
        learner_state.load_model(self._model.language_model, folder / MODEL_FOLDER)
        learner_state.load_optimizer(self._model, self._optimizer, folder)
        self._num_updates = learner_state.load_counters(folder)["num_updates"]


def _usable(device: str) -> torch.device:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"trainer.device is {device!r}, which this machine does not have: {error}") from error
    return torch.device(device)


def _build_optimizer(model: PackedModel, rules: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; vectors (norms, biases) do not decay."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": rules.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=rules.lr,
        betas=(rules.beta1, rules.beta2),
        eps=rules.eps,
        fused=True,
    )
