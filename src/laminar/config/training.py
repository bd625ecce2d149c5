"""Settings of the learner: optimizer, loss, batch arithmetic, checkpoints."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from laminar.config.base import DottedPath, Section


class OptimizerConfig(Section):
    """The optimizer: AdamW."""

    lr: PositiveFloat = 1e-6
    """Learning rate after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Iterations over which the learning rate rises linearly from 0."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; not applied to norms and biases."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""


class AlgorithmConfig(Section):
    """Advantages and loss."""

    advantage: Literal["grpo", "grpo_no_std", "rloo"] = "grpo"
    """How rewards of a group become advantages."""
    loss: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Average over all answer tokens of a mini-batch, or per answer first."""
    objective: Literal["clip"] | DottedPath = "clip"
    """Loss per token: `clip` (PPO's clipped surrogate), or `module:function` of your own (docs/extending.md)."""
    clip_low: PositiveFloat = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.28
    """The ratio is clipped above 1 + clip_high (DAPO's clip-higher)."""
    proximal: Literal["behaviour", "recomputed"] = "behaviour"
    """Reference of the ratio: log-probs of the version that generated, or of the learner before its update
    (decoupled PPO; then behaviour log-probs enter as a truncated importance weight)."""
    importance_cap: PositiveFloat = 2.0
    """Truncation of the importance weight between behaviour and proximal policy; used with `proximal: recomputed`."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the reference model, the model that the run started from; 0 loads no reference."""


class CheckpointConfig(Section):
    """Durable states of the learner."""

    every_steps: PositiveInt = 10
    """A checkpoint after every so many iterations, and after the last one."""
    keep_last: PositiveInt = 2
    """Older checkpoints are deleted."""


class TrainerConfig(Section):
    """The loop that turns experience into weight versions."""

    num_steps: PositiveInt = 100
    """Iterations; each makes one weight version."""
    groups_per_step: PositiveInt = 16
    """Prompt groups consumed by one iteration."""
    mini_batches: PositiveInt = 1
    """Optimizer updates per iteration; each draws groups_per_step / mini_batches groups."""
    micro_batch_tokens: PositiveInt = 8_192
    """Tokens in one forward and backward pass, at most (one longer sequence is a micro-batch of its own)."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    gpus: PositiveFloat = 1.0
    """GPUs that Ray sets aside for the learner if it runs on `cuda`; less than 1 shares one with replicas."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of forward and backward; master weights are float32."""
    batch_deadline_s: PositiveFloat = 1_800.0
    """The run fails when no batch is complete for so long."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and loss."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""

    @property
    def groups_per_mini_batch(self) -> int:
        return self.groups_per_step // self.mini_batches

    @model_validator(mode="after")
    def _mini_batches_divide_the_step(self) -> "TrainerConfig":
        if self.groups_per_step % self.mini_batches:
            raise ValueError("groups_per_step must be a multiple of mini_batches")
        return self
