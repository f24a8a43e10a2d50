"""What clients ask an engine for: bodies of the OpenAI API, each wrong entry of which is named."""

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from mooncake_kernels.errors import InvalidArgument, shown
from mooncake_serving.connectors.handoff import COMPUTED_THERE, source_of, transfer_id_of
from mooncake_serving.engine import SamplingParams, Tokenizer
from mooncake_serving.http_api import ErrorAnswer, invalid

from .job import EXACT, NUM_EXACT, NUM_SIMILAR, REUSE, SEMANTIC, TRANSFER, Fetch, Job, Send

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
DEFAULT_TOKENS = {CHAT: 1024, COMPLETIONS: 16}  # a request has blocks for all that it may generate
MAX_STOPS = 16
SAMPLING = ("top_p", "seed", "ignore_eos")  # by the names of ``SamplingParams``
TAKEN = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream",
    "stream_options", "stop", "stop_token_ids", "temperature", "top_k", TRANSFER, REUSE,
    "add_generation_prompt", "add_special_tokens", *SAMPLING,
}  # fmt: skip
# They change nothing that is answered here.
IGNORED = {
    "user", "metadata", "store", "service_tier", "priority", "parallel_tool_calls",
    "prompt_cache_key", "safety_identifier", "request_id",
}  # fmt: skip
# What others may be, since it asks for nothing.
NEUTRAL: dict[str, Any] = {
    "n": 1, "best_of": 1, "echo": False, "suffix": "", "logprobs": False, "tools": [],
    "top_logprobs": 0,
    "tool_choice": "none", "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {},
    "response_format": {"type": "text"}, "repetition_penalty": 1, "min_p": 0, "min_tokens": 0,
    "skip_special_tokens": True, "continue_final_message": False,
}  # fmt: skip
_decoder = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True)
class Served:
    """What an engine serves.

    Attributes:
        name: of the model.
        tokenizer: of the model.
        vocab_size: token ids are below it.
        max_tokens: of a prompt and its answer together.
        sends, receives: what it does for other engines.
        is_semantic: whether it keeps prompts for similar ones.
    """

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    max_tokens: int
    sends: bool = False
    receives: bool = False
    is_semantic: bool = False


@dataclass(frozen=True)
class Call:
    """A request that generates.

    Attributes:
        is_chat: whether it is of messages.
        job: for the engine.
        stops: texts that end the answer, and are not part of it.
        is_stream: whether the answer comes in parts.
        has_usage: whether a stream ends with the number of tokens.
    """

    is_chat: bool
    job: Job
    stops: tuple[str, ...]
    is_stream: bool
    has_usage: bool


def read_call(path: str, raw: bytes, served: Served) -> Call:
    """Check the body of a request that generates.

    Raises:
        ErrorAnswer: it is no JSON object, an entry is wrong or not supported, the model is another
            one, or the prompt is too long.
    """
    body = _read_body(raw, served)
    prompt = _read_prompt(path == CHAT, body, served)
    if len(prompt) >= served.max_tokens:
        raise _too_long("messages" if path == CHAT else "prompt", served, f"{len(prompt)}")
    params = _read_params(path, body, len(prompt), served)
    job = Job(prompt, params)
    _read_transfer(body, job, served)
    _read_reuse(body, job, served)
    is_stream = _read(body, "stream", bool, "true or false", False)
    options = _read(body, "stream_options", dict, "an object", {})
    if options and not is_stream:
        raise invalid("stream_options", f"left out without stream, got {shown(options, 80)}")
    for name, value in options.items():
        if name != "include_usage" or not isinstance(value, bool):
            wanted = "true or false" if name == "include_usage" else "left out: it is not supported"
            raise invalid(f"stream_options.{name[:80]}", f"{wanted}, got {shown(value, 80)}")
    stops = _read_stops(body)
    return Call(path == CHAT, job, stops, is_stream, bool(options.get("include_usage")))


def read_tokens(raw: bytes, served: Served) -> list[int]:
    """Return the tokens of the body of ``/tokenize``: a prompt, or messages.

    Raises:
        ErrorAnswer: see ``read_call``; a prompt may be too long for the model, as long as that is
            not certain before it is split into tokens.
    """
    body = _read_body(raw, served, needs_model=False)
    return _read_prompt("messages" in body, body, served)


