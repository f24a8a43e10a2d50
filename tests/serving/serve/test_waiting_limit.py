"""Requests beyond those that an engine lets wait: refused there, and placed elsewhere."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serving.router.support import RouterServer
from tests.serving.serve.support import WAIT_S, EngineServer
from tests.waiting import eventually


class Held:
    """Keeps an engine from stepping until it is let go on."""

    def __init__(self, server: EngineServer):
        self._step = server.worker.engine.step
        self.reached, self._go_on = threading.Event(), threading.Event()
        server.worker.engine.step = self
        self._server = server

    def __call__(self):
        self.reached.set()
        assert self._go_on.wait(WAIT_S)
        return self._step()

    def go_on(self) -> None:
        self._server.worker.engine.step = self._step
        self._go_on.set()


@pytest.fixture
def full(start):
    """Makes an engine full: it may let two wait, and they do; returns what ends that, too."""
    with ThreadPoolExecutor(4) as pool:
        all_held = []

        def made(*more: str):
            server = start("--max-waiting=2", *more)
            held = Held(server)
            all_held.append(held)
            waiting = [pool.submit(server.complete, f"the {i}") for i in range(2)]
            eventually(lambda: server.worker.num_waiting == 2 and held.reached.is_set())
            return server, held, waiting

        yield made
        for held in all_held:
            held.go_on()


def test_request_beyond_those_that_may_wait_is_refused_and_leaves_nothing(full, expected):
    server, held, waiting = full()
    refused = server.complete("one more", stream=True)
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    assert error["message"] == "2 requests wait, and no more are queued (--max-waiting)"
    assert server.metric("mooncake_engine_refusals_total") == 1
    assert server.metric("vllm:num_requests_waiting") == 2
    held.go_on()
    texts = [answer.result(WAIT_S).json()["choices"][0]["text"] for answer in waiting]
    assert texts == [expected(f"the {i}")[0] for i in range(2)]
    assert server.complete("one more").json()["choices"][0]["text"] == expected("one more")[0]
    assert server.worker.num_waiting == 0 and sum(server.worker.counts.finished.values()) == 3
    eventually(lambda: server.num_free_blocks == 128)


def test_prompt_of_a_refused_request_is_free_where_it_was_prefilled(start, full):
    prefill = start("--role=prefill")
    given = {"kv_transfer_params": {"do_remote_decode": True}}
    params = prefill.complete("a prompt of blocks", 1, **given).json()["kv_transfer_params"]
    decode, held, _ = full("--role=decode")
    prefilled = prefill.num_free_blocks
    assert decode.complete("a prompt of blocks", kv_transfer_params=params).status_code == 429
    held.go_on()
    assert prefilled < 128
    eventually(lambda: prefill.num_free_blocks == 128)


def router_of(start, **servers: EngineServer) -> RouterServer:
    entries = [{"name": n, "role": "both", "url": one.url} for n, one in servers.items()]
    return RouterServer({"instance": entries, "block_size": 8, "health_s": 0.05})


def test_router_places_what_a_full_engine_refuses_on_another_one(start, full, expected):
    server, held, _ = full()
    other = start()
    router = router_of(start, full=server, other=other)
    try:
        for i in range(4):
            body = {"model": "tiny", "prompt": f"elsewhere {i}", "max_tokens": 8, "temperature": 0}
            answer = router.client.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == expected(f"elsewhere {i}")[0]
        other.worker._max_waiting = 0
        refused = router.client.post("/v1/completions", json=body)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert "--max-waiting" in refused.json()["error"]["message"]
        assert "x-mooncake-decision" in refused.headers
        held.go_on()
    finally:
        router.close()
