"""The admin server over real sockets: every route, what it refuses, and authorization."""

import asyncio
import socket
import threading
from functools import partial

import httpx
import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_serving.store import SsdTier, Store, TieredStore
from mooncake_serving.store.admin import AdminServer, Draining, NodeCluster, make_app
from mooncake_serving.store.admin import server as server_module
from mooncake_serving.store.directory import Member
from mooncake_serving.store.keyspace import key_text

from ..support import WAIT_S

UNIT = 4096
ABSENT = "0x" + "0" * 32


class MadeUpCluster:
    """What a cluster tells; the routes do no more than pass it on."""

    def __init__(self):
        self.drained: list[str] = []
        self.leaves_disk: list[bool] = []
        self.withdrawn: list[tuple[int, int]] = []
        self.error: Exception | None = None

    def members(self):
        if self.error is not None:
            raise self.error
        return [
            Member("near:1", "near", "pool-1", 100, 40),
            Member("far:1", "far", "pool-2", 200, 50, True),
            Member("far:2", "far", "pool-2", 200, 50),
            Member("reader", "far"),
        ]

    def own_name(self):
        return "near:1"

    def own_pool(self):
        return "pool-1"

    def withdraw(self, key):
        self.withdrawn.append(key)

    def drain(self, name, *, leave_disk=False):
        if name == "reader":
            raise NotImplementedError("reader has no pool")
        self.drained.append(name)
        self.leaves_disk.append(leave_disk)

    def cancel_drain(self, name):
        if name == "reader":
            raise NotImplementedError("reader has left")
        self.drained.remove(name)

    def draining(self):
        return Draining("failed", 5, 3, 1, "a reason", False, 2, 4)


@pytest.fixture
def store(pool):
    return Store(pool, namespace="a", evict_ratio=0)


@pytest.fixture
def client(store):
    with (
        AdminServer(store, needs_token=False) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as client,
    ):
        yield client


@pytest.fixture
def cluster():
    return MadeUpCluster()


@pytest.fixture
def of_cluster(store, cluster):
    with AdminServer(store, cluster=cluster, needs_token=False) as server:
        with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
            yield client


def refused(answer, status: int, argument: str | None, *words: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["argument"] == argument
    assert all(word in error["message"] for word in words), error


def test_health_and_metrics(client, store, pool):
    assert client.get("/health").json() == {"status": "ok", "pool": pool.path}
    store.put("x", b"abc")
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert f'mooncake_kernels_store_objects{{pool="{pool.path}"}} 1.0' in answer.text


def test_a_pool_that_does_not_answer_is_reported(client, store, monkeypatch):
    def stats():
        raise TimeoutError("a stopped process holds the pool")

    monkeypatch.setattr(store, "stats", stats)
    refused(client.get("/health"), 503, None, "a stopped process holds the pool")
    monkeypatch.setattr(store, "stats", lambda: 1 / 0)
    refused(client.get("/health"), 500, None, "ZeroDivisionError")


def test_objects_are_paged(client, store, pool):
    store.put_each(range(10), [bytes(size) for size in range(10)])
    store.put(10, b"x", retention="hard")
    expected = sorted(map(tuple, pool.objects().keys.tolist()))
    listed, after = [], {}
    while after is not None:
        page = client.get("/objects", params={"limit": 4, **after}).json()
        listed += page["objects"]
        after = page["next"] and {"after": page["next"]}
    assert [entry["key"] for entry in listed] == [key_text(key) for key in expected]
    assert [entry["num_bytes"] for entry in listed] == [*range(10), 1]
    assert [entry["retention"] for entry in listed] == ["normal"] * 10 + ["hard"]
    page = client.get("/objects", params={"prefix": "0x000000000000000a"}).json()
    assert [entry["num_bytes"] for entry in page["objects"]] == [1] and page["next"] is None
    assert client.get("/objects", params={"prefix": "ff"}).json() == {"objects": [], "next": None}


@pytest.mark.parametrize(
    ("query", "argument"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 10_001}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"prefix": "xyz"}, "prefix"),
        ({"prefix": "0" * 33}, "prefix"),
        ({"after": "12"}, "after"),
    ],
)
def test_invalid_page_parameters_are_rejected(client, query, argument):
    value = str(next(iter(query.values())))[:20]
    refused(client.get("/objects", params=query), 400, argument, argument, value)