def _read_body(raw: bytes, served: Served, *, needs_model: bool = True) -> dict[str, Any]:
    try:
        body = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ErrorAnswer(400, f"the body must be a JSON object: {error}", "invalid_json") from None
    body = {name: value for name, value in body.items() if value is not None}
    if needs_model or "model" in body:
        model = body.get("model")
        if not isinstance(model, str):
            raise invalid("model", f"a name, got {shown(model, 80)}")
        if model != served.name:
            what = f"model must be {served.name}, got {model[:80]!r}"
            raise ErrorAnswer(404, what, "model_not_found", "model")
    for name, value in body.items():
        if name in TAKEN or name in IGNORED or (name in NEUTRAL and _is_neutral(name, value)):
            continue
        only = f"{shown(NEUTRAL[name], 80)}" if name in NEUTRAL else "left out"
        what = f"{only}: nothing else is supported, got {shown(value, 80)}"
        raise ErrorAnswer(400, f"{name[:80]} must be {what}", "unsupported", name[:80])
    return body


def _is_neutral(name: str, value: Any) -> bool:
    """Whether it asks for nothing: ``logprobs`` of 0 does, though 0 is False to Python."""
    neutral = NEUTRAL[name]
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _read(body: dict[str, Any], name: str, kind: type, wanted: str, default: Any) -> Any:
    value = body.get(name, default)
    if type(value) is not kind:
        raise invalid(name, f"{wanted}, got {shown(value, 80)}")
    return value


def _read_prompt(is_chat: bool, body: dict[str, Any], served: Served) -> list[int]:
    name = "messages" if is_chat else "prompt"
    tokens = _read_messages(body, served) if is_chat else _read_text(body, served)
    if not tokens:
        raise invalid(name, "of at least one token, got none")
    if min(tokens) < 0 or max(tokens) >= served.vocab_size:  # tokenizers may know more tokens
        bad = next(one for one in tokens if not 0 <= one < served.vocab_size)
        raise invalid(name, f"of token ids in [0, {served.vocab_size}), got {shown(bad)}")
    return tokens


def _encode(name: str, text: str, served: Served, *, add_special: bool) -> list[int]:
    """Split text into tokens, unless their number is too large in any case."""
    most, num_bytes = served.tokenizer.max_token_bytes, len(text.encode())
    if most is not None and num_bytes > served.max_tokens * most:
        raise _too_long(name, served, f"{num_bytes} bytes, of which a token has {most} at most")
    return served.tokenizer.encode(text, add_special=add_special)


def _too_long(name: str, served: Served, got: str) -> ErrorAnswer:
    what = f"{name} must be of less than {served.max_tokens} tokens, got {got}"
    return ErrorAnswer(400, what, "context_length_exceeded", name)


def _read_text(body: dict[str, Any], served: Served) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        add_special = _read(body, "add_special_tokens", bool, "true or false", True)
        return _encode("prompt", prompt, served, add_special=add_special)
    if not isinstance(prompt, list) or set(map(type, prompt)) != {int}:
        raise invalid("prompt", f"one text, or one list of token ids, got {shown(prompt, 80)}")
    return prompt


def _read_messages(body: dict[str, Any], served: Served) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", f"a list of messages, got {shown(messages, 80)}")
    read = []
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(name, f"an object with a role, got {shown(message, 80)}")
        read.append({"role": message["role"], "content": _read_content(name, message)})
    reply = _read(body, "add_generation_prompt", bool, "true or false", True)
    try:
        text = served.tokenizer.render_chat(read, reply=reply)
    except InvalidArgument as error:  # the template's own words
        raise invalid("messages", f"such as the model's template takes: {error}") from None
    return _encode("messages", text, served, add_special=False)


