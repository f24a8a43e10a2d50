"""One request, and its answer as it came."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

CHAT = "/v1/chat/completions"
WORDS = (
    *("cache", "block", "token", "layer", "head", "prompt", "answer", "engine", "router", "queue"),
    *("batch", "chunk", "prefix", "memory", "transfer", "latency", "request", "decode", "share"),
)
GARBAGE = "the answer is not of OpenAI's form"
NO_END = "the stream has no end"
MAX_REASON = 200  # characters of what is told


@dataclass
class Answer:
    """What became of a request; all times are seconds.

    Attributes:
        started_s: when it was sent, after the beginning.
        ttft_s: from then to the first token; 0: there was none.
        itl_s: between one part of the answer and the next.
        latency_s: to the last part.
        input_len: tokens of the prompt.
        output_len: tokens of the answer, as it tells; otherwise its parts.
        cached_len: tokens of the prompt that were cached, as the answer tells.
        error: why there is no whole answer; "": there is one.
        is_refused: whether it was refused for the load: 429.
        retry_after_s: after which time a refused request may come again, if that was told.
        decision: our router's, by its header.
    """

    started_s: float
    input_len: int
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    output_len: int = 0
    cached_len: int = 0
    error: str = ""
    is_refused: bool = False
    retry_after_s: float | None = None
    decision: dict[str, str] = field(default_factory=dict)

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token behind the first; None: there is none behind it."""
        if self.output_len < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_len - 1)

    @property
    def is_wasted_prefill(self) -> bool:
        """Whether it was refused when its prompt had been computed, as our router tells."""
        return self.is_refused and "prefilled_s" in self.decision


class _Part(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None

    @property
    def is_role(self) -> bool:
        """Whether it only says who speaks, before the first token."""
        return self.delta is not None and "role" in self.delta and not self.delta.get("content")


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: dict[str, Any] | None = None


class _Event(msgspec.Struct):
    choices: list[_Part] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


def body_of(
    endpoint: str, model: str, token_ids: Sequence[int], output_len: int, *, ignore_eos: bool
) -> dict[str, Any]:
    """Return the body of a streaming request; a chat has a word for each token."""
    body: dict[str, Any] = {
        "model": model, "stream": True, "stream_options": {"include_usage": True},
        "max_tokens": output_len,
    }  # fmt: skip
    if ignore_eos:
        body["ignore_eos"] = True
    if endpoint == CHAT:
        content = " ".join(WORDS[one % len(WORDS)] for one in token_ids)
        return {**body, "messages": [{"role": "user", "content": content}]}
    return {**body, "prompt": [*token_ids]}


async def send(
    client: httpx.AsyncClient, endpoint: str, body: dict[str, Any], input_len: int, began_s: float
) -> Answer:
    """Send a request, and take its answer; what goes wrong is told in it, not raised.

    Args:
        client: of the server.
        endpoint: where to.
        body: see ``body_of``.
        input_len: tokens of the prompt, unless the answer tells them.
        began_s: the beginning, by ``time.perf_counter``.
    """
    sent_s = time.perf_counter()
    taken = Answer(sent_s - began_s, input_len)
    try:
        async with client.stream("POST", endpoint, json=body) as reply:
            taken.decision = _decision(reply.headers.get("x-mooncake-decision", ""))
            if reply.status_code == 200:
                taken.error = await _take(reply, taken, sent_s)
                return taken
            taken.is_refused = reply.status_code == 429
            if (after := reply.headers.get("retry-after", "")).isdigit():
                taken.retry_after_s = float(after)
            told = _told(await reply.aread())
            why = taken.decision.get("why", "")
            taken.error = " ".join(filter(None, (str(reply.status_code), told, why)))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        taken.error = type(error).__name__
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        taken.error = GARBAGE
    return taken


async def _take(reply: httpx.Response, taken: Answer, sent_s: float) -> str:
    """Take a stream, and return why it is not whole; "": it is."""
    last_s, is_over = 0.0, False
    async for line in reply.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            is_over = True
            break
        event = _decode(data.encode())
        if event.error is not None:
            return f"stream: {_code(event.error)}"
        if event.usage is not None:
            _count(event.usage, taken)
        if not event.choices or event.choices[0].is_role:
            continue
        now_s = time.perf_counter()
        if last_s:
            taken.itl_s.append(now_s - last_s)
        else:
            taken.ttft_s = now_s - sent_s
        last_s = now_s
        taken.latency_s = now_s - sent_s
    if not last_s:
        return NO_END if is_over or "event-stream" in _type(reply) else GARBAGE
    taken.output_len = taken.output_len or 1 + len(taken.itl_s)
    return "" if is_over else NO_END


def _count(usage: _Usage, taken: Answer) -> None:
    taken.input_len = usage.prompt_tokens or taken.input_len
    taken.output_len = usage.completion_tokens or 0
    cached = (usage.prompt_tokens_details or {}).get("cached_tokens")
    taken.cached_len = cached if isinstance(cached, int) else 0


def _type(reply: httpx.Response) -> str:
    return reply.headers.get("content-type", "")


def _told(content: bytes) -> str:
    try:
        return _code(msgspec.json.decode(content)["error"])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return ""


def _code(error: Any) -> str:
    """Return the code of an error of OpenAI's form, or what there is instead."""
    if isinstance(error, dict):
        error = error.get("code") or error.get("type") or error.get("message")
    return str(error)[:MAX_REASON]


def _decision(header: str) -> dict[str, str]:
    pairs = (part.strip().partition("=") for part in header.split(";") if "=" in part)
    return {name: value for name, _, value in pairs}
