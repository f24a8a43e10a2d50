"""Requests that are answered, refused, placed again, or left."""

import json
import socket
import threading

import httpx
import pytest

from tests.serving.router.support import APART, COUPLED, MODEL
from tests.waiting import eventually

CHAT = [{"role": "user", "content": "What is a cache?"}]


def words_of(stream: str) -> list[str]:
    events = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event)["choices"][0]["text"] for event in events[:-1]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("connector", ["nixl", "mooncake", "mooncake_kernels"])
def test_apart_answers_as_one_engine(cluster, connector, path, stream):
    router, engines = cluster(APART, connector=connector)
    alone, _ = cluster({"both": "both"})
    question = {"prompt": "What is a cache?"} if path == "/v1/completions" else {"messages": CHAT}
    body = {"model": MODEL, "max_tokens": 5, "stream": stream, **question}
    answer, expected = router.client.post(path, json=body), alone.client.post(path, json=body)
    assert answer.status_code == expected.status_code == 200
    assert answer.headers["content-type"] == expected.headers["content-type"]
    assert answer.content == expected.content
    assert "prefill=prefill-" in answer.headers["x-mooncake-decision"]

    [(_, first, head)] = [c for name in APART for c in engines[name].calls if "prefill" in name]
    [(_, second, then)] = [c for name in APART for c in engines[name].calls if "decode" in name]
    assert head["x-request-id"] == then["x-request-id"] == answer.headers["x-request-id"] + "-1"
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    given = second.pop("kv_transfer_params")
    assert given["do_remote_prefill"] is True and given["remote_engine_id"] == "engine-0"
    assert second == body


def test_tokens_of_a_chat_are_asked_for_and_those_of_a_list_are_not(cluster):
    router, engines = cluster(COUPLED)
    router.client.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT})
    assert router.last()["prompt_tokens"] == len("<user>What is a cache?")
    router.complete([1, 2, 3])
    assert router.last()["prompt_tokens"] == 3
    assert sum(engine.num_tokenized for engine in engines.values()) == 1


def test_a_client_that_leaves_cancels_the_engines_request(cluster):
    router, engines = cluster({"both": "both"})
    engine = engines["both"]
    engine.stall_after = 2
    body = {"model": MODEL, "prompt": "abc", "stream": True}
    with httpx.Client(base_url=router.server.url) as client:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert [next(lines)[:6] for _ in range(3)] == ["data: ", "", "data: "]
            assert router.instance("both")["decoding"] == 1
    eventually(lambda: engine.num_left == 1)
    eventually(lambda: router.last().get("outcome") == "the client has left")
    assert router.instance("both")["decoding"] == 0
    assert router.instance("both")["kv_tokens"] == 0


@pytest.mark.parametrize("stalled", ["prefill", "decode"])
def test_a_client_that_leaves_before_the_first_byte_frees_everything(cluster, stalled):
    roles = {"prefill": "prefill", "decode": "decode"}
    router, engines = cluster(roles)
    engines[stalled].gate.clear()
    body = json.dumps({"model": MODEL, "prompt": "abc"})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", router.server.port)) as client:
        client.sendall((head + body).encode())
        eventually(lambda: engines[stalled].calls)
    eventually(lambda: engines[stalled].num_left == 1)
    eventually(lambda: router.metric("mooncake_router_requests_total") == 1)
    assert [router.instance(name)["prefills"] for name in roles] == [0, 0]
    cluster_state = router.router.placement.conductor.cluster
    assert not cluster_state.reserved_tokens.any() and not cluster_state.batch_size.any()


