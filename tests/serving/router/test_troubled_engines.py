"""Engines that hang, lack something or are too small for a request; and a router short of files."""

import asyncio
import errno
import json
import os
import resource
import socket
import threading

import httpx
import pytest

from mooncake_serving.conductor import Role
from mooncake_serving.router import health, parse_config
from mooncake_serving.router import router as router_module
from mooncake_serving.router.config import InstanceConfig
from mooncake_serving.router.engines import EngineFailed, Engines
from mooncake_serving.router.health import HealthWatch
from tests.serving.router.support import (
    ADAPTER,
    APART,
    COUPLED,
    MODEL,
    RouterServer,
)
from tests.serving.router.test_placing import SLOW, prefill_of
from tests.waiting import eventually

INSTANCE = InstanceConfig("one", "http://127.0.0.1:1", Role.BOTH)


def capacities(router, *tokens: int) -> None:
    router.router.placement.conductor.cluster.capacity_tokens[: len(tokens)] = tokens


@pytest.mark.parametrize("tokenizes", [None, False])
def test_another_engine_tokenizes_if_one_does_not(cluster, monkeypatch, tokenizes):
    monkeypatch.setattr(router_module, "PROBE_S", 2.0)
    router, engines = cluster(COUPLED)
    engines["both-0"].tokenizes = tokenizes
    for _ in range(2):
        assert router.complete("a long word").status_code == 200
        assert router.last()["prompt_tokens"] == len("a long word")
    assert engines["both-0"].num_tokenized == 1


def test_a_client_that_leaves_while_engines_tokenize_frees_everything(cluster, monkeypatch):
    monkeypatch.setattr(router_module, "PROBE_S", 1000)
    router, engines = cluster({"both": "both"})
    engines["both"].tokenizes = None
    body = json.dumps({"model": MODEL, "prompt": "abc"})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", router.server.port)) as client:
        client.sendall((head + body).encode())
        eventually(lambda: engines["both"].num_tokenized == 1)
    eventually(lambda: router.metric("mooncake_router_requests_total") == 1)
    assert not engines["both"].calls and router.router._num_requests == 0


def test_a_guessed_length_refuses_nothing_and_is_not_measured(cluster):
    router, engines = cluster({"p": "prefill", "d": "decode"}, engine={"prefill_s": 0.001})
    capacities(router, 1000, 1000)
    for engine in engines.values():
        engine.tokenizes = False
    answer = router.complete("a" * 8000, max_tokens=40, stream=True)
    assert answer.status_code == 200
    assert router.last()["prompt_tokens"] <= 1000
    assert router.complete("abc", max_tokens=1000).status_code == 400  # whatever the prompt is
    costs = router.get("/instances")["costs"]
    assert costs["prefill"]["num_samples"] == costs["decode"]["num_samples"] == 0


def test_a_whole_answer_is_no_measured_prefill(cluster):
    router, _ = cluster({"both": "both"}, costs=SLOW)  # so that it comes before it is expected
    assert router.complete([1, 2, 3]).status_code == 200
    assert router.instance("both")["prefills"] == 0
    assert router.get("/instances")["costs"]["prefill"]["num_samples"] == 0
    router.complete([1, 2, 3], stream=True)
    assert router.get("/instances")["costs"]["prefill"]["num_samples"] == 1


@pytest.mark.parametrize("rule", [{"rule": "baseline"}, {"rule": "predictive", "decode_s": 1e-6}])
def test_what_runs_without_room_counts(cluster, rule):
    router, engines = cluster({"both": "both"}, admission={"tbt_s": 1000, **rule})
    capacities(router, 100)  # too few for both requests
    engines["both"].stall_after = 1
    with httpx.Client(base_url=router.server.url) as client:
        body = {"model": MODEL, "prompt": [1] * 60, "max_tokens": 4, "stream": True}
        with client.stream("POST", "/v1/completions", json=body):
            state = router.router.placement.conductor.cluster
            eventually(lambda: state.batch_size[0] == 1)
            with router.client.stream("POST", "/v1/completions", json=body) as second:
                assert second.status_code == 200
                eventually(lambda: state.batch_size[0] == 2)
    eventually(lambda: state.batch_size[0] == 0)


