"""The learner on tiny models: what an update depends on, that it learns, and what it saves."""

import math
import resource
import signal

import numpy as np
import pytest
import torch
from trainer_kit import VOCABULARY, answer, llama, qwen2, random_groups, save_tiny_model, trainer_config
from transformers import AutoModelForCausalLM

from laminar.config.training import CheckpointConfig
from laminar.schema.errors import RunFailed, UserError
from laminar.schema.trajectories import ExperienceGroup, Prompt
from laminar.trainer.checkpoints import Checkpoints, export_hf
from laminar.trainer.learner import TorchLearner, learning_rate
from laminar.trainer.packing import pack
from laminar.trainer.sequences import build_sequences


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def flat(learner: TorchLearner) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in learner.tensors().values()])


def flat_gradient(learner: TorchLearner) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in learner._model.parameters()])


def groups_with_an_idle_one(seed: int) -> list[ExperienceGroup]:
    """The last group has equal rewards: its advantages are 0."""
    *groups, last = random_groups(seed)
    members = tuple(answer([1, 2, 3, 4], reward=1.0, trajectory_id=str(index)) for index in range(4))
    return [*groups, ExperienceGroup(group_id=last.group_id, prompt=last.prompt, members=members)]


@pytest.mark.parametrize("loss", ["token_mean", "sequence_mean"])
def test_the_split_into_micro_batches_never_changes_the_gradient(model_path, loss):
    groups = random_groups(0)
    gradients = []
    for budget in (10_000, 90, 1):
        learner = TorchLearner(model_path, trainer_config(micro_batch_tokens=budget, algorithm={"loss": loss}), 0)
        metrics = learner.step(groups)
        gradients.append((flat_gradient(learner), metrics))
    (whole, whole_metrics), *others = gradients
    assert whole.abs().max() > 1e-3
    for gradient, metrics in others:
        torch.testing.assert_close(gradient, whole, atol=1e-6, rtol=1e-4)
        assert metrics == pytest.approx(whole_metrics, rel=1e-3, abs=1e-6)


def test_skipping_sequences_without_advantage_changes_nothing_but_the_time(model_path):
    """By its dotted path the same objective is one of the user's, of which nothing is known."""
    groups = groups_with_an_idle_one(1)
    skipping, running = (
        TorchLearner(model_path, trainer_config(algorithm={"objective": objective}), 0)
        for objective in ("clip", "laminar.trainer.losses:clip")
    )
    skipped, run = skipping.step(groups), running.step(groups)
    assert (skipped["sequences_skipped"], run["sequences_skipped"]) == (4, 0)
    assert skipped["sequences"] == run["sequences"] == 16
    assert skipped["loss"] == pytest.approx(run["loss"], rel=1e-5)
    torch.testing.assert_close(flat_gradient(skipping), flat_gradient(running), atol=1e-6, rtol=1e-4)


def test_a_mini_batch_without_any_advantage_still_decays_the_moments(model_path):
    learner = TorchLearner(model_path, trainer_config(), 0)
    learner.step(random_groups(0))
    before = flat(learner)
    idle = groups_with_an_idle_one(0)[-1:]
    metrics = learner.step(idle)
    assert (metrics["loss"], metrics["grad_norm"]) == (0, 0)
    assert not torch.equal(before, flat(learner))


def test_the_loss_of_an_update_agrees_with_a_plain_computation(model_path):
    """REINFORCE with a baseline, written down in five lines, gives the same gradient at ratio 1."""
    groups = random_groups(2)
    learner = TorchLearner(model_path, trainer_config(algorithm={"proximal": "recomputed", "importance_cap": 1e9}), 0)
    learner.step(groups)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    sequences = build_sequences(groups, trainer_config().algorithm)
    total = torch.zeros(())
    for sequence in sequences:
        token_ids = torch.from_numpy(sequence.token_ids).long()
        logprobs = model(token_ids[None]).logits[0, :-1].log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
        importance = (logprobs.detach() - torch.from_numpy(sequence.behaviour_logprobs[1:])).exp()
        trained = torch.from_numpy(sequence.trained[1:])
        total = total - (importance * logprobs)[trained].sum() * sequence.advantage * sequence.weight
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm > 0
    wanted = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(flat_gradient(learner), wanted, atol=1e-5, rtol=1e-3)


