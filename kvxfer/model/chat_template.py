"""A chat's messages as the one prompt that the model was trained on.

Facts relied on (transformers 5.17, read; jinja2 3.1, run): a template is Jinja with trim_blocks and
lstrip_blocks, loop controls, a filter `tojson` that escapes nothing, the functions raise_exception
and strftime_now, and the tokenizer's special tokens by name. chat_template.jinja goes before the
field of tokenizer_config.json, which holds a text or a list of named ones. The text has its special
tokens in it, so none is added when it is tokenized. transformers itself would load torch for this.

A template comes with the model: it runs in Jinja's sandbox, without access to Python.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvxfer.errors import ModelError, UsageError


class _Named(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    chat_template: str | list[_Named] | None = None


class ChatTemplate:
    """One template, compiled. Safe to share between threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        """`origin` names the file in errors. Raises UsageError (field 'chat_template')."""
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UsageError("chat_template", origin, str(error)) from error

    @classmethod
    def load(cls, model_dir: Path, path: Path | None = None) -> ChatTemplate | None:
        """`path`, or what the model's directory holds; None where it holds none.

        Raises UsageError (fields 'chat_template' and 'model').
        """
        config_path = model_dir / "tokenizer_config.json"
        raw = config_path.read_bytes() if config_path.is_file() else b"{}"
        try:
            config = msgspec.json.decode(raw, type=_TokenizerConfig)
            fields = msgspec.json.decode(raw, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = f"tokenizer_config.json: {error}"
            raise UsageError("model", str(model_dir), reason) from error
        own = model_dir / "chat_template.jinja"
        if path is not None or own.exists():
            path = path or own
            return cls(_read(path), _special_tokens(fields), str(path))
        source = config.chat_template
        if isinstance(source, list):
            source = next((one.template for one in source if one.name == "default"), None)
        if source is None:
            return None
        return cls(source, _special_tokens(fields), str(config_path))

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt, up to where the assistant begins unless add_generation_prompt is False.
        Raises ModelError with what the template has against the messages."""
        known: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "documents": None}
        try:
            return self._template.render(
                messages=messages, **{**self._special_tokens, **known, **variables}
            )
        # A template's code fails on messages that it does not foresee with any of Python's errors.
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"the chat template refuses the messages: {reason}") from error


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what the assistant said, for training; it changes no text."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("chat_template", str(path), str(error)) from error


def _special_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and others: a text, or an object that has it as 'content'."""
    found = {}
    for name, value in fields.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
