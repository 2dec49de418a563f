"""The answers of one HTTP request on their way: from tokens to text, to their end.

| an answer is | what happens                                  | leaves by                       |
| ---          | ---                                           | ---                             |
| under way    | tokens become text; what may begin a stop     | a stop string, the worker's end |
|              | string is held back                           | of it, an error, or `close`     |
| over         | the front is told: if it had not ended there, |                                 |
|              | it is cancelled on both workers               |                                 |
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from kvxfer.errors import ControlError
from kvxfer.model.tokenizer import Tokenizer
from kvxfer.serve.admission import Admission, try_later
from kvxfer.serve.front import Front, Stream
from kvxfer.serve.openai.errors import ApiError
from kvxfer.serve.openai.request import Ask, Prompt
from kvxfer.serve.openai.stop_strings import StopStrings

FinishReason = Literal["stop", "length"]


class ClientGone(Exception):
    """Nobody waits for the answer."""


@dataclass(slots=True)
class Delta:
    """What is new of one answer. `finish_reason` is None until its end."""

    answer: Answer
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    """The stop string or the token of stop_token_ids that ended it."""


class Answer:
    """One of them."""

    def __init__(
        self, index: int, prompt: Prompt, stream: Stream, ask: Ask, tokenizer: Tokenizer
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.stream = stream
        self.num_tokens = 0
        """Tokens that were turned into text: those that are counted."""
        self.is_over = False
        self.is_released = False
        """At the front, and where answers are counted."""
        self._ask = ask
        self._detokenizer = tokenizer.stream()
        self._stops = StopStrings(ask.stops, includes=ask.includes_stop)

    def news(self) -> Delta | None:
        """What came since the last time, None if nothing that may be told. Raises ApiError when it
        ended as an error."""
        if self.is_over:
            return None
        completion, before, text = self.stream.completion, self.num_tokens, ""
        while self.num_tokens < len(completion.output) and self._stops.stopped_by is None:
            token = completion.output[self.num_tokens]
            self.num_tokens += 1
            if token not in self._ask.stop_token_ids:
                text += self._stops.push(self._detokenizer.push(token))
        fresh = completion.output[before : self.num_tokens]
        if self._stops.stopped_by is not None:
            self.is_over = True
            return Delta(self, text, fresh, "stop", self._stops.stopped_by)
        if completion.finished is None:
            if text or (fresh and self._ask.returns_token_ids):
                return Delta(self, text, fresh, None, None)
            return None
        self.is_over = True
        reason = self._how_it_ended()
        text += self._stops.push(self._detokenizer.finish())
        if self._stops.stopped_by is not None:
            return Delta(self, text, fresh, "stop", self._stops.stopped_by)
        last = completion.output[-1] if reason == "stop" and completion.output else None
        by = last if last in self._ask.told_stop_ids else None
        return Delta(self, text + self._stops.finish(), fresh, reason, by)

    def _how_it_ended(self) -> FinishReason:
        finished = self.stream.completion.finished
        assert finished is not None
        if finished.reason == "stop":
            return "stop"
        if finished.reason == "length":
            return "length"
        if finished.reason == "overloaded":
            raise try_later(finished.error or "overloaded", finished.retry_after_s)
        if finished.reason == "refused":
            raise ApiError(400, finished.error, code="refused")
        raise ApiError(500, finished.error or f"the answer ended: {finished.reason}")


@dataclass(eq=False)
class Generation:
    """All answers of one request. Whoever began it closes it."""

    front: Front
    admission: Admission
    answers: list[Answer] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    client_is_gone: bool = False

    @classmethod
    def begin(
        cls,
        front: Front,
        admission: Admission,
        ask: Ask,
        tokenizer: Tokenizer,
        request_id: str,
        traceparent: str = "",
    ) -> Generation:
        """Send all to the workers, or none. Raises ApiError."""
        admission.enter(ask.num_answers)
        generation = cls(front, admission)
        left = ask.num_answers
        try:
            for prompt in ask.prompts:
                for one in range(ask.n):
                    index = len(generation.answers)
                    stream = front.submit(
                        prompt.tokens,
                        prompt.max_new_tokens,
                        generation.wake,
                        sampling=ask.sampling_of(one),
                        stop_token_ids=ask.stop_token_ids,
                        verify=ask.verify,
                        request_id=f"{request_id}-{index}",
                        traceparent=traceparent,
                    )
                    generation.answers.append(Answer(index, prompt, stream, ask, tokenizer))
                    left -= 1
        except ControlError as error:
            raise ApiError(503, str(error)) from error
        finally:
            for _ in range(left):
                admission.leave()
            if left:
                generation.close()
        return generation

    @property
    def is_over(self) -> bool:
        return all(answer.is_over for answer in self.answers)

    async def news(self) -> list[Delta]:
        """Wait for what is new, in the order of the answers. Raises ClientGone, and ApiError when
        an answer ended as an error: then the others are of no use either."""
        while True:
            if self.client_is_gone:
                raise ClientGone
            try:
                found = [delta for answer in self.answers if (delta := answer.news()) is not None]
            except ApiError as error:
                if error.status == 500 and not self.front.can_serve:
                    error.status = 503
                raise
            for delta in found:
                if delta.finish_reason is not None:
                    self._release(delta.answer)
            if found:
                return found
            await self.wake.wait()
            self.wake.clear()

    def client_left(self) -> None:
        """Cancel at once what is under way, and let `news` raise."""
        self.client_is_gone = True
        self.wake.set()
        self.close()

    def close(self) -> None:
        """Idempotent; what has not ended is cancelled."""
        for answer in self.answers:
            answer.is_over = True
            self._release(answer)

    def _release(self, answer: Answer) -> None:
        if answer.is_released:
            return
        answer.is_released = True
        self.front.release(answer.stream)
        self.admission.leave()