def test_log_probs_are_taken_at_the_temperature_of_the_sampling(model_path):
    group = random_groups(3)[:1]
    batch = pack(sorted(build_sequences(group, trainer_config().algorithm), key=lambda s: -s.num_inputs), "cpu")
    cold, plain = (TorchLearner(model_path, trainer_config(), 0, temperature=t) for t in (0.5, 1.0))
    assert cold._model(batch).mean() != plain._model(batch).mean()


def test_several_mini_batches_keep_the_proximal_policy_of_the_iteration(model_path):
    groups = random_groups(4, num_groups=4)
    rules = {"proximal": "recomputed"}
    learner = TorchLearner(model_path, trainer_config(mini_batches=2, algorithm=rules), 0)
    first, second = learner.step(groups[:2]), learner.step(groups[:2])
    assert first["ratio_mean"] == first["ratio_max"] == 1
    assert second["ratio_max"] > 1.01
    assert learner.step(groups[2:])["ratio_max"] == 1  # a new iteration has a new proximal policy


def test_the_kl_term_pulls_towards_the_initial_model(model_path):
    groups = groups_with_an_idle_one(5)
    distances = []
    for coefficient in (0.01, 10.0):
        learner = TorchLearner(model_path, trainer_config(algorithm={"kl_coefficient": coefficient}), 0)
        distances.append([learner.step(groups)["reference_kl"] for _ in range(6)])
    assert distances[0][0] == pytest.approx(0, abs=1e-6)
    assert distances[1][-1] < 0.5 * distances[0][-1]


def test_a_loss_that_is_not_finite_stops_the_run_and_applies_nothing(model_path):
    learner = TorchLearner(model_path, trainer_config(micro_batch_tokens=1), 0)
    learner.step(random_groups(0))
    before = flat(learner)
    good, bad = random_groups(1, num_groups=2)
    poisoned = tuple(
        answer([1, 2], reward=float(index), trajectory_id=str(index), logprob=math.nan) for index in range(2)
    )
    bad = ExperienceGroup(group_id="the-bad-one", prompt=bad.prompt, members=poisoned)
    with pytest.raises(RunFailed, match=r"step 2, mini-batch 0: .*Groups concerned: the-bad-one\."):
        learner.step([good, bad])
    assert torch.equal(before, flat(learner))


def test_learning_rate_rises_from_zero_and_stays():
    rules = trainer_config(optimizer={"lr": 1.0, "warmup_steps": 4}).optimizer
    assert [learning_rate(rules, iteration) for iteration in (1, 2, 4, 5)] == [0.25, 0.5, 1, 1]
    assert learning_rate(trainer_config(optimizer={"lr": 1.0}).optimizer, 1) == 1


def test_weights_go_out_under_the_names_of_the_file(model_path):
    learner = TorchLearner(model_path, trainer_config(), 0)
    assert learner.tensors().keys() == llama().state_dict().keys() - {"lm_head.weight"}


def sampled_group(learner: TorchLearner, generator: torch.Generator, group_id: str) -> ExperienceGroup:
    """Eight answers of one token to one of two prompts; the reward is 1 for the token 5 after 1, and 9 after 2."""
    prompt, wanted = ((1,), 5) if generator.initial_seed() % 2 else ((2,), 9)
    with torch.no_grad():
        learner._model.language_model.set_attn_implementation("sdpa")
        logits = learner._model.language_model(torch.tensor([prompt])).logits[0, -1]
        learner._model.language_model.set_attn_implementation("laminar_packed")
    drawn = torch.multinomial(logits.softmax(-1), 8, replacement=True, generator=generator).tolist()
    logprobs = logits.log_softmax(-1)
    members = tuple(answer([token], reward=float(token == wanted), logprob=[logprobs[token].item()]) for token in drawn)
    return ExperienceGroup(
        group_id=group_id, prompt=Prompt(prompt_id="p", token_ids=prompt, payload={}), members=members
    )