@pytest.mark.parametrize("how, status", [("fails", 502), ("is down", 503)])
def test_a_request_too_long_for_the_engines_that_are_left_is_no_clients_error(cluster, how, status):
    router, engines = cluster(COUPLED, health_s=1000)
    capacities(router, 1000, 20)
    assert prefill_of(router.complete([1] * 50)) == "both-0"
    if how == "fails":
        engines["both-0"].fail_with = 500
    else:
        engines["both-0"].server.kill()
    answer = router.complete([1] * 50)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == ("engine_failed" if status == 502 else "no_engine")
    assert router.complete([1] * 2000).status_code == 400  # nobody holds that
    assert router.complete([1] * 3).status_code == 200


@pytest.mark.parametrize("roles", [COUPLED, APART])
def test_an_adapter_that_some_engines_lack_is_asked_of_others(cluster, roles):
    lacking = {name: [MODEL] for name in roles if name.endswith("-0")}
    router, engines = cluster(roles, serves=lacking)
    body = {"model": ADAPTER, "prompt": "abc", "max_tokens": 1}
    for _ in range(3):
        assert router.client.post("/v1/completions", json=body).status_code == 200
    assert not any(engines[name].calls or engines[name].num_tokenized for name in lacking)
    for name in roles:
        if name not in lacking:
            engines[name].server.kill()
    eventually(lambda: sum(router.instance(name)["up"] for name in roles) == len(lacking))
    answer = router.client.post("/v1/completions", json=body)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_engine"
    assert router.complete("abc").status_code == 200


@pytest.mark.parametrize(
    "event, status, num_calls",
    [
        (b'data: {"error": {"message": "too long", "code": 400}}\n\n', 400, 1),
        (b'data: {"error": {"message": "no such model", "code": 404}}\n\n', 404, 1),
        (b'data: {"error": {"message": "it broke", "code": 500}}\n\n', 502, 3),
        (b'data: {"error": {"message": "wrong key", "code": 401}}\n\n', 502, 3),
        (b'data: {"error": {"message": "it broke"}}\n\n', 502, 3),
        (b'data: {"error": "it bro', 502, 3),
        (b'data: {"error": {"code": "\xff"}}\n\n', 502, 3),
    ],
)
def test_an_error_as_the_first_event_of_a_stream(cluster, event, status, num_calls):
    router, engines = cluster({"both": "both"})
    engines["both"].first_event = event
    answer = router.complete("abc", stream=True)
    assert answer.status_code == status and len(engines["both"].calls) == num_calls
    if status < 500:
        assert answer.json() == json.loads(event.removeprefix(b"data: "))
        assert "prefill=both" in answer.headers["x-mooncake-decision"]


def refused_with(*numbers: int) -> Exception:
    """As httpx raises it: the system's errors, one for each address, are its cause's cause."""
    error = httpx.ConnectError("All connection attempts failed")
    error.__cause__ = middle = OSError("All connection attempts failed")
    for number in numbers:
        middle.__context__ = one = OSError(number, os.strerror(number))
        middle = one
    return error


@pytest.mark.parametrize(
    "error, is_gone, is_ours",
    [
        (refused_with(errno.ECONNREFUSED), True, False),
        (refused_with(errno.EHOSTUNREACH), True, False),
        (refused_with(errno.EADDRNOTAVAIL, errno.ECONNREFUSED), True, False),  # without IPv6
        (refused_with(errno.EMFILE), False, True),
        (refused_with(errno.ECONNREFUSED, errno.EMFILE), False, True),
        (refused_with(), False, False),  # there is no such name now
        (httpx.ConnectTimeout("late"), True, False),
        (httpx.ReadTimeout("late"), False, False),
        (httpx.ReadError("broken"), False, False),
    ],
)
def test_which_errors_mean_that_an_engine_is_gone(error, is_gone, is_ours):
    failed = EngineFailed(INSTANCE, "what", error)
    assert (failed.is_gone, failed.is_ours) == (is_gone, is_ours)


