"""Our tokenisation is that of transformers, without importing it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.schema.errors import UserError
from laminar.tasks.tokenizer import load_tokenizer

GCD_MODEL = Path(__file__).parents[2] / "recipes" / "gcd" / "model"

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if loop.index0 > 3 %}
        {%- break %}
    {%- endif %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' + message['role']) }}
    {%- endif %}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
<|im_start|>assistant
{{ message['content'] | trim }}<|im_end|>
        {%- endgeneration %}
    {%- else %}
<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}{{ {'é': '<&>'} | tojson }}<|im_end|>
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

MESSAGES = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is 3+4? <|im_end|> "},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "And 5+6? héllo"},
)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A byte-level BPE tokenizer with bos, a post-processor and a chat template, as modern chat models have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["What is the sum of three and four? user assistant system"] * 20, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    folder = tmp_path_factory.mktemp("chat-model")
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return folder


def reference(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", ["84,36:", "84,36:84-36=48#12", "", "unknown é characters"])
def test_the_gcd_tokenizer_gives_the_same_ids_as_transformers(text):
    ours, theirs = load_tokenizer(GCD_MODEL), reference(GCD_MODEL)
    assert list(ours.encode_prompt(text)) == theirs.encode(text)
    assert list(ours.encode_text(text)) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ours.encode_text(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_one_character_is_one_token_and_the_stop_token_is_not_part_of_the_text():
    tokenizer = load_tokenizer(GCD_MODEL)
    ids = tokenizer.encode_text("84-36=48#12")
    assert len(ids) == 11
    assert len(tokenizer.stop_token_ids) == 1
    assert tokenizer.decode([*ids, *tokenizer.stop_token_ids]) == "84-36=48#12"


@pytest.mark.parametrize("text", ["What is 3+4?", " héllo <|im_end|> wörld\n", ""])
def test_a_tokenizer_with_special_tokens_gives_the_same_ids_as_transformers(chat_model, text):
    ours, theirs = load_tokenizer(chat_model), reference(chat_model)
    assert ours.encode_prompt(text)[0] == theirs.bos_token_id
    assert list(ours.encode_prompt(text)) == theirs.encode(text)
    assert list(ours.encode_text(text)) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ours.encode_prompt(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


@pytest.mark.parametrize("ended", [True, False], ids=["with its end token", "with another end token"])
def test_a_dialogue_has_the_ids_of_the_whole_conversation_and_the_models_own_between_them(chat_model, ended):
    """What the model drew is kept even where the tokenizer would have cut the same text otherwise."""
    ours, theirs = load_tokenizer(chat_model), reference(chat_model)
    prompt, said, reply = list(MESSAGES[:2]), "three", {"role": "user", "content": "And 5+6? héllo"}
    drawn = [theirs.convert_tokens_to_ids(letter) for letter in said] + [2 if ended else 0]
    assert drawn[:-1] != theirs.encode(said, add_special_tokens=False)
    ids = [*ours.encode_prompt(prompt), *drawn, *ours.encode_reply([reply], after=drawn)]
    whole = theirs.apply_chat_template(
        [*prompt, {"role": "assistant", "content": said}, reply], tokenize=False, add_generation_prompt=True
    )
    told = theirs.decode(ids)
    assert told == whole if ended else told.replace("three<s>", "three") == whole


def test_a_template_that_refuses_a_reply_or_hides_answers_is_named(chat_model, tmp_path):
    with pytest.raises(UserError, match="refuses the messages"):
        load_tokenizer(chat_model).encode_reply([{"role": "judge", "content": "?"}], after=[2])
    folder = shutil.copytree(chat_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.raises(UserError, match="leaves out what an assistant says"):
        load_tokenizer(folder).encode_reply([{"role": "user", "content": "?"}], after=[2])


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "named"])
def test_the_chat_template_gives_the_same_prompt_as_transformers(chat_model, tmp_path, place):
    folder = shutil.copytree(chat_model, tmp_path / "model")
    if place != "chat_template.jinja":
        (folder / "chat_template.jinja").unlink()
        named = [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "rag", "template": "no"}]
        edit(folder / "tokenizer_config.json", chat_template=named if place == "named" else CHAT_TEMPLATE)
    ours, theirs = load_tokenizer(folder), reference(folder)
    text = theirs.apply_chat_template(list(MESSAGES), tokenize=False, add_generation_prompt=True)
    ids = theirs.apply_chat_template(list(MESSAGES), add_generation_prompt=True, return_dict=False)
    assert text.endswith("<|im_start|>assistant\n")
    assert ours.render(MESSAGES) == text
    assert list(ours.encode_prompt(MESSAGES)) == ids


@pytest.mark.parametrize("flags", [{"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_bos_and_eos_flags_of_the_config_count_as_little_as_in_transformers(chat_model, tmp_path, flags):
    folder = shutil.copytree(chat_model, tmp_path / "model")
    edit(folder / "tokenizer_config.json", **flags)
    assert list(load_tokenizer(folder).encode_prompt("What?")) == reference(folder).encode("What?")


def test_stop_tokens_come_from_the_first_file_that_names_any(chat_model, tmp_path):
    folder = shutil.copytree(chat_model, tmp_path / "model")
    assert load_tokenizer(folder).stop_token_ids == (2, 0)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load_tokenizer(folder).stop_token_ids == (7,)
    (folder / "config.json").unlink()
    assert load_tokenizer(folder).stop_token_ids == (2,)
    edit(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(UserError, match=r"names no end-of-answer token: set eos_token_id in .*generation_config\.json"):
        load_tokenizer(folder)


def test_a_folder_without_tokenizer_json_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json does not exist.*Hugging Face format"):
        load_tokenizer(tmp_path)


def test_damaged_files_are_refused_by_name(chat_model, tmp_path):
    folder = shutil.copytree(chat_model, tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json cannot be read as JSON"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        load_tokenizer(folder)


def test_messages_without_or_against_the_template_are_refused(chat_model):
    with pytest.raises(UserError, match="has no chat template"):
        load_tokenizer(GCD_MODEL).encode_prompt(MESSAGES)
    with pytest.raises(UserError, match="unknown role tool"):
        load_tokenizer(chat_model).encode_prompt([{"role": "tool", "content": ""}])


def test_a_template_cannot_reach_into_the_interpreter(chat_model, tmp_path):
    folder = shutil.copytree(chat_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(UserError, match="unsafe"):
        load_tokenizer(folder).encode_prompt(MESSAGES)


def test_tokenising_imports_neither_torch_nor_transformers():
    code = (
        f"import sys; from laminar.tasks.tokenizer import load_tokenizer; load_tokenizer({str(GCD_MODEL)!r}); "
        f"import laminar.tasks.grading, laminar.tasks.prompt_files, laminar.tasks.gcd; "
        f"sys.exit(sorted({{'torch', 'transformers', 'ray', 'numpy'}} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
