"""Engines that come, change their role and leave while requests run."""

import contextlib
import functools
import json
import threading
from types import SimpleNamespace

import httpx
import msgspec
import pytest

from mooncake_serving.router import registration
from mooncake_serving.store.events import AllBlocksCleared
from tests.serving.router.sglang import Rooms, SglangEngine
from tests.serving.router.support import (
    BLOCK,
    COUPLED,
    MODEL,
    WAIT_S,
    Engine,
    RouterServer,
    stored,
)
from tests.serving.router.test_placing import prefill_of
from tests.waiting import eventually

BOTH = {"both-0": "both"}
PAIRS = {"p": "prefill", "d0": "decode", "d1": "decode"}


ADMIN = {"Authorization": "Bearer of-admin"}


@pytest.fixture
def admin(tmp_path) -> dict[str, str]:
    """The entry of a router where engines may register."""
    (tmp_path / "admin").write_text("of-admin\n")
    return {"admin_keys_file": str(tmp_path / "admin")}


@pytest.fixture
def cluster(cluster, admin):
    return functools.partial(cluster, **admin)


def register(router, **body):
    return router.client.post("/register", json=body, headers=ADMIN)


def unregister(router, **body):
    return router.client.post("/unregister", json=body, headers=ADMIN)


def names(router) -> list[str]:
    return [instance["name"] for instance in router.get("/instances")["instances"]]


@contextlib.contextmanager
def another_client(router):
    """For calls while the router's own client reads a stream, or of which it would be closed."""
    with httpx.Client(base_url=router.server.url, timeout=WAIT_S) as client:
        yield SimpleNamespace(client=client)


