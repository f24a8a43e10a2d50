"""vLLM's own NixlConnector, unmodified, on ``compat.nixl``: prefill and decode in two processes.

Tokens are compared with those of one engine alone. Loads that fail fail the request, so a right
answer was not computed a second time.
"""

import itertools
import sys

import pytest

from tests.metadata.support import free_port
from tests.pages import run_block
from tests.serving.in_vllm.support import at_once, num_in_blocks, proxy, random_prompts

START = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
TOKEN_BYTES = 3 * 2 * 2 * 64 * 4  # layers, key and value, heads, their size, float32
HITS = "vllm:external_prefix_cache_hits_total"
SEEDS = itertools.count(1)


def connector(name: str = "NixlConnector", role: str = "kv_both") -> dict:
    return {
        "kv_connector": name, "kv_role": role, "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
    }  # fmt: skip


def side_channel() -> dict[str, str]:
    port = str(free_port())
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": port}


@pytest.mark.parametrize("ucx_tls, transport", [("sm", "shm"), ("tcp", "tcp")])
def test_blocks_are_read_by_the_chosen_transport(vllm, alone, ucx_tls, transport):
    prefill, decode = (
        vllm.engine(connector(role=role), side_channel() | {"UCX_TLS": ucx_tls}, counts=True)
        for role in ("kv_producer", "kv_consumer")
    )
    prefill.wait()
    decode.wait()
    num_tokens = 0
    for _ in range(2):
        prompts = random_prompts(6, next(SEEDS))
        expected = alone.serve(prompts, 24)["tokens"]
        handed = prefill.serve(prompts, 1, [START] * len(prompts))
        there = decode.serve(prompts, 24, handed["params"])
        assert there["tokens"] == expected
        assert handed["tokens"] == [tokens[:1] for tokens in expected]
        num_tokens += sum(map(num_in_blocks, prompts))
        assert {*there["read"]} == {transport}
        assert there["read"][transport] >= num_tokens * TOKEN_BYTES
    prefill.end()
    decode.end()


class Pair:
    """A proxy of two servers: a prompt goes to one for its cache, and to the other for tokens."""

    def __init__(self, prefill, decode):
        self.prefill, self.decode = prefill, decode

    def complete(self, prompt, num_tokens, request_id=""):
        handed = self.prefill.complete(prompt, 1, START, request_id)
        assert handed.status == 200 and handed.params, self.prefill.tail()
        return self.decode.complete(prompt, num_tokens, handed.params, request_id)

    def check(self, alone, prompts):
        """Compare the tokens of prompts with those of an engine that has computed them alone."""
        before = self.decode.metric(HITS)
        asked = [(prompt, 24, f"request{next(SEEDS)}") for prompt in prompts]
        answers = at_once(self.complete, asked)
        assert [answer.status for answer in answers] == [200] * len(prompts), self.decode.tail()
        assert [answer.tokens for answer in answers] == alone.serve(prompts, 24)["tokens"]
        loaded = self.decode.metric(HITS) - before
        assert loaded >= sum(map(num_in_blocks, prompts))


@pytest.fixture(scope="module")
def servers(vllm):
    """Two servers of one rank, and one of two; each prefills and decodes."""
    ranks = {"one": 1, "other": 1, "two": 2}
    started = {
        name: vllm.server(connector(), side_channel(), count) for name, count in ranks.items()
    }
    yield {name: server.wait() for name, server in started.items()}
    for server in started.values():
        server.kill()


@pytest.mark.parametrize("prefill, decode", [("one", "other"), ("one", "two"), ("two", "other")])
def test_decode_pulls_from_prefill(servers, alone, prefill, decode):
    Pair(servers[prefill], servers[decode]).check(alone, random_prompts(6, next(SEEDS)))


def test_guides_proxy_gives_the_tokens_of_one_engine(servers, alone, monkeypatch):
    prefill, decode = servers["one"], servers["other"]
    monkeypatch.setattr(sys, "argv", ["pd_proxy.py", "nixl"])
    places = {
        "(8100, 8200, 8998)": f"({prefill.port}, {decode.port}, 0)",
        '("127.0.0.1", 8000)': '("127.0.0.1", 0)',
    }
    prompts = random_prompts(4, next(SEEDS))
    before = decode.metric(HITS)
    with proxy(lambda names: run_block("serving/drop_in", 0, names, places)) as server:
        answers = at_once(server.complete, [(prompt, 24) for prompt in prompts])
    assert [answer.status for answer in answers] == [200] * len(prompts), decode.tail()
    assert [answer.tokens for answer in answers] == alone.serve(prompts, 24)["tokens"]
    assert decode.metric(HITS) - before >= sum(map(num_in_blocks, prompts))


def test_killed_consumer_does_not_disturb_the_producer(servers, alone):
    prefill, killed = servers["one"], servers["two"]
    prompts = random_prompts(4, next(SEEDS))
    handed = [prefill.complete(prompt, 1, START) for prompt in prompts[:2]]
    assert [answer.status for answer in handed] == [200, 200]
    right = alone.serve(prompts[:1], 600)["tokens"][0]
    tokens = killed.kill_while_it_completes(prompts[0], 600, handed[0].params)
    assert tokens and tokens == right[: len(tokens)]  # and the other prompt is not fetched
    Pair(prefill, servers["other"]).check(alone, prompts[2:])


def test_killed_producer_fails_only_the_requests_that_need_it(servers, alone):
    killed, decode = servers["one"], servers["other"]
    prompts = random_prompts(3, next(SEEDS))
    handed = [killed.complete(prompt, 1, START) for prompt in prompts[:2]]
    assert [answer.status for answer in handed] == [200, 200]
    killed.kill()
    answers = at_once(
        decode.complete, [(prompts[i], 24, handed[i].params) for i in range(len(handed))]
    )
    assert [answer.tokens for answer in answers if answer.status == 200] == []
    right = alone.serve(prompts, 24)["tokens"]
    answers = at_once(decode.complete, [(prompt, 24) for prompt in prompts])
    assert [answer.tokens for answer in answers] == right


def test_prefill_pushes_to_decode(vllm, alone):
    """The decoder registers its blocks at the producer, before or after the producer has filled
    its own; both know the request by one id.
    """
    roles = ("kv_producer", "kv_consumer")
    started = [vllm.server(connector("NixlPushConnector", role), side_channel()) for role in roles]
    prefill, decode = (server.wait() for server in started)
    pair = Pair(prefill, decode)
    pair.check(alone, random_prompts(6, next(SEEDS)))

    prompts = random_prompts(4, next(SEEDS))
    where = prefill.complete(random_prompts(1, next(SEEDS))[0], 1, START).params
    where = {**where, "remote_block_ids": []}
    asked = []
    for i, prompt in enumerate(prompts):
        asked.append((prefill.complete, prompt, 1, START, f"both{i}"))
        asked.append(
            (decode.complete, prompt, 24, {**where, "remote_request_id": f"both{i}"}, f"both{i}")
        )
    answers = at_once(lambda call, *rest: call(*rest), asked)
    assert [answer.tokens for answer in answers[1::2]] == alone.serve(prompts, 24)["tokens"]
    prefill.kill()
    decode.kill()
