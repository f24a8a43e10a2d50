"""The HTTP server that ``setup`` starts on request: over real sockets."""

import contextlib
import gc
import json
import logging
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from mooncake_kernels import config
from mooncake_serving.compat.mooncake.store import INVALID_PARAMS, MooncakeDistributedStore

from ..metadata.support import RedisServer, free_port
from .store_support import CAPACITY, LOG, pool_file, reasons, set_up

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")


def get(port: int, path: str, method: str = "GET", token: str = "") -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"http://127.0.0.1:{port}{path}"
    request = urllib.request.Request(url, headers=headers, method=method)
    with contextlib.closing(urllib.request.urlopen(request, timeout=10)) as answer:
        return answer.read().decode()


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_health_and_metrics_of_the_pool(tmp_path, caplog, monkeypatch, is_on_disk):
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(64 << 20))
    monkeypatch.setenv("MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES", str(16 << 20))
    port = free_port()
    options = {"enable_ssd_offload": is_on_disk, "ssd_offload_path": str(tmp_path)}
    with pool_file() as path:
        store = set_up(path, enable_client_http_server=True, client_http_port=port, **options)
        assert store.put("a", b"1234") == 0
        assert json.loads(get(port, "/health")) == {"status": "ok", "pool": path}
        metrics = get(port, "/metrics")
        assert f'mooncake_kernels_store_objects{{pool="{path}"}} 1.0' in metrics
        assert store.close() == 0
        assert not is_listening(port) and not warnings(caplog)
        again = set_up(path, enable_client_http_server=True, client_http_port=port)
        assert get(port, "/metrics") and again.get("a") == b"1234"
        del again
        gc.collect()
        assert not is_listening(port)


def test_only_health_and_metrics_need_no_token():
    port = free_port()
    with pool_file() as path:
        store = set_up(path, enable_client_http_server=True, client_http_port=port)
        assert store.put("a", b"1234") == 0
        for method, route in (("GET", "/objects"), ("POST", "/evict"), ("GET", "/pools")):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                get(port, route, method)
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics")
        request.add_header("Host", "rebound.example")
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(request, timeout=10)
        assert get(port, "/metrics") and store.get("a") == b"1234"
        assert store.close() == 0


def test_nothing_listens_by_default():
    port = free_port()
    with pool_file() as path:
        store = set_up(path, client_http_port=port)
        assert not is_listening(port)
        assert store.close() == 0


def test_chosen_port_is_logged(caplog):
    caplog.set_level(logging.INFO, LOG)
    with pool_file() as path:
        store = set_up(path, enable_client_http_server=True, client_http_port=0)
        [port] = re.findall(r"HTTP at http://127\.0\.0\.1:(\d+)", caplog.text)
        assert get(int(port), "/health")
        assert store.close() == 0


def test_a_port_in_use_is_a_warning(caplog):
    """The ranks of an engine all ask for the same port: the first has it."""
    port = free_port()
    with pool_file() as path:
        first = set_up(path, enable_client_http_server=True, client_http_port=port)
        second = set_up(path, enable_client_http_server=True, client_http_port=port)
        [warning] = warnings(caplog)
        assert f"there is no HTTP server on port {port}: " in warning and "in use" in warning
        assert second.put("a", b"1") == 0 and second.close() == 0
        assert get(port, "/health") and first.close() == 0


def test_a_missing_package_is_a_warning(monkeypatch, caplog):
    needs_it = ("mooncake_serving.store.admin", "mooncake_kernels.http_server")
    for name in [name for name in sys.modules if name.startswith(needs_it)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pool_file() as path:
        store = set_up(path, enable_client_http_server=True, client_http_port=free_port())
        [warning] = warnings(caplog)
        assert "there is no HTTP server" in warning and "uvicorn" in warning
        assert store.put("a", b"1") == 0 and store.close() == 0


@pytest.mark.parametrize("port", [-1, 65536, "9300x", True])
def test_invalid_ports(caplog, port):
    store = MooncakeDistributedStore()
    with pool_file() as path:
        arguments = ("127.0.0.1", "P2PHANDSHAKE", CAPACITY, 0, "tcp", "", path)
        options = {"enable_client_http_server": True, "client_http_port": port}
        assert store.setup(*arguments, **options) == INVALID_PARAMS
        reasons(caplog, "client_http_port must be")
        assert store.health_check() == 1


def test_process_exits_cleanly_without_close():
    script = """
import sys
from mooncake_serving.compat.mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
arguments = ("127.0.0.1", "P2PHANDSHAKE", 1 << 20, 0, "tcp", "", sys.argv[1])
code = store.setup(*arguments, enable_client_http_server=True, client_http_port=0)
"""
    with pool_file() as path:
        command = [sys.executable, "-c", script + "sys.exit(code)", path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_http_server_of_a_cluster_store(tmp_path, caplog):
    pytest.importorskip("redis")
    pytest.importorskip("msgspec")
    port, server = free_port(), RedisServer(tmp_path)
    settings = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": CAPACITY,
        "master_server_addr": server.url,
        "enable_client_http_server": "true",
        "client_http_port": str(port),
    }
    store, without = MooncakeDistributedStore(), MooncakeDistributedStore()
    try:
        with config.override(admin_token="s3cret"):
            assert store.setup(settings) == 0
        assert store.put("a", b"1") == 0
        assert "mooncake_kernels_store_objects" in get(port, "/metrics")
        [member] = json.loads(get(port, "/members", token="s3cret"))
        assert member["name"] == store.get_hostname()
        [entry] = json.loads(get(port, "/objects", token="s3cret"))["objects"]
        assert get(port, f"/objects/{entry['key']}", "DELETE", "s3cret") is not None
        assert store.is_exist("a") == 0 and store.put("a", b"2") == 0 and store.get("a") == b"2"
        assert without.setup(settings | {"global_segment_size": 0}) == 0
        assert ["no pool of its own" in warning for warning in warnings(caplog)] == [True]
        assert without.get("a") == b"2"
    finally:
        assert without.close() == 0 and store.close() == 0
        server.stop()
    assert not is_listening(port)
