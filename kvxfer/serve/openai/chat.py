"""The messages of a chat as a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvxfer.errors import ModelError
from kvxfer.serve.openai.errors import ApiError, refuse
from kvxfer.serve.openai.types import ChatRequest, Message
from kvxfer.serve.served import ServedModel

OURS = ("messages", "tools", "documents")
"""Variables of a template that a request's chat_template_kwargs may not set."""


def render(request: ChatRequest, served: ServedModel) -> str:
    """The text that the model continues. Raises ApiError."""
    if served.chat_template is None:
        reason = f"{served.name} has no chat template: give --chat-template, or use /v1/completions"
        raise ApiError(400, reason, param="messages", code="no_chat_template")
    if not request.messages:
        raise refuse("messages", [], "at least one is needed")
    variables = dict(request.chat_template_kwargs or {})
    if taken := [name for name in OURS if name in variables]:
        raise refuse("chat_template_kwargs", taken[0], "is not the request's to set")
    if request.add_generation_prompt is not None:
        variables["add_generation_prompt"] = request.add_generation_prompt
    messages = [_plain(at, message) for at, message in enumerate(request.messages)]
    try:
        return served.chat_template.render(messages, **variables)
    except ModelError as error:
        raise ApiError(400, str(error), param="messages") from error


def _plain(at: int, message: Message) -> dict[str, Any]:
    """As templates expect it: content is text."""
    where = f"messages[{at}]"
    if message.tool_calls or message.tool_call_id is not None:
        raise ApiError(
            400, f"{where}: tools are not supported here", param=where, code="unsupported_parameter"
        )
    content = message.content
    if isinstance(content, list):
        content = "\n".join(_texts(f"{where}.content", content))
    plain = {"role": message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _texts(where: str, parts: list[dict[str, Any]]) -> Iterator[str]:
    for at, part in enumerate(parts):
        kind, text = part.get("type"), part.get("text")
        if kind != "text" or not isinstance(text, str):
            raise refuse(f"{where}[{at}]", kind, "only parts of type 'text' are supported here")
        yield text