def in_thread(call):
    """Run a call in a thread; returns what it answers when asked."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()

    def answered():
        thread.join()
        return answers[0]

    return answered


def test_a_router_may_start_without_engines(start, admin):
    router = start(RouterServer, {"health_s": 0.05, **admin})
    assert router.client.get("/health").status_code == 503
    assert router.complete("abc").json()["error"]["code"] == "no_engine"
    engine = start(Engine)
    answer = register(router, name="new", role="both", url=engine.url)
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "registered successfully", "instance_id": "new", "up": True
    }  # fmt: skip
    assert prefill_of(router.complete("abc")) == "new"
    assert router.instance("new")["capacity_tokens"] == 16_000
    again = register(router, name="new", role="both", url=engine.url)
    assert again.json() == answer.json() and names(router) == ["new"]


def busy(router, engines) -> tuple[str, str]:
    """Which engine has got a request, and which has not, while both answer nothing."""
    held = eventually(lambda: next((name for name in engines if engines[name].calls), None))
    return held, next(name for name in engines if name != held)


def test_an_engine_that_leaves_ends_its_requests_first(cluster):
    router, engines = cluster(COUPLED)
    for engine in engines.values():
        engine.gate.clear()
    asking = in_thread(lambda: router.complete([1] * 40))
    leaves, stays = busy(router, engines)
    engines[stays].gate.set()
    leaving = in_thread(lambda: unregister(router, name=leaves))
    eventually(lambda: router.instance(leaves)["draining"])
    for prompt in ([1] * 40, [2] * 40):
        assert prefill_of(router.complete(prompt)) == stays
    changed = register(router, name=leaves, role="decode")
    assert changed.status_code == 409 and changed.json()["error"]["code"] == "conflict"
    engines[leaves].gate.set()
    assert prefill_of(asking()) == leaves
    left = leaving()
    assert left.status_code == 200
    assert left.json() == {
        "status": "unregistered successfully", "removed_instances": [f"{leaves}|default|0"]
    }  # fmt: skip
    assert names(router) == [stays]
    wrong = unregister(router, name=stays, drian_s=5)
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "drian_s"
    gone = unregister(router, name=leaves)
    assert gone.status_code == 404 and gone.json()["error"]["param"] == "name"
    assert router.complete("abc").status_code == 200


def test_an_engine_that_may_not_take_long_gives_its_requests_up(cluster):
    router, engines = cluster(COUPLED, max_attempts=1)
    for engine in engines.values():
        engine.gate.clear()
    asking = in_thread(lambda: router.complete([1] * 40))
    leaves, stays = busy(router, engines)
    engines[stays].gate.set()
    assert unregister(router, name=leaves, drain_s=0).status_code == 200
    assert prefill_of(asking()) == stays  # it was placed again, as nothing has failed
    assert "attempt=2; " in asking().headers["x-mooncake-decision"]
    eventually(lambda: engines[leaves].num_left == 1)
    assert router.metric("mooncake_router_failed_attempts_total") == 0


def test_the_metrics_of_an_engine_that_has_left_are_gone(cluster):
    router, engines = cluster(COUPLED)
    for engine in engines.values():
        engine.fail_with = 500
    assert router.complete("abc").status_code == 502
    assert router.metric("mooncake_router_failed_attempts_total") == 3
    for name in COUPLED:
        assert unregister(router, name=name).status_code == 200
    assert not [name for name in COUPLED if name in router.client.get("/metrics").text]


def test_a_client_that_does_not_read_holds_no_engine(cluster):
    router, engines = cluster(BOTH)
    engines["both-0"].padding = 1 << 16
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 1000, "stream": True}
    with router.client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        with another_client(router) as other:
            left = unregister(other, name="both-0", drain_s=0)
            assert left.status_code == 200
            assert other.client.get("/instances").json()["instances"] == []


def test_a_stream_that_is_given_up_ends_with_an_error(cluster):
    router, engines = cluster(BOTH)
    engines["both-0"].stall_after = 2
    body = {"model": MODEL, "prompt": "abc", "stream": True}
    with router.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        with another_client(router) as other:
            left = unregister(other, name="both-0", drain_s=0)
        assert left.status_code == 200
        rest = [line for line in lines if line]
    assert json.loads(rest[-1][6:])["error"]["code"] == "engine_failed"
    assert names(router) == []
    assert not router.router.placement.conductor.cluster.batch_size.any()


def test_a_request_that_decodes_elsewhere_does_not_hold_its_prefill_engine(cluster):
    router, engines = cluster({"p": "prefill", "d": "decode"})
    engines["d"].stall_after = 2
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 4, "stream": True}
    with router.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        with another_client(router) as other:
            left = unregister(other, name="p")
        assert left.status_code == 200 and names(router) == ["d"]
        assert router.instance("d")["decoding"] == 1
    eventually(lambda: router.instance("d")["decoding"] == 0)


def test_a_place_is_used_again(cluster, start):
    router, engines = cluster(BOTH, max_instances=2, events=True)
    tokens = list(range(2 * BLOCK))
    engines["both-0"].events.send(stored(tokens))
    eventually(lambda: router.instance("both-0")["held_blocks"] == 2)
    for index in range(4):
        engine = start(Engine)
        assert register(router, name=f"e{index}", role="both", url=engine.url).json()["up"]
        full = register(router, name="more", role="both", url="http://127.0.0.1:1")
        assert (
            full.status_code == 409
            and "at most max_instances, 2" in full.json()["error"]["message"]
        )
        assert router.instance(f"e{index}")["held_blocks"] == 0
        for prompt in range(4):
            assert router.complete([index, prompt] * BLOCK).status_code == 200
        assert unregister(router, name=f"e{index}").status_code == 200
    assert names(router) == ["both-0"]
    matched = router.client.post("/query", json={"token_ids": tokens}).json()["data"]
    assert matched == {"both-0": {"matched_tokens": 2 * BLOCK}}


def test_engines_come_and_go_under_load(cluster, start):
    router, _ = cluster(BOTH)
    spare = [start(Engine) for _ in range(3)]
    stop, statuses = threading.Event(), []

    def ask(seed: int) -> None:
        count = 0
        while not stop.is_set():
            count += 1
            statuses.append(router.complete([seed, count] * 20, stream=count % 2 == 0).status_code)

    asking = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for one in asking:
        one.start()
    for index in range(9):
        name, engine = f"e{index}", spare[index % 3]
        assert register(router, name=name, role="both", url=engine.url).status_code == 200
        before = len(engine.calls)
        eventually(lambda engine=engine, before=before: len(engine.calls) > before)
        assert unregister(router, name=name).status_code == 200
    stop.set()
    for one in asking:
        one.join()
    assert set(statuses) == {200}
    state = router.router.placement.conductor.cluster
    eventually(lambda: not state.batch_size.any() and not state.reserved_tokens.any())
    assert not router.router.placement.others._own.any()


def test_the_conductors_entries_are_understood(cluster):
    """As Mooncake's documentation has them; its Conductor speaks MessagePack."""
    router, engines = cluster(BOTH)
    new = {"name": "both-1", "role": "both", "url": "http://127.0.0.1:1"}
    events = engines["both-0"].events
    publisher = {
        "endpoint": events.endpoint, "replay_endpoint": events.replay, "type": "vLLM",
        "modelname": MODEL, "lora_name": "", "tenant_id": "default", "block_size": 2 * BLOCK,
        "dp_rank": 0, "cache_group": 0,
        "hash_profile": {
            "strategy": "vllm_v1", "algorithm": "sha256_cbor", "python_hash_seed": "0",
            "index_projection": "low64_be",
        },
    }  # fmt: skip
    answer = router.client.post(
        "/register",
        content=msgspec.msgpack.encode({"instance_id": "both-0", **publisher}),
        headers={"content-type": "application/msgpack", **ADMIN},
    )
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/msgpack"
    assert msgspec.msgpack.decode(answer.content) == {
        "status": "registered successfully", "instance_id": "both-0", "up": True
    }  # fmt: skip

    def has_come() -> bool:
        events.send(AllBlocksCleared())  # what is sent before the router has subscribed is lost
        return router.instance("both-0")["event_batches"] > 0

    eventually(has_come)
    answer = register(router, **new, replay_endpoint=events.replay)
    assert "replay must be given only with events" in answer.json()["error"]["message"]
    assert register(router, **new, dp_rank=0).json()["up"] is False
    answer = unregister(router, instance_id="both-1", tenant_id="default", dp_rank=0)
    assert answer.json()["removed_instances"] == ["both-1|default|0"]


