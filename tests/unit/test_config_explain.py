import json
import struct
from pathlib import Path
from typing import Any

import pytest

from laminar.config.explain import ModelFacts, explain, max_buffer_wait, model_facts
from laminar.config.loading import parse_config
from laminar.config.run_config import RunConfig
from laminar.scheduling import admission
from laminar.schema.errors import UserError

SHAPE = {"num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "hidden_size": 896}

FACTS = ModelFacts(
    num_parameters=1_000_000,
    weight_bytes=2_000_000,
    dtype="BF16",
    num_layers=24,
    kv_numbers_per_token=24 * 2 * 128,
    num_positions=1_024,
)


def _safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]], *, cut: int = 0) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * (end - cut))


def _model(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | config))
    return folder


def _config(**sections: Any) -> RunConfig:
    return parse_config({"model": {"path": "m"}, "task": {"path": "a:B"}} | sections, source="test")


def _row(text: str, name: str) -> str:
    (row,) = [line for line in text.splitlines() if line.startswith(f"  {name}")]
    return row.strip().removeprefix(name).strip()


def test_facts_come_from_the_headers_of_all_weight_files(tmp_path: Path):
    folder = _model(tmp_path / "m", max_position_embeddings=32_768)
    _safetensors(folder / "model-1.safetensors", {"a": ("BF16", [100, 10], 2_000), "b": ("BF16", [24], 48)})
    _safetensors(folder / "model-2.safetensors", {"c": ("F32", [6], 24)})
    facts = model_facts(folder)
    assert (facts.num_parameters, facts.weight_bytes, facts.dtype) == (1_030, 2_072, "BF16")
    assert facts.kv_numbers_per_token == 2 * 24 * 2 * 64
    assert facts.kv_bytes_per_token("float32") == 4 * facts.kv_numbers_per_token
    assert facts.num_positions == 32_768


def test_head_size_and_kv_heads_default_as_in_hugging_face(tmp_path: Path):
    folder = _model(tmp_path / "m", head_dim=128, num_key_value_heads=None)
    _safetensors(folder / "model.safetensors", {"a": ("F32", [1], 4)})
    assert model_facts(folder).kv_numbers_per_token == 2 * 24 * 14 * 128


def test_a_folder_without_weights_is_named_with_what_it_should_hold(tmp_path: Path):
    with pytest.raises(UserError, match=r"m holds no weights; expected config\.json, \*\.safetensors and"):
        model_facts(_model(tmp_path / "m"))
    with pytest.raises(UserError, match=r"nowhere has no config\.json; expected config\.json, \*\.safetensors and"):
        model_facts(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 4, b"\xff" * 64, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b"{"]
)
def test_a_file_that_is_not_safetensors_is_named(tmp_path: Path, content: bytes):
    folder = _model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors is not a whole safetensors file"):
        model_facts(folder)


def test_a_weight_file_that_was_cut_off_is_noticed(tmp_path: Path):
    folder = _model(tmp_path / "m")
    _safetensors(folder / "model.safetensors", {"a": ("F32", [100], 400)}, cut=1)
    with pytest.raises(UserError, match="shorter than its header says"):
        model_facts(folder)


def test_a_config_that_describes_no_decoder_is_refused(tmp_path: Path):
    folder = tmp_path / "m"
    folder.mkdir()
    _safetensors(folder / "model.safetensors", {"a": ("F32", [1], 4)})
    for text, sentence in (
        ("{", "cannot be read"),
        ("[]", "is not a model"),
        ("{}", "has no num_attention_heads"),
    ):
        (folder / "config.json").write_text(text)
        with pytest.raises(UserError, match=sentence):
            model_facts(folder)


def test_derived_numbers_are_those_of_the_arithmetic():
    text = explain(_config(rollout={"batch_trajectories": 120, "max_new_tokens": 1_000}), FACTS)
    assert _row(text, "longest sequence").startswith("<= 3048  prompt 2048 + answer 1000 tokens; the model knows 1024")
    assert _row(text, "trajectories per step").startswith("256 ")
    assert _row(text, "batches per step").startswith("2.29 ")
    assert _row(text, "answer tokens per step").startswith("<= 256k ")
    assert _row(text, "trajectories not trained yet").startswith("<= 1024 ")
    assert _row(text, "one weight version").startswith("3.815 MiB ")
    assert _row(text, "relay, kept versions").startswith("11.44 MiB ")
    assert _row(text, "relay, with those in use").startswith("<= 19.07 MiB ")
    assert _row(text, "learner ").startswith("15.26 MiB ")
    assert _row(text, "KV cache per replica").startswith("1.5 GiB ")
    assert _row(text, "answers per step").startswith("28.2 ")
    assert _row(text, "processes").startswith("9 ")


def test_the_reference_and_the_proximal_policy_are_counted_when_they_are_loaded():
    algorithm = {"kl_coefficient": 0.1, "proximal": "recomputed"}
    text = explain(_config(trainer={"algorithm": algorithm, "mini_batches": 2}), FACTS)
    assert _row(text, "learner ").startswith("22.89 MiB ")


def test_the_bound_of_staleness_is_that_of_admission_and_honest_where_there_is_none():
    for ahead in range(1, 60):
        for per_step in range(1, 20):
            assert max_buffer_wait(ahead, per_step) == admission.max_buffer_wait(ahead, per_step)
    text = explain(_config(), FACTS)
    assert _row(text, "while it is generated").startswith("unbounded ")
    assert _row(text, "while it waits").startswith("<= 4 versions  (64 - 1) // 16 + 1:")
    text = explain(_config(data={"sampler": "freshest"}), FACTS)
    assert _row(text, "while it waits").startswith("unbounded ")
    text = explain(_config(data={"sampler": "bounded_staleness", "max_staleness": 3}), FACTS)
    assert _row(text, "when it is drawn").startswith("<= 3 versions ")


def test_engines_without_a_cache_of_their_own_are_told_as_such():
    text = explain(_config(rollout={"engine": {"kind": "scripted"}}, evaluation={"num_prompts": 0}), FACTS)
    assert _row(text, "KV cache per replica").startswith("none ")
    assert _row(text, "evaluations").startswith("none ")
    text = explain(_config(rollout={"engine": {"kind": "custom", "path": "a:B"}}), FACTS)
    assert "if it uses that" in _row(text, "KV cache per replica")


def test_every_line_fits_a_terminal_and_has_its_reason():
    for line in explain(_config(), FACTS).splitlines():
        assert len(line) <= 120, line
