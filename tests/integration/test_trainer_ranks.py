"""The learner over two ranks (FSDP2 on gloo) against one rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_kit import random_groups, save_tiny_model, trainer_config

from laminar.trainer.learner import TorchLearner

TRAIN_ON_A_RANK = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
from safetensors.torch import save_file

rank, kit, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
sys.path.insert(0, kit)
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
from trainer_kit import random_groups, trainer_config
from laminar.trainer.learner import TorchLearner

rules = {"proximal": "recomputed", "kl_coefficient": 0.1}
config = trainer_config(mini_batches=2, micro_batch_tokens=60, algorithm=rules)
learner = TorchLearner(folder / "model", config, seed=0)
metrics = [learner.step(random_groups(step)) for step in range(4)]
saved = folder / "saved"
if rank == 0:
    saved.mkdir()
learner.save(saved)
metrics.append(learner.step(random_groups(9, num_groups=1, size=2)[:1]))  # fewer sequences than a rank may want
weights = {name: tensor.contiguous() for name, tensor in learner.tensors().items()}
restored = TorchLearner(folder / "model", config, seed=0)
restored.restore(saved)
assert restored.step(random_groups(9, num_groups=1, size=2)[:1]) == metrics[-1]
save_file(weights, folder / f"rank-{rank}.safetensors")
(folder / f"rank-{rank}.json").write_text(json.dumps(metrics))
dist.barrier()
os._exit(0)  # threads of gloo that outlive the interpreter abort the process now and then
"""


@pytest.mark.slow
def test_two_ranks_learn_what_one_rank_learns(tmp_path):
    save_tiny_model(tmp_path / "model")
    kit = str(Path(__file__).parent)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN_ON_A_RANK, str(rank), kit, str(tmp_path)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=100) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    first, second = (load_file(tmp_path / f"rank-{rank}.safetensors") for rank in range(2))
    assert (tmp_path / "rank-0.json").read_text() == (tmp_path / "rank-1.json").read_text()

    config = trainer_config(mini_batches=2, algorithm={"proximal": "recomputed", "kl_coefficient": 0.1})
    alone = TorchLearner(tmp_path / "model", config, seed=0)
    for step in range(4):
        alone.step(random_groups(step))
    alone.step(random_groups(9, num_groups=1, size=2)[:1])
    for name, tensor in alone.tensors().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], tensor, atol=2e-4, rtol=1e-3)

    resumed = TorchLearner(tmp_path / "model", config, seed=0)
    resumed.restore(tmp_path / "saved")
    metrics = resumed.step(random_groups(9, num_groups=1, size=2)[:1])
    assert metrics["lr"] == pytest.approx(1e-2)
