"""Prompts that one engine server prefills for another one, alone and behind the router."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.http_api import ErrorAnswer
from mooncake_serving.serve import transfers
from tests.serving.router.support import RouterServer
from tests.serving.serve.support import WAIT_S, EngineServer, events_of, text_of
from tests.waiting import eventually

PREFILL = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
PROMPTS = ["the end", "in the inner 12, " * 6, "the " * 50, "abcdefgh", "abcdefghi"]


@pytest.fixture
def pair(start):
    """An engine that prefills and one that decodes."""
    return start("--role=prefill"), start("--role=decode")


def params_of(prefill: EngineServer, prompt: Any) -> dict[str, Any]:
    answer = prefill.complete(prompt, **PREFILL)
    assert answer.status_code == 200, answer.text
    return answer.json()["kv_transfer_params"]


def all_free(*servers: EngineServer) -> None:
    for server in servers:
        eventually(lambda server=server: server.num_free_blocks == 128)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_those_of_an_engine_alone(pair, expected, stream):
    prefill, decode = pair
    for prompt in PROMPTS:
        params = params_of(prefill, prompt)
        answer = decode.complete(prompt, 12, kv_transfer_params=params, stream=stream)
        text = text_of(events_of(answer)) if stream else answer.json()["choices"][0]["text"]
        assert text == expected(prompt, 12)[0]
    assert decode.worker.counts.failed_transfers == 0
    all_free(prefill, decode)


def both_at_once(prefill: EngineServer, decode: EngineServer, pool, prompt: str, max_tokens: int):
    """Ask both engines, the one that decodes first; returns its answer, which is to come."""
    params = params_of(prefill, "where it is")
    assert decode.complete("where it is", kv_transfer_params=params).status_code == 200
    params["transfer_id"] = "both at once"
    answer = pool.submit(decode.complete, prompt, max_tokens, kv_transfer_params=params)
    eventually(lambda: decode.worker.transfers.is_busy)
    named = {"do_remote_decode": True, "transfer_id": "both at once"}
    return answer, pool.submit(prefill.complete, prompt, max_tokens=1, kv_transfer_params=named)


def watch_layers(prefill: EngineServer, decode: EngineServer, watch: Any) -> None:
    """Have ``watch`` called after each layer that was handed over: what the decode engine lacks,
    ``[layer, block]``, how many tokens are computed, and in how many layers.
    """
    computed = prefill.worker.transfers.computed

    def watched(job, send, block_ids, num_computed, num_layers):
        computed(job, send, block_ids, num_computed, num_layers)
        requests = [*decode.worker.transfers._receiver._requests.values()]
        calls = [call for request in requests for call in request.calls]
        if calls:
            watch(calls[0].missing["0", 0], num_computed, num_layers)

    prefill.worker.transfers.computed = watched


def test_layers_leave_while_the_next_ones_are_computed(pair, expected):
    """A receiver that comes first, with a transfer's name that both are told."""
    prefill, decode = pair
    prompt, steps = "the " * 120, []

    def watch(missing, num_computed, num_layers):
        steps.append((num_computed, num_layers))
        num_blocks = min(num_computed // 8, missing.shape[1])
        if num_layers == 1:  # of 2
            eventually(lambda: not missing[0, :num_blocks].any())
            assert missing[1, num_blocks - 1]

    watch_layers(prefill, decode, watch)
    with ThreadPoolExecutor(2) as pool:
        answer, prefilled = both_at_once(prefill, decode, pool, prompt, 9)
        assert prefilled.result().status_code == 200
        text = answer.result().json()["choices"][0]["text"]
    assert text == expected(prompt, 9)[0]
    chunks = [stop for stop, num_layers in steps if num_layers == 1]
    assert len(chunks) > 2 and chunks == sorted({*chunks})  # of 32 tokens each
    begins = [0, *chunks[:-1]]
    called = [
        step
        for begin, stop in zip(begins, chunks, strict=True)
        for step in [(begin, 2), (stop, 1), (stop, 2)]
    ]
    assert steps == called[: len(steps)]
    all_free(prefill, decode)


def test_what_the_prefill_engine_has_leaves_before_a_layer_is_computed(pair, expected):
    prefill, decode = pair
    prompt, steps = "the " * 100, []
    assert prefill.complete(prompt[:200], 1).status_code == 200

    def watch(missing, num_computed, num_layers):
        steps.append((num_computed, num_layers))
        if len(steps) == 1:
            eventually(lambda: not missing[:, : num_computed // 8].any())
            assert missing[:, num_computed // 8 :].all()

    watch_layers(prefill, decode, watch)
    with ThreadPoolExecutor(2) as pool:
        answer, prefilled = both_at_once(prefill, decode, pool, prompt, 9)
        cached = prefilled.result().json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert answer.result().json()["choices"][0]["text"] == expected(prompt, 9)[0]
    assert cached > 0 and steps[0] == (cached, 2)
    all_free(prefill, decode)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_abort_of_either_side_in_the_middle_of_a_layer(pair, expected, side):
    prefill, decode = pair
    in_layer, go_on = threading.Event(), threading.Event()

    def watch(missing, num_computed, num_layers):
        if (num_computed, num_layers) == (64, 1):
            in_layer.set()
            assert go_on.wait(WAIT_S)

    watch_layers(prefill, decode, watch)
    with ThreadPoolExecutor(2) as pool:
        answer, prefilled = both_at_once(prefill, decode, pool, "the " * 120, 9)
        assert in_layer.wait(WAIT_S)
        server = prefill if side == "prefill" else decode
        [job] = server.worker._unfinished
        server.worker.end(job, "abort")
        go_on.set()
        if side == "prefill":
            assert "was aborted" in answer.result().json()["error"]["message"]
        else:
            assert prefilled.result().status_code == 200
        job.outputs.put_nowait(ErrorAnswer(499, "it has left", "abort"))  # to its own client
    assert decode.complete("abc", 4).json()["choices"][0]["text"] == expected("abc", 4)[0]
    all_free(prefill, decode)


def test_what_the_decode_engine_has_is_not_sent(pair, expected):
    prefill, decode = pair
    prompt = "a long prefix of some more blocks than one: "
    asked: list[int] = []
    receiver = decode.worker.transfers._receiver
    receive = receiver.receive

    def record(*args: Any, **more: Any) -> None:
        asked.append(more["first_token"])
        receive(*args, **more)

    receiver.receive = record
    for end in ("x", "yz", "yz"):
        params = params_of(prefill, prompt + end)
        answer = decode.complete(prompt + end, 5, kv_transfer_params=params).json()
        assert answer["choices"][0]["text"] == expected(prompt + end, 5)[0]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert asked[0] == 0 and 0 < asked[1] <= cached and cached % 8 == 0
    all_free(prefill, decode)


def test_prompt_of_one_token_is_computed_where_it_arrives(pair, expected):
    prefill, decode = pair
    params = params_of(prefill, [7])
    answer = decode.complete([7], 5, kv_transfer_params=params).json()
    assert answer["choices"][0]["text"] == expected([7], 5)[0]


def test_transfer_that_is_over_fails_the_request_alone(pair, expected):
    prefill, decode = pair
    params = params_of(prefill, "the end")
    assert decode.complete("the end", kv_transfer_params=params).status_code == 200
    again = decode.complete("the end of it all", kv_transfer_params=params)
    assert again.status_code == 500
    assert "was not handed over" in again.json()["error"]["message"]
    assert decode.complete("abc", 4).json()["choices"][0]["text"] == expected("abc", 4)[0]
    all_free(prefill, decode)


def test_blocks_of_another_prompt_are_refused(pair):
    prefill, decode = pair
    params = params_of(prefill, [5, 6, 7, 8])
    answer = decode.complete([5, 6, 9, 8], kv_transfer_params=params)
    assert answer.status_code == 500 and "another one" in answer.json()["error"]["message"]


def test_prefill_that_nobody_fetches_ends_with_its_lease(start, monkeypatch):
    settings = replace(transfers.SETTINGS, lease_s=0.2)
    monkeypatch.setattr(transfers.Transfers.__init__, "__kwdefaults__", {"settings": settings})
    prefill, decode = start("--role=prefill"), start("--role=decode")
    params = params_of(prefill, "the end of it")
    all_free(prefill)
    late = decode.complete("the end of it", kv_transfer_params=params)
    assert late.status_code == 500 and "asked for" in late.json()["error"]["message"]


def test_client_that_leaves_while_its_prompt_is_awaited(pair):
    prefill, decode = pair
    params = {**params_of(prefill, "abc"), "transfer_id": "never offered"}
    body = {"model": "tiny", "prompt": "the " * 9, "kv_transfer_params": params, "stream": True}
    with pytest.raises(httpx.ReadTimeout):
        decode.client.post("/v1/completions", json=body, timeout=0.5)
    eventually(lambda: decode.worker.counts.finished["abort"] == 1)
    all_free(decode)


def test_prompt_that_is_awaited_waits_and_fails_with_its_engine(pair, monkeypatch):
    prefill, decode = pair
    params = {**params_of(prefill, "abc"), "transfer_id": "never offered"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(decode.complete, "the " * 9, kv_transfer_params=params)
        eventually(lambda: decode.worker.num_waiting == 1)
        assert decode.metric("vllm:num_requests_waiting") == 1
        monkeypatch.setattr(decode.worker.transfers, "poll", None)
        assert answer.result().json()["error"]["code"] == "engine_failed"


def test_request_that_the_engine_refuses_late_ends_its_transfer(start, monkeypatch, tmp_path):
    store = f"--store=shm:{tmp_path / 'kv'}?size=8MiB"
    prefill, decode = start("--role=prefill", store), start("--role=decode")
    params, released = params_of(prefill, "abc"), []

    def reserve_for(prompt, params):
        raise InvalidArgument("reserve_for: as a test wants it")

    monkeypatch.setattr(decode.worker.transfers._receiver, "release", lambda *_: released.append(1))
    for server in (prefill, decode):
        monkeypatch.setattr(server.worker.engine, "reserve_for", reserve_for)
    refused = decode.complete("abc", kv_transfer_params=params)
    assert (refused.status_code, released) == (400, [1])
    assert refused.json()["error"]["message"] == "reserve_for: as a test wants it"
    named = {"do_remote_decode": True, "transfer_id": "a name"}
    for _ in "ab":  # the name is free again
        refused = prefill.complete("abcd", max_tokens=1, kv_transfer_params=named)
        assert refused.json()["error"]["message"] == "reserve_for: as a test wants it"
    monkeypatch.undo()
    assert decode.complete("abc", 4).status_code == 200


def test_router_hands_over_and_knows_what_is_cached(start, expected):
    engines = {
        "prefill": start("--role=prefill", events=True),
        "decode": start("--role=decode", events=True),
    }
    instances = [
        {
            "name": name, "role": name, "url": engine.url,
            "events": engine.publisher.endpoint, "replay": engine.publisher.replay_endpoint,
        }
        for name, engine in engines.items()
    ]  # fmt: skip
    content = {"connector": "mooncake_kernels", "block_size": 8, "instance": instances}
    router = RouterServer(content)
    try:
        for prompt in PROMPTS:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 10, "temperature": 0}
            answer = router.client.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == expected(prompt, 10)[0], answer.text
            streamed = router.client.post("/v1/completions", json={**body, "stream": True})
            assert text_of(events_of(streamed)) == expected(prompt, 10)[0]
        messages = [{"role": "user", "content": "hello, router"}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0}
        chat = router.client.post("/v1/chat/completions", json=body).json()
        alone = engines["decode"].client.post("/v1/chat/completions", json=body).json()
        assert chat["choices"][0]["message"] == alone["choices"][0]["message"]
        eventually(lambda: router.instance("prefill")["held_blocks"] > 0)
        assert router.instance("prefill")["unnamed_blocks"] == 0
        eventually(
            lambda: (
                router.complete(PROMPTS[2], 2, model="tiny").status_code == 200
                and router.last()["prefill"]["cached_tokens"] > 0
            )
        )
        assert router.instance("prefill")["capacity_tokens"] == 1024
    finally:
        router.close()
