"""vLLM's own MooncakeConnector, unmodified, on ``compat.mooncake``: prefill and decode in two
servers, which exchange blocks over tcp.

Tokens are compared with those of one engine alone. Loads that fail fail the request.
"""

import itertools
import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.metadata.support import free_port
from tests.pages import run_block
from tests.serving.in_vllm.support import at_once, num_in_blocks, proxy, random_prompts

HITS = "vllm:external_prefix_cache_hits_total"
SEEDS = itertools.count(1)
# A decoder waits for this many seconds and 60 more for a prefiller that does not answer.
DECODER = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "-50"}


def connector(role: str) -> dict:
    return {
        "kv_connector": "MooncakeConnector", "kv_role": role, "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    }  # fmt: skip


class Pair:
    """A proxy of two servers, which sends a prompt to both at once, as vLLM's example does."""

    def __init__(self, prefill, decode, bootstrap: str):
        self.prefill, self.decode, self.bootstrap = prefill, decode, bootstrap
        with urllib.request.urlopen(f"{bootstrap}/query", timeout=60) as answer:
            self.engine_id = json.load(answer)["0"]["engine_id"]

    def complete(self, prompt, num_tokens, decode=None):
        number = f"transfer{next(SEEDS)}"
        there = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": number}
        here = {
            "do_remote_decode": False, "do_remote_prefill": True, "transfer_id": number,
            "remote_engine_id": self.engine_id, "remote_bootstrap_addr": self.bootstrap,
        }  # fmt: skip
        with ThreadPoolExecutor(1) as executor:
            handed = executor.submit(self.prefill.complete, prompt, 1, there)
            answer = (decode or self.decode.complete)(prompt, num_tokens, here)
            handed.result()
        return answer

    def check(self, alone, prompts):
        before = self.decode.metric(HITS)
        answers = at_once(self.complete, [(prompt, 24) for prompt in prompts])
        assert [answer.status for answer in answers] == [200] * len(prompts), self.decode.tail()
        assert [answer.tokens for answer in answers] == alone.serve(prompts, 24)["tokens"]
        loaded = self.decode.metric(HITS) - before
        assert loaded >= sum(map(num_in_blocks, prompts))


@pytest.fixture(scope="module")
def pairs(vllm):
    """One producer with each of two consumers."""
    port = free_port()
    started = [
        vllm.server(connector("kv_producer"), {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port)}),
        *(vllm.server(connector("kv_consumer"), DECODER) for _ in range(2)),
    ]
    prefill, *decoders = (server.wait() for server in started)
    yield [Pair(prefill, decode, f"http://127.0.0.1:{port}") for decode in decoders]
    for server in started:
        server.kill()


def test_decode_gets_blocks_of_prefill(pairs, alone):
    for pair in pairs:
        pair.check(alone, random_prompts(6, next(SEEDS)))


def test_guides_proxy_gives_the_tokens_of_one_engine(pairs, alone, monkeypatch):
    pair = pairs[0]
    prefill, decode = pair.prefill, pair.decode
    monkeypatch.setattr(sys, "argv", ["pd_proxy.py", "mooncake"])
    bootstrap = pair.bootstrap.rpartition(":")[2]
    places = {
        "(8100, 8200, 8998)": f"({prefill.port}, {decode.port}, {bootstrap})",
        '("127.0.0.1", 8000)': '("127.0.0.1", 0)',
    }
    prompts = random_prompts(4, next(SEEDS))
    before = decode.metric(HITS)
    with proxy(lambda names: run_block("serving/drop_in", 0, names, places)) as server:
        answers = at_once(server.complete, [(prompt, 24) for prompt in prompts])
    assert [answer.status for answer in answers] == [200] * len(prompts), decode.tail()
    assert [answer.tokens for answer in answers] == alone.serve(prompts, 24)["tokens"]
    assert decode.metric(HITS) - before >= sum(map(num_in_blocks, prompts))


def test_killed_consumer_does_not_disturb_the_producer(pairs, alone):
    pair, other = pairs
    prompt, *prompts = random_prompts(3, next(SEEDS))
    right = alone.serve([prompt], 600)["tokens"][0]
    tokens = pair.complete(prompt, 600, pair.decode.kill_while_it_completes)
    assert tokens and tokens == right[: len(tokens)]
    other.check(alone, prompts)


def test_killed_producer_fails_only_the_requests_that_need_it(pairs, alone):
    pair = pairs[1]
    prompts = random_prompts(2, next(SEEDS))
    pair.prefill.kill()
    answers = at_once(pair.complete, [(prompt, 24) for prompt in prompts])
    assert [answer.tokens for answer in answers if answer.status == 200] == []
    answers = at_once(pair.decode.complete, [(prompt, 24) for prompt in prompts])
    assert [answer.tokens for answer in answers] == alone.serve(prompts, 24)["tokens"]
