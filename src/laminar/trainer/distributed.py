"""One learner over several ranks: FSDP2, applied in one place.

Invariant: every rank calls the same methods of its learner with the same groups in the same order; each runs its share
of the micro-batches, and what leaves a learner (weights, metrics, checkpoints) is whole and equal on all ranks. With
one rank nothing here does anything, nor does it import what only several ranks need (about a second).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from laminar.trainer.packed_model import PackedModel


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if num_ranks() > 1 else 0


def shard(model: PackedModel, dtype: torch.dtype) -> PackedModel:
    """Shard parameters, gradients and optimizer state over all ranks: one unit per decoder layer, one for the rest.

    The rest, too, is resharded after forward: frozen copies have no backward that would do it.
    """
    if num_ranks() == 1:
        return model
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.language_model.base_model.layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision, reshard_after_forward=True)
    return model


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded; every rank must ask."""
    if num_ranks() == 1:
        return tensor
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(values: Tensor, tensor: Tensor) -> Tensor:
    """`values` on the device of `tensor`, and sharded as it is."""
    values = values.to(tensor.device)
    if num_ranks() == 1:
        return values
    from torch.distributed.tensor import DTensor, distribute_tensor

    return distribute_tensor(values, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else values


def add_up(sums: Tensor) -> Tensor:
    """Sum over ranks, on every rank."""
    if num_ranks() > 1:
        dist.all_reduce(sums)
    return sums


def largest(values: Tensor) -> Tensor:
    """Elementwise maximum over ranks, on every rank."""
    if num_ranks() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def wait_for_all() -> None:
    """Return when every rank got here."""
    if num_ranks() > 1:
        dist.barrier()
