"""Bodies of responses: whole ones, and the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvxfer.serve.openai.generation import Answer, Delta
from kvxfer.serve.openai.request import Ask

Body = dict[str, Any]


@dataclass
class _Choice:
    """What was told of one answer so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    end: Delta | None = None
    has_begun: bool = False


class Answers:
    """Turns what is new of a request's answers into bodies."""

    def __init__(self, request_id: str, model: str, ask: Ask, texts: Sequence[str]) -> None:
        """`texts` go before the answers to each prompt; '' unless it is to be echoed."""
        self._ask = ask
        kind = "chat.completion" if ask.is_chat else "text_completion"
        if ask.is_chat and ask.streams:
            kind = "chat.completion.chunk"
        self._head: Body = {
            "id": request_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._texts = texts
        self._choices = [_Choice() for _ in range(ask.num_answers)]

    def chunks(self, delta: Delta) -> Iterator[Body]:
        """The events that tell `delta`."""
        choice = self._choices[delta.answer.index]
        text = delta.text
        if not choice.has_begun:
            choice.has_begun = True
            text = self._texts[delta.answer.index // self._ask.n] + text
            if self._ask.is_chat:
                yield self._chunk(delta, {"delta": {"role": "assistant", "content": ""}}, None)
        what: Body = {"text": text}
        if self._ask.is_chat:
            what = {"delta": {"content": text} if text else {}}
        if self._ask.returns_token_ids:
            what["token_ids"] = delta.token_ids
        yield self._chunk(delta, what, delta)

    def _chunk(self, delta: Delta, what: Body, end: Delta | None) -> Body:
        choice = {
            "index": delta.answer.index,
            **what,
            "logprobs": None,
            "finish_reason": end.finish_reason if end else None,
            "stop_reason": end.stop_reason if end else None,
        }
        body = {**self._head, "choices": [choice]}
        if self._ask.streams_usage:
            body["usage"] = None
        if end is not None and end.finish_reason is not None and self._ask.verify:
            body["kv_transfer_params"] = _verified(delta.answer)
        return body

    def usage_chunk(self, answers: Sequence[Answer]) -> Body:
        """The last event, where usage is asked for."""
        return {**self._head, "choices": [], "usage": self.usage(answers)}

    def usage(self, answers: Sequence[Answer]) -> Body:
        prompt = sum(len(one.tokens) for one in self._ask.prompts)
        told = sum(answer.num_tokens for answer in answers)
        return {"prompt_tokens": prompt, "completion_tokens": told, "total_tokens": prompt + told}

    def add(self, delta: Delta) -> None:
        """Keep it for `whole`."""
        choice = self._choices[delta.answer.index]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.end = delta

    def whole(self, answers: Sequence[Answer]) -> Body:
        """All of it; every answer has ended."""
        body = {
            **self._head,
            "choices": [self._whole_choice(answer) for answer in answers],
            "usage": self.usage(answers),
        }
        if self._ask.verify:
            body["kv_transfer_params"] = _verified(answers[0])
        return body

    def _whole_choice(self, answer: Answer) -> Body:
        choice = self._choices[answer.index]
        assert choice.end is not None
        text = self._texts[answer.index // self._ask.n] + choice.text
        body: Body = {"index": answer.index}
        if self._ask.is_chat:
            body["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            body["text"] = text
        body["logprobs"] = None
        body["finish_reason"] = choice.end.finish_reason
        body["stop_reason"] = choice.end.stop_reason
        if self._ask.returns_token_ids:
            body["token_ids"] = choice.token_ids
            body["prompt_token_ids"] = answer.prompt.tokens
        return body


def _verified(answer: Answer) -> Body:
    """The KV that a hand-over brought, and from whom to whom."""
    completion = answer.stream.completion
    digests = completion.finished.kv_digests if completion.finished else []
    return {
        "kv_digests": digests,
        "prefill": completion.generate.prefill,
        "decode": completion.backend.name if completion.backend else "",
    }
