"""A client's call of the API: its body, checked as far as the router depends on it."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mooncake_kernels.errors import shown
from mooncake_serving.http_api import ErrorAnswer, invalid

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DEFAULT_TOKENS = {CHAT: 0, COMPLETIONS: 16}  # of vLLM; 0: as many as the model can
PRIORITIES = 2**31
GUESSED_BYTES = 4  # of a token
# What of a chat decides its tokens; vLLM's /tokenize takes them by the same names.
OF_TEMPLATE = (
    "model", "messages", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template", "chat_template_kwargs", "tools", "mm_processor_kwargs",
)  # fmt: skip
# What only the router tells an engine.
OF_ROUTER = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
REUSE, SEMANTIC = "kv_reuse", "semantic"  # an entry of our engine's, and its value
NO_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoding raises
_decoder = msgspec.json.Decoder(dict[str, Any])


@dataclass(eq=False)
class Call:
    """One request of a client.

    Attributes:
        path: ``CHAT`` or ``COMPLETIONS``.
        body: of the request.
        raw: the same, as it came.
        request_id: in the router, and in the answer.
        arrived_s: when it came, by ``time.monotonic``.
        tokens: of the prompt; None: not known.
        num_attempts: how often it has been placed.
        class_name: whose objectives it has; "": those of requests without a class.
    """

    path: str
    body: dict[str, Any]
    raw: bytes
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    arrived_s: float = field(default_factory=time.monotonic)
    tokens: list[int] | None = None
    num_attempts: int = 0
    class_name: str = ""

    @property
    def model(self) -> str:
        return self.body["model"]

    @property
    def is_stream(self) -> bool:
        return self.body.get("stream") is True

    @property
    def priority(self) -> int:
        """vLLM's: the lower, the sooner."""
        return self.body.get("priority") or 0

    @property
    def is_semantic(self) -> bool:
        """Whether an engine may compute its prompt from a similar one's KV, which approximates."""
        return self.body.get(REUSE) == SEMANTIC

    @property
    def num_samples(self) -> int:
        return self.body.get("n") or 1

    @property
    def max_tokens(self) -> int:
        """How many tokens it may generate; 0: no limit is given."""
        names = ("max_completion_tokens", "max_tokens")
        return next((self.body[n] for n in names if self.body.get(n)), DEFAULT_TOKENS[self.path])

    @property
    def attempt_id(self) -> str:
        """By which engines know it: another one each time, for the last may linger there."""
        return f"{self.request_id}-{self.num_attempts}"

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt; a guess where they are not known."""
        return max(1, len(self.raw) // GUESSED_BYTES if self.tokens is None else len(self.tokens))

    @property
    def is_plain(self) -> bool:
        """Whether its tokens are known, and all that its KV depends on apart from the model."""
        return self.tokens is not None and not self.body.get("cache_salt") and not self._has_media

    @property
    def _has_media(self) -> bool:
        return self.path == CHAT and any(
            not isinstance(message["content"], str | None)
            and any(part.get("type", "text") != "text" for part in message["content"])
            for message in self.body["messages"]
            if "content" in message
        )

    @property
    def prompt_name(self) -> str:
        return "messages" if self.path == CHAT else "prompt"

    def tokenize_body(self) -> dict[str, Any]:
        """Return what to ask vLLM's /tokenize for the tokens of the prompt."""
        names = OF_TEMPLATE if self.path == CHAT else ("model", "prompt", "add_special_tokens")
        return {name: self.body[name] for name in names if name in self.body}


def read_call(path: str, raw: bytes) -> Call:
    """Check the body of a request; what engines check themselves is left to them.

    Raises:
        ErrorAnswer: it is no JSON object, or an entry is wrong, which is named.
    """
    try:
        body = _decoder.decode(raw)
    except NO_JSON as error:
        raise ErrorAnswer(400, f"the body must be a JSON object: {error}", "invalid_json") from None
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise invalid("model", f"a name, got {shown(body.get('model'), 80)}")
    for name, low, high in (
        ("max_tokens", 0, 2**31), ("max_completion_tokens", 0, 2**31),
        ("n", 1, 1024), ("priority", -PRIORITIES, PRIORITIES),
    ):  # fmt: skip
        value = body.get(name)
        if value is not None and not (type(value) is int and low <= value <= high):
            raise invalid(name, f"an integer from {low} to {high}, got {shown(value, 80)}")
    if not isinstance(body.get("stream"), bool | None):
        raise invalid("stream", f"true or false, got {shown(body['stream'], 80)}")
    for name in OF_ROUTER:
        if name in body:
            raise invalid(name, "left to the router, got some")
    call = Call(path, body, raw)
    if path == CHAT:
        _check_messages(body.get("messages"))
    else:
        call.tokens = _check_prompt(body.get("prompt"))
    return call


def are_token_ids(tokens: Sequence[int]) -> bool:
    """Whether all of them are such as engines have; true of none."""
    return not tokens or (min(tokens) >= 0 and max(tokens) < 2**32)


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", f"a list of messages, got {shown(messages, 80)}")
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(name, f"an object with a role, got {shown(message, 80)}")
        content = message.get("content")
        are_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
        if not (isinstance(content, str | None) or are_parts):
            raise invalid(f"{name}.content", f"a text or a list of parts, got {shown(content, 80)}")


def _check_prompt(prompt: Any) -> list[int] | None:
    """Return the tokens if the prompt is given as such."""
    if isinstance(prompt, str):
        return None
    if isinstance(prompt, list) and prompt and set(map(type, prompt)) == {int}:
        if not are_token_ids(prompt):
            raise invalid("prompt", "of token ids in [0, 2**32)")
        return prompt
    raise invalid("prompt", f"one text, or one list of token ids, got {shown(prompt, 80)}")
