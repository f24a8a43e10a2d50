"""Bodies of answers, in the form of the OpenAI API."""

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from .calls import Call
from .job import TRANSFER

DONE = b"data: [DONE]\n\n"


@dataclass(eq=False)
class Answer:
    """Words one request's answer.

    Attributes:
        call: the request.
        model: its name.
        num_generated: tokens so far, that which ended it included.
    """

    call: Call
    model: str
    num_generated: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, reason: str) -> bytes:
        """Return all of it."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if self.call.is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        body = self._body([choice]) | {"usage": self._usage()}
        if self.call.job.answer_params is not None:
            body[TRANSFER] = self.call.job.answer_params
        return msgspec.json.encode(body)

    def begin(self) -> bytes:
        """Return the first event of a stream: a chat's says who speaks."""
        if not self.call.is_chat:
            return b""
        return self._event({"delta": {"role": "assistant", "content": ""}}, None)

    def part(self, text: str, reason: str | None = None) -> bytes:
        """Return the event of some text, or of the end; b"" if it is neither."""
        if not text and reason is None:
            return b""
        if not self.call.is_chat:
            return self._event({"text": text}, reason)
        return self._event({"delta": {"content": text} if text else {}}, reason)

    def end(self) -> bytes:
        """Return what ends a stream."""
        if not self.call.has_usage:
            return DONE
        return _as_event(self._body([]) | {"usage": self._usage()}) + DONE

    def _event(self, fields: dict[str, Any], reason: str | None) -> bytes:
        choice = {"index": 0, **fields, "logprobs": None, "finish_reason": reason}
        return _as_event(self._body([choice]))

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        job, is_chat = self.call.job, self.call.is_chat
        kind = "chat.completion" if is_chat else "text_completion"
        return {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + job.request_id,
            "object": f"{kind}.chunk" if is_chat and self.call.is_stream else kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        job = self.call.job
        details = {"cached_tokens": job.num_cached_tokens}
        if job.is_semantic:
            details["similar_tokens"] = job.num_similar_tokens
        return {
            "prompt_tokens": len(job.prompt),
            "completion_tokens": self.num_generated,
            "total_tokens": len(job.prompt) + self.num_generated,
            "prompt_tokens_details": details,
        }


def _as_event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
