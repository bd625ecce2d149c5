"""Learner, checkpoints and loop together: what a killed run does after it was resumed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from trainer_kit import random_groups, save_tiny_model, trainer_config

from laminar.telemetry.events import NullEvents
from laminar.trainer.checkpoints import Checkpoints
from laminar.trainer.learner import TorchLearner
from laminar.trainer.loop import TrainerLoop


class SeededBuffer:
    """The groups of a step depend on the step alone."""

    async def sample(self, step, part, num_groups, wait_s):
        return tuple(random_groups(100 * step + part, num_groups=num_groups))

    async def commit(self, step):
        pass

    async def rewind(self, step):
        pass

    async def request_evaluation(self, version):
        pass


class LastWeights:
    """Keeps a copy of what was published last; stops the run after a given version."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.weights = {}
        self.version = None
        self.stop_after = stop_after

    async def newest(self):
        return self.version

    async def publish(self, version, tensors):
        return (await self.write(version, tensors)).stall_s

    async def write(self, version, tensors):
        self.weights, self.version = {name: tensor.clone() for name, tensor in tensors.items()}, version
        if version == self.stop_after:
            raise KeyboardInterrupt
        return self

    async def complete(self, written):
        pass

    stall_s = 0.0


class NoManager:
    async def published(self, version):
        pass


def train(model: Path, folder: Path, stop_after: int | None = None) -> dict[str, torch.Tensor]:
    config = trainer_config(num_steps=6, mini_batches=2, checkpoint={"every_steps": 2})
    sink = LastWeights(stop_after)
    loop = TrainerLoop(
        config,
        evaluate_every=None,
        learner=TorchLearner(model, config, seed=0),
        buffer=SeededBuffer(),
        sink=sink,
        manager=NoManager(),
        checkpoints=Checkpoints(folder, config.checkpoint),
        events=NullEvents(),
    )
    try:
        asyncio.run(loop.run())
    except KeyboardInterrupt:
        assert stop_after is not None
    return sink.weights


def test_a_resumed_run_ends_with_the_weights_of_the_undisturbed_one(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    undisturbed = train(model, tmp_path / "undisturbed")
    train(model, tmp_path / "stopped", stop_after=5)
    resumed = train(model, tmp_path / "stopped")
    for name, tensor in undisturbed.items():
        assert torch.equal(resumed[name], tensor), name


SAVE_FOR_EVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from trainer_kit import random_groups, trainer_config
from laminar.trainer.checkpoints import Checkpoints
from laminar.trainer.learner import TorchLearner

config = trainer_config(checkpoint={"every_steps": 1})
learner = TorchLearner(Path(sys.argv[2]), config, seed=0)
for step in range(1, 10_000):
    learner.step(random_groups(step))
    Checkpoints(Path(sys.argv[3]), config.checkpoint).save(step, learner.save)
"""


def test_a_learner_killed_while_saving_leaves_a_checkpoint_that_loads(tmp_path):
    model, folder = save_tiny_model(tmp_path / "model"), tmp_path / "checkpoints"
    config = trainer_config(checkpoint={"every_steps": 1})
    command = [sys.executable, "-c", SAVE_FOR_EVER, str(Path(__file__).parent), str(model), str(folder)]
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as child:
        give_up = time.monotonic() + 60
        while Checkpoints(folder, config.checkpoint).newest() is None and time.monotonic() < give_up:
            time.sleep(0.01)
        time.sleep(0.17)
        child.send_signal(signal.SIGKILL)
    newest = Checkpoints(folder, config.checkpoint).newest()
    learner = TorchLearner(model, config, seed=0)
    learner.restore(newest.path)

    replayed = TorchLearner(model, config, seed=0)
    for step in range(1, newest.step + 1):
        replayed.step(random_groups(step))
    for name, tensor in replayed.tensors().items():
        torch.testing.assert_close(learner.tensors()[name], tensor, atol=1e-4, rtol=1e-3)