def test_get_and_delete_one_object(client, store, pool):
    store.put(7, b"abc", retention="soft")
    recency = int(pool.objects().recency[0])
    key = key_text(pool.objects().keys[0])
    found = {"key": key, "num_bytes": 3, "retention": "soft", "recency": recency}
    assert client.get(f"/objects/{key}").json() == found
    assert client.get(f"/objects/{key[2:]}").json() == found, "0x may be left out"
    head = client.head(f"/objects/{key}")
    assert head.status_code == 200 and head.content == b""
    assert int(pool.objects().recency[0]) == recency, "looking is no use"
    assert client.delete(f"/objects/{key}").status_code == 204 and not store.exists(7)
    for method in ("GET", "DELETE"):
        refused(client.request(method, f"/objects/{key}"), 404, None, key)
        refused(client.request(method, "/objects/zz"), 400, "key", "zz")
    assert client.head(f"/objects/{ABSENT}").status_code == 404


def test_pools(client, store):
    store.put(1, bytes(10 * UNIT))
    [entry] = client.get("/pools").json()
    stats = store.stats()
    assert (entry["pool"], entry["host"]) == (store.pool.path, None)
    assert entry["capacity_bytes"] == 64 * UNIT and entry["free_bytes"] == 54 * UNIT
    assert entry["fragmentation"] == stats.fragmentation and entry["num_objects"] == 1


def test_objects_on_disk_are_listed_and_removed(pool, tmp_path):
    tier = SsdTier(tmp_path / "tier", 1 << 20, bucket_bytes=1 << 18)
    with (
        TieredStore(pool, tier, min_uses=1, evict_ratio=0) as store,
        AdminServer(store, needs_token=False) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as client,
    ):
        assert store.put("a", b"abc") is store.put("b", b"de")
        assert client.post("/evict", json={"num_bytes": 1}).status_code == 200
        assert store.flush() and store.get("a") == b"abc"
        [entry] = client.get("/pools").json()
        assert entry["ssd"] == {
            "path": str(tmp_path / "tier"),
            "capacity_bytes": 1 << 20,
            "live_bytes": 3,
            "num_objects": 1,
            "num_queued": 0,
            "is_writable": True,
            "error": "",
        }
        for name in "ab":  # in both, and in memory alone
            url = f"/objects/{key_text(store.keyspace.key(name))}"
            assert client.delete(url).status_code == 204
            assert store.get(name) is None and not store.exists(name)
            assert client.delete(url).status_code == 404


def test_evict(client, store):
    store.put_each(range(10), [bytes(UNIT)] * 10)
    answer = client.post("/evict", json={"num_bytes": 3 * UNIT}).json()
    assert answer == {"num_objects": 3, "num_bytes": 3 * UNIT}
    assert store.exists_each(range(10)).tolist() == [True] * 7 + [False] * 3
    for body in (
        {},
        {"num_bytes": 0},
        {"num_bytes": 2**63},
        {"num_bytes": "1"},
        {"num_bytes": 1.5},
    ):
        refused(client.post("/evict", json=body), 400, "num_bytes")
    refused(client.post("/evict", json={"num_bytes": 1, "now": True}), 400, "now")
    refused(client.post("/evict", content=b"{", headers={"content-type": "text/json"}), 400, "body")
    json = {"content-type": "application/json"}
    refused(client.post("/evict", content=b"{", headers=json), 400, "body")
    assert store.exists_each(range(10)).sum() == 7


def test_single_host_store_has_no_members(client):
    refused(client.get("/members"), 501, None, "no directory")
    refused(client.post("/drain", json={"node": "x"}), 501, None, "no directory")
    refused(client.get("/drain"), 501, None, "no directory")
    refused(client.delete("/drain?node=x"), 501, None, "no directory")


def test_members_and_pools_of_a_cluster(of_cluster, pool):
    members = of_cluster.get("/members").json()
    assert [one["name"] for one in members] == ["near:1", "far:1", "far:2", "reader"]
    assert [one["is_draining"] for one in members] == [False, True, False, False]
    pools = of_cluster.get("/pools").json()
    assert [(one["pool"], one["host"]) for one in pools] == [(pool.path, None), ("pool-2", "far")]
    assert (pools[1]["capacity_bytes"], pools[1]["free_bytes"]) == (200, 50)
    assert pools[1]["fragmentation"] is None


def test_removals_are_reported(of_cluster, cluster, pool):
    pool.put_from((1, 2), b"x")
    assert of_cluster.delete(f"/objects/{key_text((1, 2))}").status_code == 204
    assert of_cluster.delete(f"/objects/{key_text((1, 2))}").status_code == 404
    assert cluster.withdrawn == [(1, 2)]


