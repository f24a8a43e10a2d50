"""The router in front of vLLM's own servers: prefill and decode apart, and engines that do both.

Tokens are compared with those of one engine alone. Loads that fail fail the request.
"""

import contextlib
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.metadata.support import free_port
from tests.serving.in_vllm.support import BLOCK, at_once, num_in_blocks, random_prompts
from tests.serving.router.support import RouterServer, eventually

HITS = "vllm:external_prefix_cache_hits_total"
USAGE = "vllm:kv_cache_usage_perc"
SEEDS = itertools.count(1000)


def connector(kind: str, role: str) -> dict:
    common = {"kv_role": role, "kv_load_failure_policy": "fail"}
    if kind == "nixl":
        return common | {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
    if kind == "mooncake":
        options = {"mooncake_protocol": "tcp"}
        return common | {
            "kv_connector": "MooncakeConnector", "kv_connector_extra_config": options,
        }  # fmt: skip
    return common | {
        "kv_connector": "StoreConnector",
        "kv_connector_module_path": "mooncake_serving.connectors.vllm",
        "kv_connector_extra_config": {"handoff": {"host": "127.0.0.1", "lease_s": 10.0}},
    }


def events() -> dict[str, str]:
    """Where an engine listens: vLLM connects to endpoints without a wildcard."""
    return {name: f"tcp://*:{free_port()}" for name in ("endpoint", "replay_endpoint")}


def of_router(server, name: str, role: str, told: dict[str, str], **more: str) -> dict:
    url = f"http://127.0.0.1:{server.port}"
    here = {name: told[name].replace("*", "127.0.0.1") for name in told}
    where = {"events": here["endpoint"], "replay": here["replay_endpoint"], "topic": "kv"}
    return {"name": name, "role": role, "url": url, **where, **more}


@pytest.fixture
def serve(vllm):
    """Starts engines with KV events, and a router in front of them."""
    with contextlib.ExitStack() as stack:

        def start(kind: str, roles: dict[str, str]):
            servers, entries, bootstrap = {}, [], free_port()
            for name, role in roles.items():
                told = events()
                env = {
                    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                    "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap),
                }
                as_role = {"prefill": "kv_producer", "decode": "kv_consumer"}.get(role)
                publish = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"}
                servers[name] = vllm.server(
                    connector(kind, as_role) if as_role else None,
                    env,
                    **{"kv-events-config": json.dumps(publish | told)},
                )
                stack.callback(servers[name].kill)
                needs = kind == "mooncake" and role == "prefill"
                more = {"bootstrap": f"http://127.0.0.1:{bootstrap}"} if needs else {}
                entries.append(of_router(servers[name], name, role, told, **more))
            for server in servers.values():
                server.wait()
            router = RouterServer({"instance": entries, "connector": kind})
            stack.callback(router.close)
            router.client.timeout = 120
            return router, servers

        yield start


def complete(router, prompt, num_tokens=24, **more):
    body = {
        "model": "llama", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **more,
    }  # fmt: skip
    return router.client.post("/v1/completions", json=body)


def tokens_of(answer) -> list[int]:
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("application/json"):
        return answer.json()["choices"][0]["token_ids"]
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [token for line in lines for token in json.loads(line)["choices"][0]["token_ids"]]


def check(router, alone, prompts):
    expected = alone.serve(prompts, 24)["tokens"]
    answers = at_once(complete, [(router, prompt) for prompt in prompts])
    assert [tokens_of(answer) for answer in answers] == expected
    streams = [complete(router, prompt, stream=True) for prompt in prompts[:2]]
    assert [tokens_of(answer) for answer in streams] == expected[:2]


@pytest.mark.parametrize("kind", ["nixl", "mooncake_kernels", "mooncake"])
def test_prefill_and_decode_apart(serve, alone, kind):
    router, servers = serve(kind, {"p": "prefill", "d": "decode"})
    prompts = random_prompts(6, next(SEEDS))
    check(router, alone, prompts)
    assert servers["d"].metric(HITS) >= sum(map(num_in_blocks, prompts))

    full = sum(len(prompt) // BLOCK for prompt in prompts)
    eventually(lambda: router.instance("p")["held_blocks"] >= full)
    assert router.instance("p")["unnamed_blocks"] == 0
    longer = [*prompts[0], *random_prompts(1, next(SEEDS))[0]]
    assert tokens_of(complete(router, longer)) == alone.serve([longer], 24)["tokens"][0]
    assert router.last()["prefill"]["cached_tokens"] == len(prompts[0]) // 16 * 16
    assert router.instance("p")["capacity_tokens"] < 2**40  # as its metrics say

    text = complete(router, "w1 w2 w3")
    assert text.status_code == 200 and router.last()["prompt_tokens"] >= 1
    wrong = complete(router, prompts[0], num_tokens=10_000)
    assert wrong.status_code == 400 and wrong.json()["error"]["message"]


def test_engines_that_do_both(serve, alone):
    router, servers = serve("nixl", {"a": "both", "b": "both"})
    prompts = random_prompts(6, next(SEEDS))
    check(router, alone, prompts)
    first = router.last()["prefill"]["instance"]
    servers[first].kill()
    check(router, alone, prompts)
    assert router.last()["prefill"]["instance"] != first


def test_requests_that_come_past_the_router_are_seen(serve):
    router, servers = serve("nixl", {"a": "both", "b": "both"})
    [prompt] = random_prompts(1, next(SEEDS))
    stop = threading.Event()

    def ask_past_it() -> None:
        body = {"model": "llama", "prompt": prompt, "max_tokens": 200, "ignore_eos": True}
        url = f"http://127.0.0.1:{servers['a'].port}/v1/completions"
        while not stop.is_set():
            assert httpx.post(url, json=body, timeout=120).status_code == 200

    asking = [threading.Thread(target=ask_past_it) for _ in range(3)]
    for one in asking:
        one.start()
    try:
        eventually(lambda: router.instance("a")["others_running"] == 3)
        assert router.instance("a")["kv_tokens"] > 0 and router.instance("a")["decoding"] == 0
        assert router.instance("b")["others_running"] == 0
        tokens_of(complete(router, prompt))
    finally:
        stop.set()
        for one in asking:
            one.join()
    eventually(lambda: router.instance("a")["others_running"] == 0)
    assert router.instance("a")["kv_tokens"] == 0
    # Those of this router, whose metrics may be late, are nobody else's.
    body = {"model": "llama", "prompt": prompt, "max_tokens": 400, "ignore_eos": True}
    with router.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        used = router.last()["prefill"]["instance"]
        seen = [router.instance(used) for _ in zip(range(200), lines, strict=False)]
        assert any(told["decoding"] for told in seen)
        assert not any(told["others_running"] or told["others_waiting"] for told in seen)


def test_killed_engines(serve, alone):
    """Requests that need one fail, or are right; all others are right; no block stays in use."""
    roles = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode"}
    router, servers = serve("mooncake_kernels", roles)
    one, other, *prompts = random_prompts(10, next(SEEDS))
    start = {"do_remote_decode": True, "do_remote_prefill": False}
    handed = [servers["p"].complete(prompt, 1, start).params for prompt in (one, other)]

    # A decode engine, while it generates and while others are answered.
    right, expected = alone.serve([one], 600)["tokens"][0], alone.serve(prompts, 24)["tokens"]
    with ThreadPoolExecutor(1) as executor:
        tokens = executor.submit(servers["e"].kill_while_it_completes, one, 600, handed[0])
        answers = at_once(complete, [(router, prompt) for prompt in prompts])
    assert tokens.result() and tokens.result() == right[: len(tokens.result())]
    for answer, tokens in zip(answers, expected, strict=True):
        assert answer.status_code >= 500 or tokens_of(answer) == tokens
    check(router, alone, random_prompts(4, next(SEEDS)))

    # A prefill engine, with a prompt that no one has asked for, and others on their way.
    prompts = random_prompts(8, next(SEEDS))
    expected = alone.serve(prompts, 24)["tokens"]
    with ThreadPoolExecutor(len(prompts)) as executor:
        answers = [executor.submit(complete, router, prompt) for prompt in prompts]
        answers[0].result()
        servers["p"].kill()
        lost = servers["d"].complete(other, 24, handed[1])
    assert lost.status >= 500 and not lost.tokens
    for answer, tokens in zip(answers, expected, strict=True):
        assert answer.result().status_code >= 500 or tokens_of(answer.result()) == tokens
    check(router, alone, [other, *random_prompts(4, next(SEEDS))])

    def is_empty(server) -> bool:
        server.complete([7] * 5, 1)  # without steps, an engine counts and frees nothing
        return server.metric(USAGE) == 0

    for name in ("q", "d"):
        assert eventually(lambda: is_empty(servers[name]))  # noqa: B023
