"""Bodies of requests: what is read, and how wrong entries are named."""

import json
from dataclasses import replace

import pytest

from mooncake_serving.engine import SamplingParams, load_model
from mooncake_serving.http_api import ErrorAnswer
from mooncake_serving.serve.calls import CHAT, COMPLETIONS, Served, read_call, read_tokens
from mooncake_serving.serve.job import Fetch, Send

RANK = "127.0.0.1:4711"


@pytest.fixture(scope="module")
def served(tiny_folder):
    model, tokenizer = load_model(tiny_folder)
    vocab_size = model.config.vocab_size
    return Served("tiny", tokenizer, vocab_size, 64, sends=True, receives=True)


def read(served: Served, path: str = COMPLETIONS, **body):
    given = {"model": "tiny", **({"prompt": "abc"} if path == COMPLETIONS else {}), **body}
    return read_call(path, json.dumps(given).encode(), served)


def test_defaults_are_those_of_the_api(served):
    call = read(served)
    assert call.job.prompt == served.tokenizer.encode("abc")
    assert call.job.params == SamplingParams(temperature=1.0, max_tokens=16)
    assert (call.stops, call.is_stream, call.has_usage, call.is_chat) == ((), False, False, False)
    assert call.job.transfer is None
    messages = [{"role": "user", "content": "hi"}]
    chat = read(served, CHAT, messages=messages)
    assert chat.job.prompt == served.tokenizer.encode_chat(messages)
    assert chat.job.params.max_tokens == 64 - len(chat.job.prompt)  # what is left