@pytest.mark.parametrize(
    "body, status, message",
    [
        ({}, 400, "name must be a text, got None"),
        ({"name": "new"}, 400, "role must be one of prefill, decode, both, got None"),
        ({"name": "n", "role": "both"}, 400, "url must be a text, got None"),
        ({"name": "n", "role": "both", "url": "here"}, 400, "url must be a URL"),
        ({"name": "n;", "role": "both", "url": "http://h:1"}, 400, "name must be printable ASCII"),
        ({"name": "n", "role": "both", "url": "http://h:1", "rule": 1}, 400, "rule must not be"),
        ({"name": "n", "role": "both", "url": "http://h:1", "bootstrap": "http://h:2"}, 400,
         "instance.bootstrap must be given"),
        ({"name": "n", "type": "Mooncake"}, 400, "type must be 'vLLM' or 'SGLang'"),
        ({"name": "n", "dp_rank": 1}, 400, "dp_rank must be 0 here, got 1"),
        ({"name": "n", "tenant_id": "a"}, 400, "tenant_id must be 'default'"),
        ({"name": "n", "lora_name": "a"}, 400, "lora_name must be"),
        ({"name": "n", "modelname": "other"}, 404, "model must be one of llama"),
        ({"name": "n", "block_size": 24}, 400, "block_size must be a multiple of the router's, 16"),
        ({"name": "n", "drain_s": -1}, 400, "drain_s must be from 0 to 86400 s, got -1"),
        ({"name": "n", "drain_s": True}, 400, "drain_s must be from"),
        ({"name": "n", "role_switch": {}}, 400, "role_switch must be left out of engines that are"),
        ({"name": "n", "instance_id": "m"}, 400, "instance_id must be left out beside name"),
        ({"name": "n", "events": "", "endpoint": ""}, 400, "endpoint must be left out beside"),
        ({"name": "both-0", "url": "http://h:1"}, 409, "url must be 'http://127"),
        ({"name": "both-0", "capacity_tokens": 5}, 409, "capacity_tokens must be 0, unless"),
    ],
)  # fmt: skip
def test_wrong_entries_are_named(cluster, body, status, message):
    router, _ = cluster(BOTH)
    answer = register(router, **body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert names(router) == ["both-0"]
    assert router.complete("abc").status_code == 200


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"name": '])
def test_wrong_bodies(cluster, content):
    router, _ = cluster(BOTH)
    for form in ("application/json; charset=utf-8", "application/msgpack"):
        headers = {"content-type": form, **ADMIN}
        answer = router.client.post("/register", content=content, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("form", ["text/plain", "application/jsonp", ""])
def test_a_body_must_be_of_a_type_that_pages_may_not_send_elsewhere(cluster, form):
    router, _ = cluster(BOTH)
    for path in ("/register", "/unregister"):
        headers = {"content-type": form, **ADMIN}
        answer = router.client.post(path, content=b'{"name": "both-0"}', headers=headers)
        assert answer.status_code == 415
        assert answer.json()["error"]["code"] == "unsupported_media_type"
    assert names(router) == ["both-0"]


def test_what_a_conductor_sends_to_unregister_need_not_be_served(cluster):
    router, _ = cluster(BOTH)
    wrong = unregister(router, name="both-0", role_switch={})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "role_switch"
    left = unregister(router, instance_id="both-0", modelname="other", type="vLLM", dp_rank=0)
    assert left.status_code == 200 and names(router) == []


def test_what_fails_while_it_registers_leaves_nothing(cluster, start, monkeypatch):
    router, _ = cluster(BOTH)
    engine = start(Engine)
    new = {"name": "new", "role": "both", "url": engine.url}
    wrong = register(router, **new, events="tcp://-:5")
    assert wrong.status_code == 400 and "endpoint must be" in wrong.json()["error"]["message"]
    assert names(router) == ["both-0"]
    with monkeypatch.context() as patch, another_client(router) as other:
        patch.setattr(router.router.health, "add", None)
        assert register(other, **new).status_code == 500
    assert names(router) == ["both-0"]
    assert register(router, **new).json()["up"]


def test_events_that_cannot_be_had_are_not_taken(cluster):
    router, engines = cluster(BOTH)
    for wrong in ({"endpoint": "tcp://-:5"}, {"endpoint": "tcp://h:5", "replay": "tcp://-:5"}):
        answer = register(router, name="both-0", **wrong)
        assert answer.status_code == 400 and "must be" in answer.json()["error"]["message"]
    events = engines["both-0"].events
    assert register(router, name="both-0", endpoint=events.endpoint).status_code == 200
    other = register(router, name="both-0", endpoint="tcp://h:5")
    assert other.status_code == 409 and other.json()["error"]["param"] == "events"


def test_two_instances_have_two_urls(cluster):
    router, engines = cluster(BOTH)
    answer = register(router, name="new", role="both", url=engines["both-0"].url)
    assert answer.status_code == 409 and "that of both-0" in answer.json()["error"]["message"]


def test_who_registers_needs_a_key_of_its_own(cluster, start, tmp_path):
    (tmp_path / "keys").write_text("of-client\n")
    keys = {"api_keys_file": str(tmp_path / "keys")}
    client = {"Authorization": "Bearer of-client"}
    for of_clients in (keys, {}):
        closed = start(RouterServer, of_clients)
        for path in ("/register", "/unregister"):
            answer = closed.client.post(path, json={}, headers=client)
            assert answer.status_code == 403
            assert "no admin_keys_file" in answer.json()["error"]["message"]
    for of_clients in (keys, {}):
        router, _ = cluster(BOTH, **of_clients)
        for path in ("/register", "/unregister"):
            for headers in ({}, client):
                assert router.client.post(path, json={}, headers=headers).status_code == 401
        router.client.headers["Authorization"] = "Bearer of-admin"
        assert unregister(router, name="nobody").status_code == 404
        assert router.complete("abc").status_code == 200


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "sglang"])
def test_an_engine_that_decoded_prefills(cluster, connector):
    router, engines = cluster(PAIRS, connector=connector)
    decoders = {name: engines[name] for name in ("d0", "d1")}
    for engine in decoders.values():
        engine.gate.clear()
    asking = in_thread(lambda: router.complete("abc"))
    changes, stays = busy(router, decoders)
    engine, more = engines[changes], {}
    if connector != "nixl":
        more = {"bootstrap": engine.url}
    if connector == "sglang":
        more["role_switch"] = {"decode_cuda_graph_bs": [1]}
    else:
        engine.is_prefill = True  # vLLM's do both
    changing = in_thread(lambda: register(router, name=changes, role="prefill", **more))
    eventually(lambda: router.instance(changes)["draining"])
    assert router.instance(changes)["role"] == "decode"
    engines[stays].gate.set()
    assert f"decode={stays}" in router.complete("abd").headers["x-mooncake-decision"]
    engine.gate.set()
    assert f"decode={changes}" in asking().headers["x-mooncake-decision"]
    assert changing().status_code == 200
    assert router.instance(changes)["role"] == "prefill"
    engine.needs_params = False
    if connector == "sglang":
        assert engine.switched == [{"decode_cuda_graph_bs": [1], "new_role": "prefill"}]
    engines["p"].server.kill()
    for prompt in range(4):
        answer = router.complete([prompt] * 40)
        assert answer.status_code == 200 and prefill_of(answer) == changes
    assert register(router, name=changes, role="decode").status_code == 200
    assert router.instance(changes)["role"] == "decode"