@pytest.mark.parametrize("advantage", ["grpo", "grpo_no_std", "rloo"])
def test_a_bandit_is_learned(tmp_path, advantage):
    path = save_tiny_model(tmp_path, llama(initializer_range=0.05))
    learner = TorchLearner(path, trainer_config(algorithm={"advantage": advantage}, optimizer={"lr": 2e-2}), 0)
    rewards = []
    for step in range(24):
        groups = [sampled_group(learner, torch.Generator().manual_seed(16 * step + i), str(i)) for i in range(16)]
        rewards.append(np.mean([member.reward for group in groups for member in group.members]))
        learner.step(groups)
    assert rewards[0] < 3 / VOCABULARY
    assert np.mean(rewards[-5:]) > 0.9


@pytest.mark.parametrize("build", [llama, qwen2])
def test_a_restored_learner_goes_on_bit_for_bit(tmp_path, build):
    path = save_tiny_model(tmp_path / "model", build())
    config = trainer_config(mini_batches=2, optimizer={"warmup_steps": 3}, algorithm={"proximal": "recomputed"})
    undisturbed = TorchLearner(path, config, 0)
    for step in range(4):
        undisturbed.step(random_groups(step))
    (tmp_path / "saved").mkdir()
    undisturbed.save(tmp_path / "saved")
    expected = [undisturbed.step(random_groups(10 + step)) for step in range(3)]
    noise = torch.rand(3)

    restored = TorchLearner(path, config, 99)
    restored.step(random_groups(77))
    restored.restore(tmp_path / "saved")
    assert [restored.step(random_groups(10 + step)) for step in range(3)] == expected
    assert torch.equal(torch.rand(3), noise)
    assert torch.equal(flat(restored), flat(undisturbed))


def test_a_checkpoint_holds_a_model_that_transformers_loads(tmp_path, model_path):
    learner = TorchLearner(model_path, trainer_config(), 0)
    learner.step(random_groups(0))
    (tmp_path / "saved").mkdir()
    learner.save(tmp_path / "saved")
    export_hf(tmp_path / "saved", tmp_path / "out" / "model")
    assert (tmp_path / "out" / "model" / "tokenizer.json").read_text() == '{"a": "tokenizer"}'
    assert not (tmp_path / "out" / "model" / "notes.md").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    weights = model.state_dict()
    for name, tensor in learner.tensors().items():
        assert torch.equal(weights[name], tensor), name
    assert model.config._attn_implementation == "sdpa"


def test_a_disk_that_is_full_while_the_learner_saves_is_one_sentence(tmp_path, model_path):
    """A real failing write, by a limit of the kernel on file sizes."""
    learner = TorchLearner(model_path, trainer_config(), 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(RunFailed, match="step 7 could not be written"):
            Checkpoints(tmp_path / "checkpoints", CheckpointConfig()).save(7, learner.save)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_checkpoint_of_another_model_is_refused(tmp_path, model_path):
    (tmp_path / "saved").mkdir()
    TorchLearner(model_path, trainer_config(), 0).save(tmp_path / "saved")
    for name, other in (("wider", llama(hidden_size=64)), ("deeper", llama(num_hidden_layers=3)), ("other", qwen2())):
        learner = TorchLearner(save_tiny_model(tmp_path / name, other), trainer_config(), 0)
        with pytest.raises(RunFailed, match="another model"):
            learner.restore(tmp_path / "saved")


def test_what_cannot_work_is_one_sentence(tmp_path, model_path):
    with pytest.raises(UserError, match=r"model\.path .*nowhere"):
        TorchLearner(tmp_path / "nowhere", trainer_config(), 0)
    with pytest.raises(UserError, match=r"trainer\.device is 'cuda:7'"):
        TorchLearner(model_path, trainer_config(device="cuda:7"), 0)
