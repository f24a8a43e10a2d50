"""One engine as an OpenAI server, by HTTP."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

from mooncake_serving.engine import NotFinite
from mooncake_serving.serve import app
from mooncake_serving.serve.calls import Served
from tests.serving.serve.support import WAIT_S, EngineServer, events_of, text_of
from tests.waiting import eventually

PROMPTS = ["the end", "in the inner 12", "a", "the " * 30, "of the sea and the sky 1 2 3"]


@pytest.fixture(scope="module")
def server(tiny_folder):
    made = EngineServer(tiny_folder)
    yield made
    made.close()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_completion_is_that_of_an_engine_alone_whole_and_as_a_stream(server, expected, prompt):
    text, num_tokens = expected(prompt, 12)
    answer = server.complete(prompt, 12).json()
    [choice] = answer["choices"]
    assert (choice["text"], answer["object"], answer["model"]) == (text, "text_completion", "tiny")
    assert answer["usage"]["completion_tokens"] == num_tokens
    prompt_tokens = answer["usage"]["prompt_tokens"]
    assert answer["usage"]["total_tokens"] == prompt_tokens + num_tokens
    options = {"include_usage": True}
    streamed = server.complete(prompt, 12, stream=True, stream_options=options)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *parts, usage = events_of(streamed)
    assert text_of(parts) == text and usage["choices"] == []
    assert parts[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert usage["usage"] | {"prompt_tokens_details": None} == answer["usage"] | {
        "prompt_tokens_details": None
    }


def test_chat_is_the_completion_of_its_template(server):
    answer = server.chat("hello", 9).json()
    messages = [{"role": "user", "content": "hello"}]
    told = server.client.post("/tokenize", json={"model": "tiny", "messages": messages}).json()
    assert told["count"] == len(told["tokens"]) == answer["usage"]["prompt_tokens"]
    text = server.complete(told["tokens"], 9).json()["choices"][0]["text"]
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": text}
    events = events_of(server.chat("hello", 9, stream=True))
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert text_of(events) == text and len({event["id"] for event in events}) == 1


def test_second_request_begins_behind_the_cached_prefix(server, expected):
    prompt = "a prefix that no other test has, of some blocks: "
    for end in ("first", "second", "second"):
        answer = server.complete(prompt + end, 6).json()
        assert answer["choices"][0]["text"] == expected(prompt + end, 6)[0]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (answer["usage"]["prompt_tokens"] - 1) // 8 * 8
    assert server.metric("vllm:prefix_cache_hits_total") >= cached


def test_stop_string_ends_the_answer(server, expected):
    text, _ = expected("the end", 24)
    stop = text[5:8]
    place = text.find(stop)
    answer = server.complete("the end", 24, stop=stop).json()
    assert answer["choices"][0]["text"] == text[:place]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 24
    assert (
        text_of(events_of(server.complete("the end", 24, stop=[stop], stream=True)))
        == (text[:place])
    )
    eventually(lambda: server.worker.engine.num_running == 0)


def test_seed_makes_a_drawn_answer_repeatable(server, expected):
    params = {"temperature": 1.5, "top_p": 0.9, "top_k": 20, "seed": 7}
    texts = {server.complete("the sea", 16, **params).json()["choices"][0]["text"] for _ in "ab"}
    assert texts == {expected("the sea", 16, **params)[0]}


def test_many_at_once_are_answered_as_alone(server, expected):
    async def all_at_once():
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as client:
            bodies = [
                {"model": "tiny", "prompt": p, "max_tokens": 12, "temperature": 0} for p in PROMPTS
            ]
            tasks = [client.post("/v1/completions", json=body) for body in bodies * 4]
            return await asyncio.gather(*tasks)

    answers = asyncio.run(all_at_once())
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts == [expected(prompt, 12)[0] for prompt in PROMPTS] * 4


def test_client_that_leaves_ends_its_request(server):
    free = server.worker.engine.cache.num_blocks
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 400, "stream": True, "ignore_eos": True}
    aborted = server.worker.counts.finished["abort"]
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
        assert server.worker.engine.num_running == 1
    eventually(lambda: server.worker.counts.finished["abort"] == aborted + 1)
    assert server.worker.engine.num_running == 0
    eventually(lambda: server.worker.counts.num_free_blocks == free)


def test_blocks_are_free_before_the_first_request(start):
    assert start().metric("vllm:kv_cache_usage_perc") == 0.0


def test_what_watchers_ask(server):
    assert server.client.get("/health").json() == {"status": "ok"}
    [card] = server.client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 512)
    text = server.client.get("/metrics").text
    assert 'vllm:cache_config_info{block_size="8",num_gpu_blocks="128"} 1.0' in text
    assert server.metric("vllm:kv_cache_usage_perc") == 0.0
    before = server.metric("vllm:generation_tokens_total")
    generated = server.complete("abc", 5).json()["usage"]["completion_tokens"]
    assert server.metric("vllm:generation_tokens_total") == before + generated


@pytest.mark.parametrize(
    ("status", "param", "body"),
    [
        (400, "temperature", {"temperature": -1}),
        (400, "n", {"n": 3}),
        (400, "prompt", {"prompt": "x" * 600}),
        (404, "model", {"model": "other"}),
    ],
)
def test_refusals_have_the_api_s_form(server, status, param, body):
    answer = server.client.post(
        "/v1/completions", json={"model": "tiny", "prompt": "abc", "stream": True, **body}
    )
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, {"temperature": 10**30}),
        (400, {"temperature": 10**400}),
        (400, {"top_p": 10**30}),
        (200, {"temperature": 1, "top_p": 1, "top_k": 10**30}),
        (200, {"temperature": 1, "seed": -(1 << 63)}),
        (400, {"temperature": 1, "seed": 10**30}),
        (400, {"max_tokens": 10**30}),
        (200, {"stop_token_ids": [10**30]}),
    ],
)
def test_numbers_of_more_than_64_bits_do_not_end_the_engine(server, expected, status, body):
    answer = server.client.post("/v1/completions", json={"model": "tiny", "prompt": "abc", **body})
    assert answer.status_code == status, answer.text
    assert server.complete("abc", 4).json()["choices"][0]["text"] == expected("abc", 4)[0]


def test_health_is_answered_while_a_prompt_is_read(server, monkeypatch):
    """Which takes seconds, if it is long: the server goes on meanwhile."""
    reading, go_on = threading.Event(), threading.Event()
    read_call = app.read_call

    def slow(*arguments):
        reading.set()
        assert go_on.wait(WAIT_S)
        return read_call(*arguments)

    monkeypatch.setattr(app, "read_call", slow)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, "abc")
        assert reading.wait(WAIT_S)
        try:
            assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
        finally:
            go_on.set()
        assert answer.result().status_code == 200


def test_client_that_does_not_read_its_error_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr(app, "CLIENT_S", 0.01)
    served = Served("tiny", None, 200, 64)
    made = app.make_app(served, SimpleNamespace(), lambda: None)

    async def receive():
        return {"type": "http.request", "body": b"no json", "more_body": False}

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "root_path": "",
        "query_string": b"", "headers": [],
    }  # fmt: skip
    asyncio.run(made(scope, receive, send))
    assert "the client has read nothing for 0.01 s" in caplog.text


def test_unknown_paths_and_methods(server):
    assert server.client.get("/v2").json()["error"]["code"] == "not_found"
    assert server.client.get("/v1/completions").status_code == 405
    answer = server.client.post("/v1/completions", content=b"no json")
    assert answer.json()["error"]["code"] == "invalid_json"


def test_engine_that_fails_says_so(start, monkeypatch):
    server = start()

    def step():
        raise RuntimeError("as a test wants it")

    monkeypatch.setattr(server.worker.engine, "step", step)
    answer = server.complete("abc")
    assert answer.status_code == 500
    assert json.loads(answer.content)["error"]["code"] == "engine_failed"
    assert server.client.get("/health").status_code == 503
    assert server.complete("abc").status_code == 503


def test_engine_that_fails_says_so_to_those_it_has_not_heard_yet(start, monkeypatch):
    server = start()
    stepping, go_on = threading.Event(), threading.Event()

    def step():
        stepping.set()
        assert go_on.wait(WAIT_S)
        raise RuntimeError("as a test wants it")

    monkeypatch.setattr(server.worker.engine, "step", step)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.complete, "abc")
        assert stepping.wait(WAIT_S)
        second = pool.submit(server.complete, "abcd")
        eventually(lambda: server.worker._commands.qsize() == 1)
        go_on.set()
        for answer in (first, second):
            assert answer.result(WAIT_S).json()["error"]["code"] == "engine_failed"


def test_not_finite_logits_fail_their_request_alone(start, monkeypatch):
    server = start()
    engine = server.worker.engine
    plain, failures = engine.step, [True]

    def step():
        if failures and engine.num_running + engine.num_waiting:
            failures.clear()
            raise NotFinite("step", [0])
        return plain()

    monkeypatch.setattr(engine, "step", step)
    failed = server.complete("abc")
    assert failed.status_code == 500 and "finite" in failed.json()["error"]["message"]
    assert server.complete("abc").status_code == 200
