"""Weights and configs: copied in place, or refused with a sentence."""

import dataclasses
import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch_engine_kit import FAMILIES, ask, largest_error, random_prompt, run, runner_for, tiny_model
from transformers import AutoConfig

from laminar.engines.decoder_shape import read_shape, shape_of
from laminar.engines.factory import build_engine
from laminar.engines.rules import ScriptedEngineRules, TorchEngineRules


def test_weights_are_copied_from_read_only_shared_memory():
    model, other = tiny_model(), tiny_model(initializer_range=0.1)
    runner = runner_for(other)
    buffers = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    views = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns once that such views must not be written to
        for name, buffer in buffers.items():
            buffer.flags.writeable = False
            views[name] = torch.from_numpy(buffer)
    runner.load_weights(2, views)
    for buffer in buffers.values():
        buffer.flags.writeable = True
        buffer[...] = np.nan  # the relay reuses its slot
    requests = [ask("a", random_prompt(1, 20))]
    assert largest_error(model, requests, run(runner, requests)) < 1e-4


def test_a_not_a_number_of_an_old_version_does_not_outlive_it():
    model = tiny_model()
    runner = runner_for(model)
    poisoned = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    poisoned["model.layers.1.self_attn.v_proj.weight"][:] = float("nan")
    runner.load_weights(2, poisoned)
    runner.enqueue([ask("bad", random_prompt(2, 100))])
    with pytest.raises(RuntimeError, match="not finite"):
        runner.run()
    runner.abort(None)
    runner.load_weights(3, model.state_dict())
    requests = [ask("good", random_prompt(1, 20), new=40)]
    assert largest_error(model, requests, run(runner, requests)) < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "lack model.layers.1.mlp.up_proj.weight"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight has shape \(3,\)"),
    ],
)
def test_incomplete_weights_are_refused_before_anything_is_copied(change, message):
    model = tiny_model()
    runner = runner_for(model)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    change(tensors)
    with pytest.raises(ValueError, match=message):
        runner.load_weights(2, tensors)
    requests = [ask("a", random_prompt(1, 20))]
    assert largest_error(model, requests, run(runner, requests)) < 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "RoPE variant 'yarn'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"use_sliding_window": True}, "sliding"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes, message):
    config = {**tiny_model().config.to_dict(), **changes}
    with pytest.raises(ValueError, match=message):
        shape_of(config)


def test_configs_written_by_older_transformers_are_understood():
    config = tiny_model().config.to_dict()
    del config["rope_parameters"]
    old = {**config, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert shape_of(old).rope == {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    assert shape_of({**config, "rope_theta": 5e5, "rope_scaling": None}).rope["rope_type"] == "default"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("unsaid", ["", "head_dim", "tie_word_embeddings", "rms_norm_eps", "num_key_value_heads"])
def test_a_file_that_says_everything_is_read_as_transformers_reads_it(tmp_path, family, unsaid):
    tiny_model(family).config.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in said.items() if key != unsaid}))
    assert read_shape(tmp_path) == shape_of(AutoConfig.from_pretrained(tmp_path).to_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_is_read_without_it(tmp_path, family):
    """Its import takes as long as the rest of a replica's start."""
    tiny_model(family).config.save_pretrained(tmp_path)
    program = (
        "import sys; from pathlib import Path; from laminar.engines.decoder_shape import read_shape; "
        "read_shape(Path(sys.argv[1])); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask("r", [1, 2, 97]), "token ids outside 0..96"),
        (ask("r", []), "at least 1 token"),
        (ask("r", [1], new=600), "512 positions"),
        (ask("r", [1] * 100, new=61), "161 tokens .* 160 tokens"),
    ],
)
def test_requests_that_cannot_run_are_refused(request_, message):
    runner = runner_for(tiny_model(), kv_capacity_tokens=170)
    with pytest.raises(ValueError, match=message):
        runner.enqueue([ask("fine", [1, 2]), request_])
    assert runner.is_idle


def test_a_request_id_can_be_queued_only_once():
    runner = runner_for(tiny_model())
    runner.enqueue([ask("a", [1])])
    with pytest.raises(ValueError, match="a is already queued"):
        runner.enqueue([ask("b", [1]), ask("a", [1])])
    assert runner.load().num_waiting == 1


def test_the_factory_names_what_it_knows(tmp_path):
    rules = ScriptedEngineRules(max_running=1, kv_capacity_tokens=64)
    with pytest.raises(ValueError, match="torch, scripted"):
        build_engine("tocrh", tmp_path, rules)
    with pytest.raises(TypeError, match="TorchEngineRules"):
        build_engine("torch", tmp_path, rules)


def test_a_cache_of_less_than_one_page_is_refused():
    rules = TorchEngineRules(max_running=1, kv_capacity_tokens=31, prefill_chunk_tokens=1)
    with pytest.raises(ValueError, match="at least 1"):
        rules.batch_rules()
    assert dataclasses.replace(rules, kv_capacity_tokens=32).batch_rules().num_pages == 1