@pytest.mark.parametrize("failing", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("how", ["status", "killed"])
def test_a_failure_before_the_first_byte_places_the_request_again(cluster, failing, how):
    router, engines = cluster(APART, health_s=1000)
    right = router.complete("abc" * 20).json()
    if how == "status":
        engines[failing].fail_with = 500
    else:
        engines[failing].server.kill()
    answers = [router.complete("abc" * 20) for _ in range(3)]
    assert [answer.json() for answer in answers] == [right] * 3
    assert router.metric("mooncake_router_failed_attempts_total") >= 1
    assert router.instance(failing)["up"] is (how == "status")
    if how == "killed":  # and is not asked again
        assert router.metric("mooncake_router_failed_attempts_total") == 1


def test_an_engine_that_comes_back_is_used_again(cluster):
    router, engines = cluster({"both": "both"})
    engines["both"].server.kill()
    eventually(lambda: not router.instance("both")["up"])
    assert router.client.get("/health").status_code == 503
    refused = router.complete("abc")
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "no_engine"
    engines["both"].restart()
    eventually(lambda: router.instance("both")["up"])
    assert router.complete("abc").status_code == 200
    assert router.get("/health") == {"status": "ok"}


def test_a_request_that_waits_for_an_engine_that_goes_down_is_placed_again(cluster):
    router, engines = cluster(COUPLED, health_s=1000)
    for engine in engines.values():
        engine.gate.clear()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(router.complete("abc")))
    asking.start()
    hung = eventually(lambda: next((e for e in engines.values() if e.calls), None))
    other = next(engine for engine in engines.values() if engine is not hung)
    other.gate.set()
    name = next(name for name in COUPLED if engines[name] is hung)
    loop_call(router, lambda: router.router.health.down(list(COUPLED).index(name)))
    asking.join()
    assert answers[0].status_code == 200
    assert other.calls and router.last()["attempt"] == 2


def loop_call(router, call):
    """Run something in the router's thread."""
    done = threading.Event()
    loop = next(iter(router.server._server.servers)).get_loop()
    loop.call_soon_threadsafe(lambda: (call(), done.set()))
    assert done.wait(10)


def test_an_engine_that_dies_in_a_stream_ends_it_with_an_error(cluster):
    router, engines = cluster({"both": "both"})
    engines["both"].die_after = 3
    answer = router.complete("abc", max_tokens=8, stream=True)
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert len(events) == 4 and "[DONE]" not in events
    assert json.loads(events[-1])["error"]["code"] == "engine_failed"
    assert router.instance("both")["decoding"] == 0


def test_a_request_that_every_engine_fails_is_an_error(cluster):
    router, engines = cluster(COUPLED, max_attempts=3)
    for engine in engines.values():
        engine.fail_with = 503
    answer = router.complete("abc")
    assert answer.status_code == 502
    assert "failed 3 times" in answer.json()["error"]["message"]
    assert sum(len(engine.calls) for engine in engines.values()) == 3


def test_what_an_engine_refuses_is_passed_on(cluster):
    router, engines = cluster(APART)
    answer = router.complete("abc", max_tokens=13)
    assert answer.status_code == 400
    assert answer.json() == {"error": {"message": "an unlucky number"}}
    assert sum(len(engine.calls) for engine in engines.values()) == 2


def test_a_prefill_engine_without_a_connector_is_told_apart(cluster):
    router, engines = cluster({"p": "prefill", "d": "decode"})
    engines["p"].is_prefill = False
    answer = router.complete("abc")
    assert answer.status_code == 502
    assert "no kv_transfer_params: has it a connector?" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body, status, param",
    [
        (b"{", 400, None),
        (b"[1]", 400, None),
        (b"\xff", 400, None),
        ({"prompt": "a"}, 400, "model"),
        ({"model": "other", "prompt": "a"}, 404, "model"),
        ({"model": MODEL}, 400, "prompt"),
        ({"model": MODEL, "prompt": ["a", "b"]}, 400, "prompt"),
        ({"model": MODEL, "prompt": [1, -1]}, 400, "prompt"),
        ({"model": MODEL, "prompt": [True]}, 400, "prompt"),
        ({"model": MODEL, "prompt": "a", "max_tokens": "4"}, 400, "max_tokens"),
        ({"model": MODEL, "prompt": "a", "max_tokens": 10**6}, 400, "max_tokens"),
        ({"model": MODEL, "prompt": "a", "n": 0}, 400, "n"),
        ({"model": MODEL, "prompt": "a", "stream": 1}, 400, "stream"),
        ({"model": MODEL, "prompt": "a", "kv_transfer_params": {}}, 400, "kv_transfer_params"),
        (b'{"model": "llama", "prompt": "' + b"a" * 5000 + b'"}', 413, None),
    ],
)
def test_bad_bodies(cluster, body, status, param):
    router, engines = cluster(COUPLED, max_body_bytes=4096)
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = router.client.post("/v1/completions", **given)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert error["message"] and not any(engine.calls for engine in engines.values())