def test_a_router_out_of_file_descriptors_blames_no_engine(cluster):
    _, engines = cluster({"both": "both"})
    entry = {"name": "both", "role": "both", "url": engines["both"].url}
    config = parse_config({"instance": [entry]})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def look() -> EngineFailed:
        made = Engines(config)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            with pytest.raises(EngineFailed) as failed:
                await made.check_health(config.instances[0])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await made.close()
        return failed.value

    failed = asyncio.run(look())
    assert failed.is_ours and not failed.is_gone


def test_looks_that_fail_for_the_routers_own_sake_mark_nothing_down(cluster, monkeypatch):
    router, _ = cluster({"both": "both"})
    looked = threading.Semaphore(0)

    async def no_files(instance: InstanceConfig, timeout_s: float) -> None:
        looked.release()
        raise EngineFailed(instance, "it was not reached", refused_with(errno.EMFILE))

    monkeypatch.setattr(router.router.engines, "check_health", no_files)
    for _ in range(5):
        assert looked.acquire(timeout=30)
    assert router.instance("both")["up"]


@pytest.mark.parametrize("asked", ["check_health", "models", "load"])
def test_an_engine_is_looked_at_again_whatever_failed(cluster, monkeypatch, asked):
    router, engines = cluster({"both": "both"})
    with monkeypatch.context() as patch:
        patch.setattr(router.router.engines, asked, None)
        engines["both"].server.kill()
        eventually(lambda: not router.instance("both")["up"])
        engines["both"].restart()
        before = router.router.health._seen[0].looks
        eventually(lambda: router.router.health._seen[0].looks >= before + 2)
        assert not router.instance("both")["up"]
    eventually(lambda: router.instance("both")["up"])
    assert router.complete("abc").status_code == 200


@pytest.mark.parametrize("content", [b'{"data": [{"id": "\xff"}]}', b"[" * 100_000])
def test_models_that_are_no_json_are_a_failed_look(content):
    async def models() -> None:
        engines = Engines(parse_config({}))
        await engines.close()
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=content))
        engines._client = httpx.AsyncClient(transport=transport)
        try:
            await engines.models(INSTANCE)
        finally:
            await engines.close()

    with pytest.raises(EngineFailed, match="/v1/models: it answered"):
        asyncio.run(models())


def test_a_long_name_of_a_model_is_kept_in_part(start):
    entry = {"name": "both", "role": "both", "url": "http://127.0.0.1:1"}
    router = start(RouterServer, {"instance": [entry], "health_s": 1000})
    body = {"model": "m" * 10_000, "prompt": "abc"}
    assert router.client.post("/v1/completions", json=body).status_code == 503
    assert router.last()["model"] == "m" * 80


@pytest.mark.parametrize(("num_engines", "interval_s"), [(1, 2.0), (200, 2.0), (1000, 10.0)])
def test_many_engines_are_looked_at_less_often(monkeypatch, num_engines, interval_s):
    class Ended(Exception):
        pass

    waits, looks = [], []

    async def sleep(seconds):
        waits.append(seconds)

    async def look(*of):
        looks.append(of)
        if len(looks) == 3:
            raise Ended

    monkeypatch.setattr(health.asyncio, "sleep", sleep)
    watch = HealthWatch.__new__(HealthWatch)
    watch._config = parse_config({"instance": [{"name": "a", "role": "both", "url": "http://a"}]})
    watch._seen = dict.fromkeys(range(num_engines))
    watch._look = look
    with pytest.raises(Ended):
        asyncio.run(watch._watch(7, None))
    assert looks == [(7, None)] * 3
    assert interval_s <= waits[0] <= 2 * interval_s and waits[1:] == [interval_s] * 2
