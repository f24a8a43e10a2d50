"""Prefill and decode engines of SGLang, which get a request at once."""

import json
import socket
import threading

import msgspec
import pytest

from mooncake_serving.store.events import BlockRemoved, BlockStored
from mooncake_serving.store.events.messages import decode
from tests.serving.router.support import ADAPTER, APART, COUPLED, MODEL
from tests.serving.router.test_proxying import CHAT, words_of
from tests.waiting import eventually

PAIR = {"p": "prefill", "d": "decode"}


def meeting_of(body: dict) -> dict:
    return {name: value for name, value in body.items() if name.startswith("bootstrap_")}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_pair_answers_as_one_engine(cluster, path, stream):
    router, engines = cluster(PAIR, connector="sglang")
    alone, _ = cluster({"both": "both"})
    question = {"prompt": "What is a cache?"} if path == "/v1/completions" else {"messages": CHAT}
    body = {"model": MODEL, "max_tokens": 5, "n": 2, "stream": stream, **question}
    for _ in range(2):
        answer, expected = router.client.post(path, json=body), alone.client.post(path, json=body)
        assert answer.status_code == expected.status_code == 200
        assert answer.headers["content-type"] == expected.headers["content-type"]
        assert answer.content == expected.content
        assert "prefill=p; " in answer.headers["x-mooncake-decision"]
        assert "decode=d; " in answer.headers["x-mooncake-decision"]
        eventually(lambda: router.last().get("outcome") == "answered")
    seen = [engines[name].arrived for name in PAIR]
    rooms = set()
    for at_prefill, at_decode in zip(*seen, strict=True):
        meeting = meeting_of(at_prefill)
        assert meeting_of(at_decode) == meeting
        assert at_decode == body | meeting
        assert at_prefill == {n: v for n, v in body.items() if n != "stream"} | meeting
        assert meeting["bootstrap_host"] == "127.0.0.1"
        assert meeting["bootstrap_port"] == engines["p"].server.port
        rooms.add(meeting["bootstrap_room"])
    assert len(rooms) == 2


def test_both_engines_have_the_request_before_one_has_computed_it(cluster):
    router, engines = cluster(PAIR, connector="sglang")
    engines["p"].gate.clear()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(router.complete("abc")))
    asking.start()
    for engine in engines.values():
        eventually(lambda engine=engine: engine.arrived)
    assert router.instance("p")["prefills"] == 1 and router.instance("d")["decoding"] == 0
    engines["d"].gate.clear()
    engines["p"].gate.set()
    eventually(lambda: router.instance("d")["decoding"] == 1)
    assert router.instance("p")["prefills"] == 0
    engines["d"].gate.set()
    asking.join()
    assert answers[0].status_code == 200


@pytest.mark.parametrize("failing", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("how", ["status", "killed"])
def test_a_failure_of_either_places_the_request_again(cluster, failing, how):
    router, engines = cluster(APART, connector="sglang", health_s=1000)
    right = router.complete("abc" * 20).json()
    if how == "status":
        engines[failing].fail_with = 500
    else:
        engines[failing].server.kill()
    answers = [router.complete("abc" * 20) for _ in range(3)]
    assert [answer.json() for answer in answers] == [right] * 3
    assert router.metric("mooncake_router_failed_attempts_total") >= 1
    assert router.instance(failing)["up"] is (how == "status")
    state = router.router.placement.conductor.cluster
    eventually(lambda: not state.reserved_tokens.any() and not state.batch_size.any())


def test_a_prefill_that_fails_frees_the_decode_engine(cluster):
    router, engines = cluster(PAIR, connector="sglang", max_attempts=1)
    engines["p"].fail_with = 500
    answer = router.complete("abc")
    assert answer.status_code == 502 and "p: HTTP 500" in answer.json()["error"]["message"]
    eventually(lambda: engines["d"].num_left == len(engines["d"].arrived))


def test_a_prefill_engine_that_fails_once_it_has_handed_over_ends_no_stream(cluster):
    router, engines = cluster(PAIR, connector="sglang")
    prefill = engines["p"]
    right = words_of(router.complete("abc", stream=True).text)
    prefill.end.clear()
    prefill.end_with = 500
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 4, "stream": True}
    with router.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        read = [next(lines)]
        prefill.end.set()
        read += [*lines]
    assert words_of("\n".join(read)) == right
    eventually(lambda: router.last().get("outcome") == "answered")