@pytest.mark.parametrize("is_same", [True, False])
def test_an_sglang_engine_that_does_not_change(cluster, is_same):
    router, engines = cluster(PAIRS, connector="sglang")
    told = {"success": False, "message": "there is no memory", "safe_to_restore": is_same}
    engines["d0"].refuses_switch = told
    change = {"name": "d0", "role": "prefill", "bootstrap": engines["d0"].url}
    answer = register(router, **change)
    assert answer.status_code == 502 and answer.json()["error"]["code"] == "role_refused"
    assert "d0: there is no memory" in answer.json()["error"]["message"]
    assert router.instance("d0")["role"] == "decode"
    assert router.instance("d0")["draining"] is not is_same
    assert router.complete("abc").status_code == 200
    engines["d0"].refuses_switch = {}
    assert register(router, **change).status_code == 200
    assert router.instance("d0")["draining"] is False


SWITCHED_OFF = [(401, {"error": "Unauthorized"}), (404, {"detail": "Not Found"}), (400, {"m": 1})]


@pytest.mark.parametrize("status, told", [*SWITCHED_OFF, (None, None), (500, {"error": "a bug"})])
def test_an_sglang_engine_that_cannot_change(cluster, status, told):
    router, engines = cluster(PAIRS, connector="sglang", health_s=1000)
    if status is None:
        engines["d0"].server.kill()
    else:
        engines["d0"].refuses_switch, engines["d0"].refuses_with = told, status
    answer = register(router, name="d0", role="prefill", bootstrap="http://h:1")
    assert answer.status_code == 502 and answer.json()["error"]["code"] == "role_refused"
    # Only what may have begun to change serves no more.
    assert router.instance("d0")["draining"] is (status == 500)
    assert router.instance("d0")["role"] == "decode"


