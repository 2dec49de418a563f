"""Chat templates, and where they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import TINY_MODEL

from kvxfer.errors import ModelError, UsageError
from kvxfer.model.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "a \"b\" <c> 'ä'"}, {"role": "assistant", "content": None}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, "test")


@pytest.mark.parametrize(
    "source",
    [
        (TINY_MODEL / "tokenizer_config.json").read_text(),
        "{% for m in messages %}{{ m | tojson }}\n{% endfor %}",
        "{{ messages | tojson(indent=2) }}",
        "{% for m in messages %}\n  {% if m.content is none %}{% break %}{% endif %}\n{{ m.role }}"
        "\n{% endfor %}{{ bos_token }}{{ eos_token }}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ tools }}{{ x }}",
    ],
)
def test_it_renders_what_transformers_renders(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    if source.startswith("{\n"):
        source = json.loads(source)["chat_template"]
    theirs, _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=source, bos_token="<s>", add_generation_prompt=True
    )
    assert template(source).render(MESSAGES) == theirs[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].role }}",
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_has_against_messages_is_told_in_one_line(source: str) -> None:
    with pytest.raises(ModelError, match=r"^the chat template refuses the messages: .+$"):
        template(source).render(MESSAGES)


def write(directory: Path, **config: Any) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_where_templates_come_from(tmp_path: Path) -> None:
    def found(path: Path | None = None) -> str | None:
        loaded = ChatTemplate.load(tmp_path, path)
        return None if loaded is None else loaded.render([])

    assert found() is None
    write(tmp_path, bos_token={"content": "<s>"}, chat_template="{{ bos_token }}1")
    assert found() == "<s>1"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(tmp_path, eos_token="</s>", chat_template=named)
    assert found() == "d"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}2")
    assert found() == "</s>2"
    (tmp_path / "other").write_text("3")
    assert found(tmp_path / "other") == "3"


def test_a_template_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"chat_template: .*no-such-file"):
        ChatTemplate.load(tmp_path, tmp_path / "no-such-file")
    with pytest.raises(UsageError, match="chat_template: 'test'"):
        template("{% if %}")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UsageError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)
