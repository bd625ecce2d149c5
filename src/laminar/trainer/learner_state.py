"""What a learner writes into a checkpoint and reads back: weights, optimizer, counters, random numbers.

Invariant: a learner that loads a state goes on bit for bit like the one that saved it, at the same number of ranks; any
number of ranks can load it. Nothing is pickled. `model/` is a complete folder in Hugging Face format, in float32.
"""

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from laminar.schema.errors import RunFailed
from laminar.trainer import distributed

OPTIMIZER_FILE = "optimizer.safetensors"
RANDOM_FILE = "random.safetensors"
COUNTERS_FILE = "learner.json"

_COMPANIONS = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}
"""Endings of tokenizer, chat template and generation files that travel with the weights."""


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their first name; a tied weight appears once, as in Hugging Face's files."""
    parameters = dict(model.named_parameters())
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
    buffers = {name: value for name, value in model.state_dict().items() if name not in parameters.keys() | tied}
    return parameters | buffers


@contextmanager
def _full_disk_is_an_os_error() -> Iterator[None]:
    """safetensors reports a failed write by an error of its own."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


def save_model(model: PreTrainedModel, source: Path, folder: Path) -> None:
    """Write weights and config, and copy what else `source`, the folder of the initial model, says about the model."""
    weights = {name: distributed.whole(tensor).detach() for name, tensor in named_tensors(model).items()}
    if distributed.rank() == 0:
        folder.mkdir()
        with _full_disk_is_an_os_error():
            model.save_pretrained(folder, state_dict=weights)
        for path in sorted(source.iterdir()):
            weights_index = path.name.endswith(".index.json")
            if path.suffix in _COMPANIONS and not weights_index and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)


@torch.no_grad()
def load_model(model: PreTrainedModel, folder: Path) -> None:
    """Copy the weights of every file of `folder` into the model, in place."""
    missing = named_tensors(model)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                values, tensor = file.get_tensor(name), missing.pop(name, None)
                if tensor is None or tensor.shape != values.shape:
                    raise RunFailed(f"the checkpoint {folder} is of another model than model.path: see {name}")
                tensor.copy_(distributed.like(values, tensor))
    if missing:
        raise RunFailed(f"the checkpoint {folder} is of another model than model.path: it lacks {min(missing)}")


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write the optimizer's tensors as `quantity/parameter`."""
    state = {
        f"{quantity}/{name}": distributed.whole(value).contiguous()
        for name, parameter in model.named_parameters()
        for quantity, value in optimizer.state.get(parameter, {}).items()
    }
    if distributed.rank() == 0:
        with _full_disk_is_an_os_error():
            save_file(state, folder / OPTIMIZER_FILE)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Inverse of `save_optimizer`."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    with safe_open(folder / OPTIMIZER_FILE, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (not a dict)
            quantity, name = key.split("/", 1)
            parameter, value = parameters[name], file.get_tensor(key)
            same_shape = value.shape == parameter.shape
            optimizer.state[parameter][quantity] = (
                distributed.like(value, parameter) if same_shape else value.to(parameter.device)
            )


def save_counters(counters: Mapping[str, int], folder: Path) -> None:
    """Write the counters and the state of the random generators of torch, numpy and Python."""
    if distributed.rank() > 0:
        return
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "python": torch.tensor(words),
    }
    tensors |= {f"cuda/{index}": state for index, state in enumerate(_cuda_states())}
    with _full_disk_is_an_os_error():
        save_file(tensors, folder / RANDOM_FILE)
    values: dict[str, Any] = {
        "counters": dict(counters),
        "numpy": [position, has_gauss, gauss],
        "python": [version, next_gauss],
    }
    (folder / COUNTERS_FILE).write_text(json.dumps(values))


def load_counters(folder: Path) -> dict[str, int]:
    """Set the random generators and return the counters."""
    values = json.loads((folder / COUNTERS_FILE).read_text())
    with safe_open(folder / RANDOM_FILE, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    torch.set_rng_state(tensors["torch"])
    for index in range(len(_cuda_states())):
        if f"cuda/{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda/{index}"], index)
    position, has_gauss, gauss = values["numpy"]
    np.random.set_state(("MT19937", tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, next_gauss = values["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), next_gauss))
    return dict(values["counters"])


def _cuda_states() -> list[Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
