"""Text to token ids and back, as transformers does it, without importing transformers or torch.

Invariant: for a model folder with a `tokenizer.json`, prompts get the same ids as from `AutoTokenizer`: plain text with
the special tokens of that file's post-processor, messages through the model's chat template.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from laminar.schema.errors import UserError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys of tokenizer_config.json that chat templates may use as variables."""

PLACEHOLDER = "\ue000"
"""A character for private use, so that no template and no message has it."""


class Tokenizer:
    """A loaded tokenizer; build it with `load_tokenizer`.

    `stop_token_ids` end an answer: any of them, drawn by the model, is its last token.
    """

    def __init__(
        self,
        *,
        backend: tokenizers.Tokenizer,
        chat_template: jinja2.Template | None,
        named_tokens: Mapping[str, str],
        stop_token_ids: tuple[int, ...],
        folder: Path,
    ) -> None:
        self.stop_token_ids = stop_token_ids
        self._backend = backend
        self._chat_template = chat_template
        self._named_tokens = named_tokens
        self._folder = folder

    def encode_prompt(self, prompt: str | Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Ids of a problem's prompt, ending where the model's answer begins."""
        if isinstance(prompt, str):
            return tuple(self._backend.encode(prompt, add_special_tokens=True).ids)
        return self.encode_text(self.render(prompt))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of text inside a context, such as an environment's reply: nothing is added to it."""
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_reply(self, messages: Sequence[Mapping[str, str]], after: Sequence[int]) -> tuple[int, ...]:
        """Ids of messages that follow the model's turn `after`, up to the opening of its next turn.

        What the model drew is never written again: the chat template writes a placeholder in its place, and what
        follows that is taken: the rest of the turn's closing, which the model may have drawn already, and the messages.
        """
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACEHOLDER}]
        _, found, text = self.render([*turn, *messages]).partition(PLACEHOLDER)
        if not found:
            raise UserError(f"The chat template of {self._folder} leaves out what an assistant says.")
        drawn_end = self._backend.id_to_token(after[-1]) if after and after[-1] in self.stop_token_ids else None
        return self.encode_text(text.removeprefix(drawn_end or ""))

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of ids, special tokens removed."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text that the chat template makes of messages, with the opening of the assistant's turn at its end."""
        if self._chat_template is None:
            raise UserError(
                f"{self._folder} has no chat template, but the task's prompts are chat messages: "
                f"use a chat model, put a chat_template.jinja into the folder, or let the task give plain text."
            )
        try:
            return self._chat_template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._named_tokens,
            )
        except jinja2.TemplateError as error:
            raise UserError(
                f"The chat template of {self._folder} refuses the messages {messages!r}: {error}"
            ) from error


def load_tokenizer(model_path: str | Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face model folder."""
    folder = Path(model_path)
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise UserError(
            f"{tokenizer_file} does not exist: the model path must be a folder in Hugging Face format whose tokenizer "
            f"was saved as tokenizer.json (AutoTokenizer.from_pretrained(...).save_pretrained(folder) writes it)."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:
        raise UserError(f"{tokenizer_file} cannot be read as a tokenizer: {error}") from error
    # Saved with either, the file would cut or pad prompts; both are the caller's business.
    backend.no_truncation()
    backend.no_padding()
    settings = _read_json(folder / "tokenizer_config.json")
    named_tokens = _named_tokens(settings, _read_json(folder / "special_tokens_map.json"))
    backend.add_special_tokens([token for token in named_tokens.values() if backend.token_to_id(token) is None])
    template = _template_source(folder, settings)
    return Tokenizer(
        backend=backend,
        chat_template=None if template is None else _compile(template, folder),
        named_tokens=named_tokens,
        stop_token_ids=_stop_token_ids(folder, backend, named_tokens),
        folder=folder,
    )


def _read_json(file: Path) -> dict[str, Any]:
    """Content of an optional file of the model folder; {} if it is not there."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise UserError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold one JSON object, but holds a {type(content).__name__}.")
    return content


def _named_tokens(settings: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and so on; each is saved as a string or as a dictionary with its `content`."""
    named = {}
    for key in NAMED_TOKENS:
        value = settings.get(key, special_tokens_map.get(key))
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            named[key] = value
    return named


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """`chat_template.jinja` if there is one, else what tokenizer_config.json says; of several named ones, `default`."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _compile(source: str, folder: Path) -> jinja2.Template:
    """Compile in a sandbox, since templates come with models from anywhere; filters and globals as in transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UserError(f"The chat template of {folder} is not a valid Jinja template: {error}") from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training on chats; here it only has to be let through."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as a mutable set

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML characters, which a prompt must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _stop_token_ids(folder: Path, backend: tokenizers.Tokenizer, named: Mapping[str, str]) -> tuple[int, ...]:
    """What generation_config.json says, as in generate(); else config.json, else the tokenizer's eos_token."""
    for file in ("generation_config.json", "config.json"):
        found = _read_json(folder / file).get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    if eos is not None:
        return (eos,)
    raise UserError(
        f"{folder} names no end-of-answer token: set eos_token_id in {folder / 'generation_config.json'}, "
        f"else every answer would run to the length limit."
    )