def test_drain(of_cluster, cluster):
    assert of_cluster.post("/drain", json={"node": "far:2"}).status_code == 202
    assert cluster.drained == ["far:2"]
    refused(of_cluster.post("/drain", json={"node": "nobody"}), 404, None, "nobody")
    refused(of_cluster.post("/drain", json={"node": ""}), 400, "node")
    refused(of_cluster.post("/drain", json={"node": "reader"}), 501, None, "reader has no pool")
    progress = {"state": "failed", "num_moved": 5, "num_left": 3, "num_failed": 1}
    told = {"error": "a reason", "is_accepting": False, "num_on_disk": 2, "num_gone": 4}
    assert of_cluster.get("/drain").json() == {**progress, **told}
    cluster.error = Unavailable("the directory does not answer")
    refused(of_cluster.post("/drain", json={"node": "far:2"}), 503, None, "does not answer")
    assert cluster.drained == ["far:2"]
    for drain in (
        lambda: of_cluster.post("/drain", json={"node": "near:1"}),
        lambda: of_cluster.delete("/drain?node=near:1"),
    ):
        assert drain().status_code == 202, "itself it knows without the directory"
    cluster.error = None
    refused(of_cluster.delete("/drain"), 400, "node")
    refused(of_cluster.delete("/drain?node=reader"), 501, None, "reader has left")
    refused(of_cluster.delete("/drain?node=nobody"), 404, None, "nobody")
    assert of_cluster.delete("/drain?node=far:2").status_code == 202
    wish = {"node": "far:2", "leave_disk": True}
    assert of_cluster.post("/drain", json=wish).status_code == 202
    assert cluster.leaves_disk == [False, False, True]
    refused(of_cluster.post("/drain", json={**wish, "leave_disk": 1}), 400, "leave_disk")
    assert of_cluster.delete("/drain?node=far:2").status_code == 202
    assert cluster.drained == []


def test_unknown_paths_and_methods_are_rejected(client):
    refused(client.get("/nothing"), 404, None)
    refused(client.put("/health"), 405, None)


def test_openapi_describes_all(client):
    described = client.get("/openapi.json").json()
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404
    assert sorted(described["paths"]) == [
        "/drain", "/evict", "/health", "/members", "/metrics", "/objects", "/objects/{key}",
        "/pools",
    ]  # fmt: skip
    for path in described["paths"].values():
        for operation in path.values():
            assert operation["summary"]
            error = operation["responses"]["default"]["content"]["application/json"]["schema"]
            assert error["$ref"].endswith("ErrorAnswer")


def test_requests_need_the_token(store):
    with AdminServer(store, token="s3cret") as server:
        for given in (None, "Bearer", "Bearer s3creT", "Basic s3cret", "Bearer s3cret2"):
            headers = {} if given is None else {"Authorization": given}
            for method, path in (
                ("GET", "/health"),
                ("GET", "/metrics"),
                ("DELETE", f"/objects/{ABSENT}"),
            ):
                answer = httpx.request(method, server.url + path, headers=headers, timeout=WAIT_S)
                refused(answer, 401, None, "Bearer")
                assert answer.headers["www-authenticate"] == "Bearer"
        headers = {"Authorization": "Bearer s3cret"}
        assert httpx.get(f"{server.url}/health", headers=headers, timeout=WAIT_S).status_code == 200
        strange = [(b"Authorization", "Bearer s3crét".encode())]
        answer = httpx.get(f"{server.url}/health", headers=strange, timeout=WAIT_S)
        assert answer.status_code == 401
        described = httpx.get(f"{server.url}/openapi.json", timeout=WAIT_S).json()
        assert described["paths"]["/evict"]["post"]["security"] == [{"HTTPBearer": []}]
        assert httpx.get(f"{server.url}/docs", timeout=WAIT_S).status_code == 200