def test_what_both_refuse_is_passed_on(cluster):
    router, _ = cluster(PAIR, connector="sglang")
    answer = router.complete("abc", max_tokens=13)
    assert answer.status_code == 400
    assert answer.json() == {"error": {"message": "an unlucky number"}}


def test_a_client_that_leaves_frees_both(cluster):
    router, engines = cluster(PAIR, connector="sglang")
    engines["p"].gate.clear()
    body = json.dumps({"model": MODEL, "prompt": "abc"})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", router.server.port)) as client:
        client.sendall((head + body).encode())
        for engine in engines.values():
            eventually(lambda engine=engine: engine.arrived)
    for engine in engines.values():
        eventually(lambda engine=engine: engine.num_left >= 1)
    eventually(lambda: router.instance("p")["prefills"] == 0)
    assert not router.router.placement.conductor.cluster.reserved_tokens.any()


@pytest.mark.parametrize("rule", ["baseline", "early", "accept_all"])
def test_what_both_have_is_not_refused_any_more(cluster, rule):
    admission = {"ttft_s": 1000, "tbt_s": 0.15, "rule": rule}
    costs = {"decode": [0.0, 0.1, 0.0]}  # of which one request has room
    router, engines = cluster(PAIR, connector="sglang", admission=admission, costs=costs)
    for engine in engines.values():
        engine.gate.clear()
    answers = []
    asking = [
        threading.Thread(target=lambda: answers.append(router.complete("abc"))) for _ in range(2)
    ]
    for one in asking:
        one.start()
    eventually(lambda: len(engines["d"].arrived) == 2)
    for engine in engines.values():
        engine.gate.set()
    for one in asking:
        one.join()
    assert [answer.status_code for answer in answers] == [200, 200]


def test_engines_that_do_both_get_the_body_as_it_came(cluster):
    router, engines = cluster(COUPLED, connector="sglang")
    assert router.complete("abc").status_code == 200
    [body] = [body for engine in engines.values() for body in engine.arrived]
    assert body == {"model": MODEL, "prompt": "abc", "max_tokens": 4}


def test_adapters_are_asked_for_by_the_model_and_their_name(cluster):
    router, engines = cluster(PAIR, connector="sglang", events=True)
    both = f"{MODEL}:{ADAPTER}"
    assert [card["id"] for card in router.get("/v1/models")["data"]] == [MODEL, both]
    tokens = list(range(32))
    engines["p"].events.send(BlockStored([1, 2], None, tokens, 16, None, "GPU", ADAPTER))
    eventually(lambda: router.instance("p")["held_blocks"] == 2)
    body = {"model": both, "prompt": [*tokens, 5], "max_tokens": 1}
    assert router.client.post("/v1/completions", json=body).status_code == 200
    assert router.last()["prefill"]["cached_tokens"] == 32
    assert engines["d"].arrived[-1]["model"] == both
    body["model"] = ADAPTER  # which SGLang would answer with the model itself
    assert router.client.post("/v1/completions", json=body).status_code == 404


def test_clients_may_not_choose_a_room(cluster):
    router, engines = cluster(PAIR, connector="sglang")
    answer = router.complete("abc", bootstrap_room=5)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "bootstrap_room"
    assert not engines["p"].arrived


def test_events_have_fields_of_their_own():
    """SGLang 0.5.23 publishes maps, with fields that vLLM's do not have."""
    stored = {
        "type": "BlockStored", "block_hashes": [-5], "parent_block_hash": None,
        "token_ids": [1, 2], "block_size": 2, "lora_id": None, "medium": "GPU",
        "session_id": "s", "cache_salt": None,
    }  # fmt: skip
    removed = {"type": "BlockRemoved", "block_hashes": [-5], "medium": "CPU_PINNED"}
    payload = msgspec.msgpack.encode([1.5, [stored, removed], 0])
    assert decode(payload) == (
        1.5,
        [BlockStored([-5], None, [1, 2], 2, None, "GPU"), BlockRemoved([-5], "CPU_PINNED")],
        0,
        [],
    )