def _read_content(name: str, message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [content]
    for index, part in enumerate(parts):
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            where = f"{name}.content" + (f"[{index}]" if isinstance(content, list) else "")
            raise invalid(where, f"a text, or parts of type text, got {shown(part, 80)}")
    return "".join(part["text"] for part in parts)


def _read_params(
    path: str, body: dict[str, Any], num_tokens: int, served: Served
) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": 1.0}  # OpenAI's default
    fields |= {name: body[name] for name in ("temperature", *SAMPLING) if name in body}
    if "top_k" in body:  # -1 is vLLM's word for all
        fields["top_k"] = 0 if body["top_k"] == -1 else body["top_k"]
    if "stop_token_ids" in body:
        ids = _read(body, "stop_token_ids", list, "a list of token ids", [])
        fields["stop_token_ids"] = tuple(ids)
    fields["max_tokens"] = _read_max_tokens(path, body, num_tokens, served)
    for name, value in fields.items():
        try:
            SamplingParams(**{name: value})
        except InvalidArgument as error:
            message = str(error).removeprefix("SamplingParams: ")
            raise ErrorAnswer(400, message, "invalid_value", name) from None
    return SamplingParams(**fields)


def _read_max_tokens(path: str, body: dict[str, Any], num_tokens: int, served: Served) -> int:
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    room = served.max_tokens - num_tokens
    given = body.get(name, min(room, DEFAULT_TOKENS[path]))
    if type(given) is not int or given < 1:
        raise invalid(name, f"an integer of at least 1, got {shown(given, 80)}")
    if given > room:
        what = f"{name} must be at most {room}, which {num_tokens} tokens leave, got {given}"
        raise ErrorAnswer(400, what, "context_length_exceeded", name)
    return given


def _read_stops(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    is_list = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not is_list or not all(isinstance(one, str) and one for one in stops):
        raise invalid("stop", f"a text, or up to {MAX_STOPS} of them, got {shown(stop, 80)}")
    return tuple(stops)


def _read_transfer(body: dict[str, Any], job: Job, served: Served) -> None:
    """Set what other engines have to do with a request, as vLLM's connectors are told."""
    params = _read(body, TRANSFER, dict, "an object", {})
    sends, receives = (params.get(f"do_remote_{half}") is True for half in ("decode", "prefill"))
    if sends and receives:
        raise invalid(TRANSFER, "an object with do_remote_decode or do_remote_prefill, got both")
    if (sends and not served.sends) or (receives and not served.receives):
        role = "prefill" if sends else "decode"
        what = f"left out: the engine was not started with --role {role}"
        raise invalid(TRANSFER, f"{what}, got {shown(params, 80)}")
    if sends and job.params.max_tokens != 1:
        what = f"max_tokens must be 1 with do_remote_decode, got {job.params.max_tokens}"
        raise ErrorAnswer(400, what, "invalid_value", "max_tokens")
    if sends and len(job.prompt) < 2:  # its last token is computed there anyway
        job.answer_params = dict(COMPUTED_THERE)
        return
    if not (sends or receives) or len(job.prompt) < 2:
        return
    named = {"transfer_id": params.get("transfer_id")} if sends else params
    transfer_id = transfer_id_of(named, job.request_id)
    if transfer_id is None:
        wanted = "an object with a transfer_id that is a short text"
        raise invalid(TRANSFER, f"{wanted}, got {shown(named, 80)}")
    if sends:
        job.transfer = Send(transfer_id)
        return
    source = source_of(params)
    if source is None:
        wanted = "an object with remote_ranks, or with remote_host and remote_port"
        raise invalid(TRANSFER, f"{wanted}, got {shown(params, 80)}")
    counts = [params.get(name) for name in (NUM_EXACT, NUM_SIMILAR)]
    if not all(count is None or (type(count) is int and count >= 0) for count in counts):
        wanted = f"an object whose {NUM_EXACT} and {NUM_SIMILAR} are integers of at least 0"
        raise invalid(TRANSFER, f"{wanted}, got {shown(params, 80)}")
    job.transfer = Fetch(source, transfer_id, counts[0])
    job.num_similar_tokens = counts[1] or 0


def _read_reuse(body: dict[str, Any], job: Job, served: Served) -> None:
    """Set whether a prompt may be computed from a similar one's keys and values."""
    value = body.get(REUSE, EXACT)
    if value not in (EXACT, SEMANTIC):
        raise invalid(REUSE, f"{EXACT} or {SEMANTIC}, got {shown(value, 80)}")
    if value == EXACT:
        return
    is_handed_over = served.receives and TRANSFER in body
    if not (served.is_semantic or is_handed_over):
        what = f"{EXACT}: the engine was not started with --semantic-blocks, got {value!r}"
        raise ErrorAnswer(400, f"{REUSE} must be {what}", "unsupported", REUSE)
    job.is_semantic = served.is_semantic or isinstance(job.transfer, Fetch)
    if isinstance(job.transfer, Fetch) and job.transfer.num_exact_tokens is None:
        job.transfer = replace(job.transfer, num_exact_tokens=0)  # whoever prefills may not tell
