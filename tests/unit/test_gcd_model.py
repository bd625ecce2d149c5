"""Facts about the checkpoint in recipes/gcd/model, which examples and tests of the whole system start from."""

import importlib.util
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "gcd"
MODEL = RECIPE / "model"


@pytest.fixture(scope="module")
def warm_start():
    spec = importlib.util.spec_from_file_location("gcd_warm_start", RECIPE / "warm_start.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_checkpoint_is_small_and_has_all_files():
    assert {file.name for file in MODEL.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 2_000_000


def test_the_checkpoint_subtracts_well_but_gives_up_early(warm_start):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from laminar.tasks.gcd import GcdTask

    torch = warm_start.torch
    torch.manual_seed(0)
    task = GcdTask()
    problems = task.problems("heldout")[:128]
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    answers = warm_start.sample_answers(model, tokenizer, problems, max_tokens=300)
    rewards = [task.grade(problem, answer) for problem, answer in zip(problems, answers, strict=True)]
    assert 0.15 < sum(rewards) / len(rewards) < 0.5
    assert warm_start.share_of_valid_steps(problems, answers) > 0.97
    assert max(map(len, answers)) < 300


def test_the_warm_start_is_deterministic_by_seed(warm_start):
    def losses(seed):
        torch, random = warm_start.torch, warm_start.random
        torch.manual_seed(seed)
        tokenizer = warm_start.build_tokenizer()
        model = warm_start.build_model(tokenizer)
        problems = warm_start.GcdTask().problems("train")
        stream = warm_start.batches(tokenizer, problems, batch_size=4, patience=0.8, rng=random.Random(seed))
        warm_start.train(model, stream, num_steps=2, peak_lr=1e-3)
        return [parameter.sum().item() for parameter in model.parameters()]

    assert losses(0) == losses(0)
    assert losses(0) != losses(1)