def test_body_is_not_read_without_the_token(store):
    """Whoever may not ask can neither fill the memory nor learn what is there."""
    app = make_app(store, token="s3cret")
    sent: list[dict] = []

    async def receive():
        raise AssertionError("the body was asked for")

    async def send(message):
        sent.append(message)

    for path in ("/evict", "/nothing"):
        headers = [(b"content-type", b"application/json"), (b"content-length", b"1000000000")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        asyncio.run(app({**scope, "query_string": b"", "http_version": "1.1"}, receive, send))
        assert sent[-2]["status"] == 401 and b"Bearer" in sent[-1]["body"]


def test_server_without_a_token_answers_only_to_local_host_names(client):
    """A page that a browser shows may have made its own name point here."""
    port = client.base_url.port
    for name in ("127.0.0.1", "localhost", f"localhost:{port}", f"[::1]:{port}"):
        assert client.get("/health", headers={"Host": name}).status_code == 200
    for name in ("example.com", f"rebound.example.com:{port}", "127.0.0.1.example.com"):
        refused(client.get("/health", headers={"Host": name}), 421, "Host", "localhost", name)


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "0:0:0:0:0:0:0:1", "LOCALHOST"])
def test_server_answers_at_its_own_address(store, host):
    with AdminServer(store, host=host, needs_token=False) as server:
        assert httpx.get(f"{server.url}/health", timeout=WAIT_S).status_code == 200
        headers = {"Host": server.url.removeprefix("http://")}
        answer = httpx.get(f"{server.url}/health", headers=headers, timeout=WAIT_S)
        assert answer.status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_reachable_server_needs_a_token(store, host):
    for options in ({}, {"needs_token": False}):
        with pytest.raises(InvalidArgument, match="AdminServer: token must be given where others"):
            AdminServer(store, host=host, **options)
    with pytest.raises(InvalidArgument, match="AdminServer: token must be given, or socket, or"):
        AdminServer(store)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token": ""}, "token must be printable ASCII"),
        ({"token": "a\n"}, "token must be printable ASCII"),
        ({"token": "é"}, "token must be printable ASCII"),
        ({"port": -1}, "port must be from 0 to 65535, got -1"),
        ({"port": 65_536}, "port must be from 0 to 65535, got 65536"),
        ({"port": "80"}, "port must be from 0 to 65535, got '80'"),
        ({"port": True}, "port must be from 0 to 65535, got True"),
        ({"host": 7}, "host must be an address, got 7"),
        ({"token": 7}, "token must be printable ASCII"),
        ({"host": "no host of this name"}, "host must be an address, got 'no host of this name'"),
    ],
)
def test_wrong_arguments(store, options, message):
    with pytest.raises(InvalidArgument, match=message):
        AdminServer(store, needs_token=False, **options)


@pytest.mark.parametrize("make", [partial(AdminServer, token="t"), make_app])
def test_invalid_store_or_cluster_is_rejected(make, store):
    with pytest.raises(InvalidArgument, match="^make_app: store must be a Store, got 5$"):
        make(5)
    with pytest.raises(InvalidArgument, match="cluster must be a Cluster or None, got 5$"):
        make(store, cluster=5)
    with pytest.raises(InvalidArgument, match="^NodeCluster: node must be a Node, got 5$"):
        NodeCluster(5)
    with pytest.raises(InvalidArgument, match="^make_app: host must be a str, got 5$"):
        make_app(store, host=5)


def test_token_is_not_shown_in_errors(store):
    with pytest.raises(InvalidArgument) as caught:
        make_app(store, token="hidden\0")
    assert "hidden" not in str(caught.value)


def test_close_frees_the_port_and_thread(store):
    server = AdminServer(store, host="localhost", needs_token=False)
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(OSError, match="ddress already in use"):
        AdminServer(store, host="localhost", port=port, needs_token=False)
    assert httpx.get(f"{server.url}/health", timeout=WAIT_S).status_code == 200
    server.close()
    server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", timeout=WAIT_S)
    assert not [one for one in threading.enumerate() if one.name == "store-admin"]
    AdminServer(store, host="localhost", port=port, needs_token=False).close()


@pytest.mark.parametrize("header", ["Content-Length: 20", "Transfer-Encoding: chunked"])
def test_close_ends_requests_awaiting_a_body(store, monkeypatch, header):
    monkeypatch.setattr(server_module, "CLOSE_S", 10 * WAIT_S)
    server = AdminServer(store, needs_token=False)
    head = f"POST /evict HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n"
    half = "1\r\n{\r\n" if "chunked" in header else "{"
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with socket.create_connection(address, WAIT_S) as connection:
        connection.sendall((head + half).encode())
        assert httpx.get(f"{server.url}/health", timeout=WAIT_S).status_code == 200
        closing = threading.Thread(target=server.close)
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 503") and b"stops before the body is there" in answer


def test_requests_during_puts_and_evictions(client, store):
    done = threading.Event()

    def change():
        while not done.is_set():
            store.put_each(range(20), [bytes(UNIT)] * 20)
            store.evict(5 * UNIT)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(20):
            page = client.get("/objects").json()["objects"]
            hashes = [int(entry["key"][:18], 16) for entry in page]
            assert hashes == sorted(set(hashes)) and set(hashes) <= set(range(20))
            assert client.get("/pools").json()[0]["free_bytes"] % UNIT == 0
    finally:
        done.set()
        thread.join()
    assert np.all([store.remove(key) or not store.exists(key) for key in range(20)])