@pytest.mark.parametrize(
    "messages", [None, [], "hi", [{"content": "a"}], [{"role": "a", "content": 1}]]
)
def test_bad_messages(cluster, messages):
    router, _ = cluster(COUPLED)
    body = {"model": MODEL, "messages": messages}
    answer = router.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages")


@pytest.mark.parametrize("messages", [None, 5, ["content"], [{"content": [1]}]])
def test_messages_of_a_completion_are_the_engines_business(cluster, messages):
    router, engines = cluster({"both": "both"})
    assert router.complete("abc", messages=messages).status_code == 200
    assert engines["both"].calls[0][1]["messages"] == messages


@pytest.mark.parametrize(
    "body, param",
    [
        (b"", None),
        (b"\xff", None),
        (b'{"token_ids": "abc"}', None),
        (b'{"token_ids": [1, -1]}', "token_ids"),
        (b'{"token_ids": [4294967296]}', "token_ids"),
        (b'{"token_ids": [100000000000000000000000]}', "token_ids"),
    ],
)
def test_bad_queries(cluster, body, param):
    router, _ = cluster({"both": "both"})
    answer = router.client.post("/query", content=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_other_routes_and_methods(cluster):
    router, _ = cluster(COUPLED)
    assert [card["id"] for card in router.get("/v1/models")["data"]] == ["llama", "llama-lora"]
    assert router.client.get("/v1/completions").status_code == 405
    missing = router.client.get("/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
    wrong = router.client.get("/decisions?limit=-1")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "limit"


def test_only_callers_with_a_key_are_served(cluster, tmp_path):
    (tmp_path / "keys").write_text("first-key\nsecond-key\n")
    router, _ = cluster(COUPLED, api_keys_file=str(tmp_path / "keys"))
    for given in (None, "Bearer wrong", "Basic first-key", "Bearer first-key2", "Bearer"):
        headers = {} if given is None else {"Authorization": given}
        body = {"model": MODEL, "prompt": "a"}
        answer = router.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert router.client.get("/decisions").status_code == 401
    assert router.client.get("/health").status_code == 200
    router.client.headers["Authorization"] = "Bearer second-key"
    assert router.complete("abc").status_code == 200
    assert router.client.get("/decisions").status_code == 200


def test_the_engines_key_is_sent_and_the_clients_is_not(cluster, tmp_path):
    (tmp_path / "key").write_text("of-engines\n")
    router, engines = cluster({"both": "both"}, engine_api_key_file=str(tmp_path / "key"))
    router.client.headers["Authorization"] = "Bearer of-client"
    router.complete("abc")
    [(_, _, headers)] = engines["both"].calls
    assert headers["authorization"] == "Bearer of-engines"


def test_requests_beyond_the_limit_are_refused(cluster):
    router, engines = cluster({"both": "both"}, max_requests=1)
    engines["both"].gate.clear()
    asking = threading.Thread(target=router.complete, args=("abc",))
    asking.start()
    eventually(lambda: engines["both"].calls)
    answer = router.complete("abc")
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    engines["both"].gate.set()
    asking.join()
    eventually(lambda: router.complete("abc").status_code == 200)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_request_that_a_busy_engine_refuses_goes_to_another_one(cluster, role, stream):
    router, engines = cluster(APART)
    busy, other = engines[f"{role}-0"], engines[f"{role}-1"]
    busy.fail_with = 429
    for index in range(4):
        assert router.complete(f"prompt {index}", stream=stream).status_code == 200
    assert router.metric("mooncake_router_failed_attempts_total") == len(busy.calls) > 0
    other.fail_with = 429
    answer = router.complete("abc", stream=stream)
    assert answer.status_code == 429 and answer.json()["error"]["message"] == "it broke"
    assert "x-mooncake-decision" in answer.headers
    eventually(lambda: router.router._num_requests == 0)  # its client has the answer before
    assert not router.router.placement._open
    busy.fail_with = other.fail_with = 0
    assert router.complete("abc", stream=stream).status_code == 200
