"""What the demo asks a router, as any client of the OpenAI API could."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from mooncake_kernels.closeable import Closeable
from mooncake_serving.router.call import CHAT, COMPLETIONS
from mooncake_serving.router.router import CLASS_HEADER

TIMEOUT_S = 120.0
MAX_AT_ONCE = 96


@dataclass(frozen=True)
class Answer:
    """An answer that came as a stream.

    Attributes:
        parts: its text, a token each, but for tokens without text.
        ttft_s: from the question to the first of them.
        decision: where it was computed, one of the router's ``/decisions``.
        header: the same in one line, as the answer's header had it.
    """

    parts: list[str]
    ttft_s: float
    decision: dict[str, Any]
    header: str

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def num_cached_tokens(self) -> int:
        """Count the prompt's tokens that the prefill engine had already."""
        cached: int = self.decision["prefill"]["cached_tokens"]
        return cached


@dataclass(frozen=True)
class Refusal:
    """The router's 429 to a request that it does not take.

    Attributes:
        message: why.
        retry_after: the seconds after which it may be worth another try, as the header has them.
    """

    message: str
    retry_after: str


class Client(Closeable):
    """Asks a router.

    Args:
        url: of the router.
        model: its name.

    All calls raise ``httpx.HTTPError`` if it does not answer, or by an error.
    """

    def __init__(self, url: str, model: str):
        self._model = model
        limits = httpx.Limits(max_connections=MAX_AT_ONCE)
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False)
        self._pool = ThreadPoolExecutor(MAX_AT_ONCE)

    def chat(self, content: str, max_tokens: int) -> Answer:
        """Send what a user says; the answer is the likeliest one."""
        body = {
            "model": self._model, "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens, "temperature": 0, "stream": True,
        }  # fmt: skip
        parts: list[str] = []
        began, ttft_s = time.monotonic(), 0.0
        with self._http.stream("POST", CHAT, json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                [choice] = msgspec.json.decode(line.removeprefix("data: "))["choices"]
                if text := choice["delta"].get("content"):
                    ttft_s = ttft_s or time.monotonic() - began
                    parts.append(text)
        request_id, header = (
            answer.headers[f"x-{it}"] for it in ("request-id", "mooncake-decision")
        )
        decisions = self._get("/decisions")["decisions"]
        [decision] = (one for one in decisions if one["request_id"] == request_id)
        return Answer(parts, ttft_s, decision, header)

    def chats(self, contents: list[str], max_tokens: int) -> list[Answer]:
        """Send what several users say, at once."""
        return [*self._pool.map(lambda content: self.chat(content, max_tokens), contents)]

    def first_tokens(self, prompts: list[list[int]], class_name: str) -> list[float | Refusal]:
        """Ask for one token after each of several prompts, at once.

        Returns:
            The seconds that it took, or what was answered instead.
        """
        return [*self._pool.map(lambda prompt: self._first_token(prompt, class_name), prompts)]

    def knows_costs(self) -> bool:
        """Whether the router has measured enough prefills to predict them."""
        source: str = self._get("/instances")["costs"]["prefill"]["source"]
        return source != "assumed"

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._pool.shutdown()
        self._http.close()

    def _first_token(self, prompt: list[int], class_name: str) -> float | Refusal:
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1}
        began = time.monotonic()
        answer = self._http.post(COMPLETIONS, json=body, headers={CLASS_HEADER: class_name})
        if answer.status_code != 429:
            answer.raise_for_status()
            return time.monotonic() - began
        return Refusal(answer.json()["error"]["message"], answer.headers["retry-after"])

    def _get(self, path: str) -> Any:
        answer = self._http.get(path)
        answer.raise_for_status()
        return answer.json()
