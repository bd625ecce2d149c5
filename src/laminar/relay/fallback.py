"""Weights that the relay has let go, read from a checkpoint instead: a trajectory goes on under its own version.

Invariant: what a checkpoint gives is what the relay held, bit for bit: both are casts of the learner's weights.
"""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from laminar.engines.protocol import Weights
from laminar.relay.memory_link import MemoryLink
from laminar.relay.reader import WeightReader
from laminar.relay.threads import run_in_thread
from laminar.schema.errors import WeightsUnavailable


class CheckpointedWeights:
    """Fulfils `rollout.ports.WeightSource`: the relay first, then checkpoints.

    `model_folder` names the folder with a version's *.safetensors, None if there is no complete checkpoint of it;
    `dtype` is that of published weights.
    """

    def __init__(
        self, reader: WeightReader | MemoryLink, model_folder: Callable[[int], Path | None], dtype: str = "keep"
    ) -> None:
        self._reader = reader
        self._model_folder = model_folder
        self._dtype: torch.dtype | None = None if dtype == "keep" else getattr(torch, dtype)

    async def newest(self) -> int | None:
        """See `WeightReader`."""
        return await self._reader.newest()

    async def wait_newer(self, than: int | None, wait_s: float) -> int | None:
        """See `WeightReader`."""
        return await self._reader.wait_newer(than, wait_s)

    @contextlib.asynccontextmanager
    async def lease(self, version: int | None = None) -> AsyncIterator[Weights]:
        """A version (None: the newest that the relay holds); raises `WeightsUnavailable` if nobody has it."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                weights = await stack.enter_async_context(self._reader.lease(version))
            except WeightsUnavailable:
                folder = None if version is None else self._model_folder(version)
                if version is None or folder is None:
                    raise
                weights = Weights(version, await run_in_thread(self._read, folder))
            yield weights

    def _read(self, folder: Path) -> dict[str, Tensor]:
        """In a thread. The checkpoint may be deleted at this moment, being one of the oldest."""
        tensors: dict[str, Tensor] = {}
        try:
            for path in sorted(folder.glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (not a dict)
                        tensors[name] = self._cast(file.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise WeightsUnavailable(f"{folder} cannot be read: {error}") from None
        if not tensors:
            raise WeightsUnavailable(f"{folder} holds no weights")
        return tensors

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor
