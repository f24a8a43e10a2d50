"""Routers that share the engines which have registered, by a registry."""

import contextlib
import re
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest

from mooncake_serving.router import shared
from tests.metadata.support import HttpServer, RedisServer, free_port, impatience
from tests.serving.router.sglang import Rooms, SglangEngine
from tests.serving.router.support import WAIT_S, Engine, RouterServer
from tests.serving.router.test_placing import prefill_of
from tests.serving.router.test_registration import in_thread, names, register, unregister
from tests.waiting import eventually


@pytest.fixture(scope="module")
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("registry")
    server = RedisServer(folder) if getattr(request, "param", "redis") == "redis" else HttpServer()
    with impatience():
        yield server
    server.stop()


@pytest.fixture
def registry(server, request):
    """The entries of routers that share engines; every test has its own."""
    return {"url": server.url, "namespace": re.sub(r"\W", ".", request.node.name)}


@pytest.fixture
def router_of(start, registry, tmp_path, monkeypatch):
    """Starts a router that shares its engines with the test's others."""
    monkeypatch.setattr(shared, "LOOK_S", 0.05)
    monkeypatch.setattr(shared, "SEEN_S", 0.2)
    (tmp_path / "admin").write_text("of-admin\n")

    def make(**more):
        content = {"admin_keys_file": str(tmp_path / "admin"), "health_s": 0.05}
        return start(RouterServer, content | {"registry": registry} | more)

    return make


def file_entry(name, engine):
    return {"name": name, "role": "both", "url": engine.url}


@pytest.mark.parametrize("server", ["redis", "http"], indirect=True)
def test_what_one_router_is_told_all_know(router_of, start):
    engines = [start(Engine) for _ in range(2)]
    one = router_of(instance=[file_entry("own", engines[1])])
    two = router_of()
    assert register(one, name="new", role="both", url=engines[0].url).status_code == 200
    eventually(lambda: names(two) == ["new"] and two.instance("new")["up"])
    assert prefill_of(two.complete("abc")) == "new"
    again = router_of()  # as after a restart
    assert names(again) == ["new"] and prefill_of(again.complete("abc")) == "new"
    assert unregister(two, name="new").status_code == 200
    assert names(two) == []
    eventually(lambda: names(one) == ["own"] and names(again) == [])
    assert unregister(two, name="own").status_code == 404


def test_an_engine_is_changed_by_one_router_at_a_time_and_drained_by_all(router_of, start):
    rooms, engines = Rooms(), {}
    one, two = (router_of(connector="sglang") for _ in range(2))
    for name, role in {"p": "prefill", "d0": "decode", "d1": "decode"}.items():
        engines[name] = start(SglangEngine, role, rooms)
        bootstrap = {"bootstrap": engines[name].url} if role == "prefill" else {}
        assert (
            register(one, name=name, role=role, url=engines[name].url, **bootstrap).status_code
            == 200
        )
    eventually(lambda: sorted(names(two)) == ["d0", "d1", "p"])
    eventually(lambda: all(two.instance(name)["up"] for name in engines))
    engines["p"].gate.clear()
    asking = in_thread(lambda: two.complete([1] * 40))
    busy = eventually(lambda: next((n for n in ("d0", "d1") if engines[n].arrived), None))
    free = "d1" if busy == "d0" else "d0"
    role = {"name": busy, "role": "prefill", "bootstrap": engines[busy].url}
    changing = in_thread(lambda: register(one, **role))
    eventually(lambda: two.instance(busy)["draining"])
    other = register(two, name=busy, role="decode")
    assert other.status_code == 409 and other.json()["error"]["code"] == "conflict"
    assert "no other router is changing" in other.json()["error"]["message"]
    assert one.instance(busy)["draining"] and one.instance(busy)["role"] == "decode"
    engines["p"].gate.set()
    assert asking().status_code == 200
    assert changing().status_code == 200
    eventually(lambda: two.instance(busy)["role"] == "prefill")
    eventually(lambda: not two.instance(busy)["draining"])
    decision = two.complete([2] * 40).headers["x-mooncake-decision"]
    assert f"decode={free}" in decision


def test_engines_stay_while_the_registry_is_away(router_of, start, server):
    engine, later = start(Engine), start(Engine)
    one, two = router_of(), router_of()
    assert register(one, name="new", role="both", url=engine.url).status_code == 200
    eventually(lambda: names(two) == ["new"] and two.instance("new")["up"])
    assert two.metric("mooncake_router_registry_up") == 1
    server.stop()
    try:
        eventually(lambda: two.metric("mooncake_router_registry_up") == 0)
        for router in (one, two):
            assert router.complete("abc").status_code == 200
        refused = register(two, name="later", role="both", url=later.url)
        assert refused.status_code == 503
        error = refused.json()["error"]
        assert error["code"] == "registry_away" and "nothing has changed" in error["message"]
        assert names(two) == ["new"]
        alone = router_of(instance=[file_entry("own", later)])
        assert names(alone) == ["own"] and alone.complete("abc").status_code == 200
    finally:
        server.start()  # it has lost what it had
    eventually(lambda: names(alone) == ["own", "new"])
    assert register(two, name="more", role="both", url=later.url).status_code == 200
    eventually(lambda: names(one) == ["new", "more"])


def test_a_change_that_outlives_the_registry_is_told_when_it_is_back(router_of, start, server):
    engine = start(Engine)
    one, two = router_of(), router_of()
    assert register(one, name="new", role="both", url=engine.url).status_code == 200
    eventually(lambda: names(two) == ["new"] and two.instance("new")["up"])
    engine.gate.clear()
    asking = in_thread(lambda: one.complete("abc"))
    eventually(lambda: engine.calls)
    leaving = in_thread(lambda: unregister(one, name="new"))
    eventually(lambda: two.instance("new")["draining"])
    server.stop()
    try:
        engine.gate.set()
        assert asking().status_code == 200
        left = leaving()
        assert left.status_code == 503 and "when it is back" in left.json()["error"]["message"]
        assert names(one) == [] and names(two) == ["new"]
    finally:
        server.start()
    eventually(lambda: names(two) == [])
    assert names(one) == []


def test_a_router_that_is_killed_leaves_its_engines_and_changes_to_others(
    router_of, registry, start, server, tmp_path
):
    engine = start(Engine)
    stays = router_of()
    config = tmp_path / "router.toml"
    port = free_port()
    config.write_text(
        f'port = {port}\nadmin_keys_file = "{tmp_path / "admin"}"\n'
        f'[registry]\nurl = "{registry["url"]}"\nnamespace = "{registry["namespace"]}"\n'
    )
    program = (
        "from mooncake_serving.router import __main__, registry\n"
        f"registry.CLAIM_MS = 1000\n__main__.main(['--config', '{config}'])"
    )
    killed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert killed.stdout.readline().endswith(f":{port} for 0 instances\n")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as client:
            other = SimpleNamespace(client=client)
            added = eventually(lambda: answered(register, other, "both", engine.url))
            assert added.status_code == 200
            eventually(lambda: names(stays) == ["new"] and stays.instance("new")["up"])
            engine.gate.clear()
            asking = in_thread(lambda: stays.complete("abc"))
            eventually(lambda: engine.calls)
            leaving = in_thread(lambda: answered(unregister, other))
            eventually(lambda: stays.instance("new")["draining"])
            assert stays.complete("abc").json()["error"]["code"] == "no_engine"
            killed.kill()
            assert leaving() is None
        eventually(lambda: not stays.instance("new")["draining"])
        engine.gate.set()
        assert asking().status_code == 200 and stays.complete("abc").status_code == 200
        assert unregister(stays, name="new").status_code == 200
    finally:
        killed.kill()
        killed.communicate()


def answered(call, router, role=None, url=None):
    """What a router answers; None: nothing."""
    body = {"role": role, "url": url} if role else {}
    with contextlib.suppress(httpx.TransportError):
        return call(router, name="new", **body)