def test_an_sglang_engine_that_is_not_idle_yet_is_asked_again(cluster, monkeypatch):
    monkeypatch.setattr(registration, "RETRY_S", 0.01)
    router, engines = cluster(PAIRS, connector="sglang")
    engine = engines["d0"]
    engine.refuses_switch = {
        "success": False, "safe_to_restore": True,
        "message": "instance is not idle; drain all requests before switching",
    }  # fmt: skip
    change = {"name": "d0", "role": "prefill", "bootstrap": engine.url}
    changing = in_thread(lambda: register(router, **change))
    eventually(lambda: len(engine.switched) >= 2)
    assert router.instance("d0")["draining"]
    engine.refuses_switch = {}
    assert changing().status_code == 200 and router.instance("d0")["role"] == "prefill"
    monkeypatch.setattr(registration, "IDLE_S", 0.0)
    engine.refuses_switch = {"success": False, "safe_to_restore": True, "message": "not idle"}
    assert register(router, name="d0", role="decode").status_code == 502
    assert router.instance("d0")["draining"] is False


def test_what_fails_while_a_role_changes_puts_nothing_out_of_service(cluster, monkeypatch):
    router, engines = cluster(PAIRS, connector="sglang")
    change = {"name": "d0", "role": "prefill", "bootstrap": engines["d0"].url}
    packed = msgspec.msgpack.encode({**change, "role_switch": {"a": msgspec.msgpack.Ext(5, b"")}})
    headers = {"content-type": "application/msgpack", **ADMIN}
    answer = router.client.post("/register", content=packed, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "role_switch"
    monkeypatch.setattr(router.router.engines, "switch_role", None)
    with another_client(router) as other:
        assert register(other, **change).status_code == 500
    assert router.instance("d0")["draining"] is False
    wrong = register(router, **change, role_switch=1)
    assert wrong.status_code == 400 and "an object, got 1" in wrong.json()["error"]["message"]


def test_an_engine_whose_bootstrap_server_does_not_answer_keeps_its_role(cluster):
    router, _ = cluster(PAIRS, connector="mooncake")
    answer = register(router, name="d0", role="prefill", bootstrap="http://127.0.0.1:1")
    assert answer.status_code == 502 and answer.json()["error"]["param"] == "bootstrap"
    assert router.instance("d0")["role"] == "decode"
    assert router.instance("d0")["draining"] is False


def test_an_sglang_engine_of_both_roles_keeps_them(start, admin):
    router = start(RouterServer, {"connector": "sglang", "health_s": 0.05, **admin})
    engine = start(SglangEngine, "both", Rooms())
    assert register(router, name="b", role="both", url=engine.url).json()["up"]
    answer = register(router, name="b", role="decode")
    assert (
        answer.status_code == 409 and "as SGLang was started" in answer.json()["error"]["message"]
    )
    assert router.instance("b")["draining"] is False
    assert register(router, name="p", role="prefill", url="http://h:1").status_code == 400