def test_entries_are_taken(served):
    call = read(
        served, prompt=[5, 6, 7], max_tokens=9, max_completion_tokens=3, temperature=0, top_p=0.5,
        top_k=-1, seed=4, stop=["a", "b"], stop_token_ids=[8], stream=True, ignore_eos=True,
        stream_options={"include_usage": True}, n=1, logprobs=None, user="me", priority=3,
        presence_penalty=0.0, repetition_penalty=1.0, echo=False,
    )  # fmt: skip
    assert call.job.prompt == [5, 6, 7]
    assert call.job.params == SamplingParams(
        top_p=0.5, seed=4, max_tokens=3, stop_token_ids=(8,), ignore_eos=True
    )
    assert (call.stops, call.is_stream, call.has_usage) == (("a", "b"), True, True)
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    chats = [
        read(served, CHAT, messages=[{"role": "user", "content": content}])
        for content in ("hi", parts)
    ]
    assert chats[0].job.prompt == chats[1].job.prompt


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("prompt", {"prompt": ["a", "b"]}),
        ("prompt", {"prompt": [1, 10**6]}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": [True]}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 2.5}),
        ("max_tokens", {"max_tokens": 62}),
        ("max_completion_tokens", {"max_completion_tokens": -1}),
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": "hot"}),
        ("top_p", {"top_p": 0}),
        ("top_k", {"top_k": -2}),
        ("seed", {"seed": "x"}),
        ("stop", {"stop": [""]}),
        ("stop", {"stop": ["x"] * 17}),
        ("stop", {"stop": 3}),
        ("stop_token_ids", {"stop_token_ids": ["x"]}),
        ("stream", {"stream": 1}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("stream_options.other", {"stream": True, "stream_options": {"other": 1}}),
        ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
        ("temperature", {"temperature": 10**400}),
        ("top_p", {"top_p": 10**400}),
        ("seed", {"seed": 1 << 64}),
        ("n", {"n": 2}),
        ("n", {"n": True}),
        ("logprobs", {"logprobs": 1}),
        ("logprobs", {"logprobs": 0}),  # of the chosen tokens
        ("echo", {"echo": 0}),
        ("tools", {"tools": [{}]}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("unheard_of", {"unheard_of": 1}),
        ("kv_transfer_params", {"kv_transfer_params": 1}),
        (
            "kv_transfer_params",
            {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}},
        ),
        ("max_tokens", {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 2}),
        ("kv_transfer_params", {"kv_transfer_params": {"do_remote_prefill": True}}),
        (
            "kv_transfer_params",
            {"kv_transfer_params": {"do_remote_prefill": True, "transfer_id": [1]}},
        ),
    ],
)
def test_wrong_entry_is_named(served, param, body):
    with pytest.raises(ErrorAnswer) as caught:
        read(served, **body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(f"{param} must be ")


@pytest.mark.parametrize(
    ("param", "messages"),
    [
        ("messages", None),
        ("messages", []),
        ("messages[0]", ["hi"]),
        ("messages[1]", [{"role": "user", "content": "a"}, {"content": "b"}]),
        ("messages[0].content", [{"role": "user", "content": 3}]),
        ("messages[0].content[0]", [{"role": "user", "content": [{"type": "image_url"}]}]),
    ],
)
def test_wrong_message_is_named(served, param, messages):
    with pytest.raises(ErrorAnswer) as caught:
        read(served, CHAT, messages=messages)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_other_refusals(served):
    for raw, status, code in (
        (b"[1]", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b'{"prompt": "a"}', 400, "invalid_value"),
        (b'{"model": "other", "prompt": "a"}', 404, "model_not_found"),
    ):
        with pytest.raises(ErrorAnswer) as caught:
            read_call(COMPLETIONS, raw, served)
        assert (caught.value.status, caught.value.code) == (status, code)
    with pytest.raises(ErrorAnswer) as caught:
        read(served, prompt=[1] * 64)
    assert caught.value.code == "context_length_exceeded"


def test_text_that_is_certainly_too_long_is_not_split_into_tokens(served, monkeypatch):
    most = served.tokenizer.max_token_bytes
    assert most == len("<|endoftext|>")
    with pytest.raises(ErrorAnswer) as caught:
        read(served, prompt="x" * (64 * most))  # as long as it might fit: its tokens are counted
    assert caught.value.message.endswith(f", got {64 * most}")
    monkeypatch.setattr(type(served.tokenizer), "encode", None)
    long = "x" * (64 * most + 1)
    chat = [{"role": "user", "content": long}]
    for path, name, value in ((COMPLETIONS, "prompt", long), (CHAT, "messages", chat)):
        with pytest.raises(ErrorAnswer) as caught:
            read(served, path, **{name: value})
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", name)
        with pytest.raises(ErrorAnswer) as caught:
            read_tokens(json.dumps({name: value}).encode(), served)
        assert caught.value.code == "context_length_exceeded"


def test_tokens_that_the_model_lacks_are_refused(served):
    fewer = replace(served, vocab_size=served.vocab_size - 5)  # without the merged ones
    assert read(fewer, prompt="tea").job.prompt == served.tokenizer.encode("tea")
    for body in ({"prompt": "the"}, {"prompt": [5, fewer.vocab_size]}, {"prompt": [-1]}):
        with pytest.raises(ErrorAnswer) as caught:
            read(fewer, **body)
        message = caught.value.message
        assert message.startswith(f"prompt must be of token ids in [0, {fewer.vocab_size}), got ")


def test_transfers_are_read(served):
    sent = read(served, max_tokens=1, kv_transfer_params={"do_remote_decode": True}).job
    assert sent.transfer == Send(sent.request_id)
    named = {"do_remote_decode": True, "transfer_id": "t"}
    assert read(served, max_tokens=1, kv_transfer_params=named).job.transfer == Send("t")
    params = {"do_remote_prefill": True, "transfer_id": "t", "remote_ranks": [RANK]}
    fetched = read(served, kv_transfer_params=params).job.transfer
    assert isinstance(fetched, Fetch) and fetched.transfer_id == "t"
    assert list(fetched.source.ranks) == [RANK]
    # A prompt of one token has nothing to hand over: the other engine computes it.
    single = {"do_remote_decode": True}
    job = read(served, prompt=[5], max_tokens=1, kv_transfer_params=single).job
    assert job.transfer is None and job.answer_params["do_remote_prefill"] is False


def test_roles_are_needed_for_transfers(tiny_folder):
    _, tokenizer = load_model(tiny_folder)
    plain = Served("tiny", tokenizer, 200, 64)
    for half, role in (("decode", "prefill"), ("prefill", "decode")):
        with pytest.raises(ErrorAnswer) as caught:
            read(plain, kv_transfer_params={f"do_remote_{half}": True})
        assert f"--role {role}" in caught.value.message


def test_tokenize_reads_prompts_and_messages(served):
    assert read_tokens(b'{"prompt": "abc"}', served) == served.tokenizer.encode("abc")
    messages = [{"role": "user", "content": "hi"}]
    raw = json.dumps({"model": "tiny", "messages": messages}).encode()
    assert read_tokens(raw, served) == served.tokenizer.encode_chat(messages)
    long = json.dumps({"prompt": [5] * 1000}).encode()  # it is only counted
    assert len(read_tokens(long, served)) == 1000
