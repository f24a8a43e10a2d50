"""The command: as a whole, in processes, and piece by piece."""

import contextlib
import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading

import httpx
import msgspec
import numpy as np
import pytest
import zmq

from mooncake_kernels.pool import ObjectPool, PutResult
from mooncake_serving.compat.mooncake import MooncakeDistributedStore
from mooncake_serving.store import SsdTier, Store
from mooncake_serving.store.cli import main, serve
from mooncake_serving.store.events import AllBlocksCleared, BlockRemoved, subscribe
from mooncake_serving.store.keyspace import key_text

from ..support import WAIT_S, child, ended_well, eventually, kill
from .support import forked, said_by, serving, url_of


@pytest.fixture
def run(capsys):
    """Run a command in this process; returns its status, output and errors."""

    def run(*arguments):
        try:
            status = main([str(one) for one in arguments])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


def stdin_of(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_serve_from_start_to_end(path, tmp_path, run, monkeypatch):
    """The command as users start it, from its start to its end."""
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    command = [sys.executable, "-m", "mooncake_serving.store", "serve", path, "--capacity", "1MiB"]
    options = ["--port", "0", "--temporary", "--token-file", token, "--events", "tcp://127.0.0.1:0"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = said_by(process.stdout)
            stdin_of(monkeypatch, b"hello")
            assert run("put", path, "greeting")[0] == 0
            check_server(url_of(lines), lines[0].split()[2], path)
            process.terminate()
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
    assert not path.exists()


def check_server(url: str, events: str, path) -> None:
    """It shows and removes the one object, tells so, and refuses who has no token."""
    headers = {"Authorization": "Bearer s3cret"}
    with httpx.Client(base_url=url, headers=headers, timeout=WAIT_S) as client:
        [entry] = client.get("/objects").json()["objects"]
        assert entry["num_bytes"] == 5
        series = f'mooncake_kernels_store_stored_total{{pool="{path}"}} 1.0'
        assert series in client.get("/metrics").text
        with subscribe(events) as heard:
            heard.receive(WAIT_S)  # a heartbeat, or that it was stored
            assert client.delete(f"/objects/{entry['key']}").status_code == 204
            removed = BlockRemoved([bytes.fromhex(entry["key"][2:])], "CPU")
            while removed not in heard.receive(WAIT_S).events:
                pass
        assert httpx.get(f"{url}/health", timeout=WAIT_S).status_code == 401


def test_sigint_ends_serve_and_keeps_an_existing_pool(path):
    ObjectPool.create(1 << 20, path).close()
    with serving(path, "--port", 0, "--temporary") as (pid, lines):
        assert lines[-1].startswith(f"serving {path} at http://127.0.0.1:")
        assert httpx.get(f"{url_of(lines)}/health", timeout=WAIT_S).json()["pool"] == str(path)
        os.kill(pid, signal.SIGINT)
        assert ended_well(pid)
    assert path.exists()


def test_a_router_is_notified_of_what_the_pool_already_has(path):
    """Whenever it comes: the snapshot is published before anyone can hear it."""
    with ObjectPool.create(1 << 20, path) as pool:
        for key in range(5):
            pool.put_from((key, 1), b"x")
        whole = [key.to_bytes(8, "big") + (1).to_bytes(8, "big") for key in range(5)]
        options = ["--events", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0"]
        with serving(path, "--port", 0, *options) as (_, lines):
            events, replay = lines[0].split()[2:]
            with subscribe(events, replay_endpoint=replay) as heard:
                told = []
                while len(told) < 2:
                    batch = heard.receive(WAIT_S)
                    assert not batch.is_after_gap
                    told += batch.events
            with subscribe(events) as late:
                assert late.receive(WAIT_S).is_after_gap
    cleared, stored = told
    assert cleared == AllBlocksCleared() and sorted(stored.block_hashes) == whole


@pytest.mark.parametrize("form", ["map", "array"])
def test_events_of_a_namespace_under_a_topic(path, form):
    """As a router wants them that hears many publishers."""
    with ObjectPool.create(1 << 20, path) as pool:
        Store(pool, namespace="a").put(7, b"x")
        Store(pool, namespace="b").put(8, b"of somebody else")
        options = ["--events", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0"]
        options += ["--events-topic", "kv@a", "--events-namespace", "a", "--events-form", form]
        with serving(path, "--port", 0, *options) as (_, lines):
            events, replay = lines[0].split()[2:]
            with subscribe(events, topic="kv@", replay_endpoint=replay) as heard:
                told = []
                while len(told) < 2:
                    told += heard.receive(WAIT_S).events
            with zmq.Context.instance().socket(zmq.DEALER) as asking:
                asking.connect(replay)
                asking.send_multipart((b"", bytes(8)))
                assert asking.poll(WAIT_S * 1000)
                frames = asking.recv_multipart()
    assert told[0] == AllBlocksCleared() and told[1].block_hashes == [7]
    assert frames[1:-2] == ([b"kv@a"] if form == "map" else [])
    assert isinstance(msgspec.msgpack.decode(frames[-1])[1][0], dict if form == "map" else list)


def test_a_killed_server_leaves_the_pool(path):
    with serving(path, "--capacity", "1MiB", "--port", 0) as (pid, lines):
        kill(pid)
        with ObjectPool.open(path) as pool:
            pool.put_from((1, 2), b"x")
            assert pool.stats().num_processes == 1
    with serving(path, "--port", 0) as (pid, lines):
        page = httpx.get(f"{url_of(lines)}/objects", timeout=WAIT_S).json()
        assert len(page["objects"]) == 1


def test_watermark_option_evicts_in_advance(path):
    """The server makes room for what others put, by the policy that it was told, and counts it."""
    options = ["--watermark", "0.5,0.25", "--eviction", "lfu"]
    with serving(path, "--capacity", "256KiB", "--port", 0, *options) as (pid, _):
        with ObjectPool.open(path) as pool:
            for key in range(48):
                pool.put_from((key, 0), bytes(4096))
            eventually(lambda: pool.stats().num_ready <= 32)
            assert pool.counts().num_evicted == 48 - pool.stats().num_ready
        os.kill(pid, signal.SIGTERM)
        assert ended_well(pid)


def test_quota_option_applies_to_all_processes(path):
    """Also once the server has gone, until it is told otherwise."""
    options = ["--capacity", "1MiB", "--port", 0]
    with serving(path, *options, "--quota", "a=64KiB", "--quota", "b=c=8KiB"):
        with Store.open(path, namespace="a") as a, Store.open(path, namespace="b=c") as b:
            assert a.put_each(range(32), [bytes(4096)] * 32) == [PutResult.STORED] * 32
            assert b.put_each(range(32), [bytes(4096)] * 32) == [PutResult.STORED] * 32
            assert a.usage().num_bytes <= 64 << 10 and b.usage().num_bytes <= 8 << 10
    with serving(path, *options, "--quota", "a=none"), Store.open(path, namespace="a") as a:
        assert a.usage() is None
        with Store.open(path, namespace="b=c") as b:
            assert b.usage().num_bytes <= 8 << 10


def test_stats_count_all_processes(path, run):
    with serving(path, "--capacity", "1MiB", "--port", 0) as (_, lines):

        def life():
            store = MooncakeDistributedStore()
            assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", str(path)) == 0
            assert [store.put(f"{i}", bytes(1000)) for i in range(5)] == [0] * 5
            assert store.get("1") == bytes(1000) and store.get("none") == b""
            assert store.remove("2") == 0
            os.kill(os.getpid(), signal.SIGKILL)

        with child(life) as other:
            assert os.WTERMSIG(os.waitpid(other, 0)[1]) == signal.SIGKILL
        with Store.open(path, namespace="n") as store:
            store.put(5, b"abc")
            assert store.get_each([5, 6]) == [b"abc", None]
        told = json.loads(run("stat", url_of(lines), "--json")[1])
        names = ["hits", "misses", "stored", "removed", "evicted"]
        assert [told[f"num_{name}"] for name in names] == [2, 2, 6, 1, 0]
        assert told["hit_rate"] == 0.5 and told["stored_bytes"] >= 5003
        assert told["read_bytes"] >= 1003


def test_ssd_option_demotes_and_survives_a_restart(path, tmp_path, run):
    """What is used again goes to the disk before it goes, and is there after a restart."""
    disk = tmp_path / "disk"
    ssd = ["--ssd", disk, "--ssd-capacity", "2MiB", "--ssd-bucket", "512KiB"]
    arguments = [path, "--capacity", "1MiB", "--port", 0, "--watermark", "0.5,0.25", *ssd]
    arguments += ["--eviction", "length_aware"]
    with serving(*arguments) as (pid, lines):
        with ObjectPool.open(path) as pool:
            store = Store(pool, namespace="a", evict_ratio=0)
            values = [bytes([i]) * (64 << 10) for i in range(14)]
            store.put_each(range(14), values)
            assert store.get_each(range(12)) == values[:12]
            url = url_of(lines)
            told = lambda: json.loads(run("stat", url, "--json")[1])  # noqa: E731
            eventually(lambda: told()["ssd_demoted_total"] >= 8)
        status, out, _ = run("stat", url)
        assert status == 0 and "disk" in out and "of 2 MiB" in out
        status, out, _ = run("top", url, "--once", "--interval", "0.01")
        assert status == 0 and "waiting to go there" in out
        os.kill(pid, signal.SIGTERM)
        assert ended_well(pid)
    with SsdTier(disk, 2 << 20, bucket_bytes=512 << 10) as tier:
        assert tier.stats().num_objects >= 8
    before = disk.stat().st_ino
    with serving(*arguments, "--temporary") as (pid, lines):
        assert json.loads(run("stat", url_of(lines), "--json")[1])["ssd_objects"] >= 8
        os.kill(pid, signal.SIGTERM)
        assert ended_well(pid)
    assert disk.stat().st_ino == before and path.exists()  # for they were there


def test_no_one_reads_the_output(pool, path):
    pool.put_from((1, 2), bytes(200_000))
    reader, writer = os.pipe()
    os.close(reader)
    pid = forked(writer, "get", path, key_text((1, 2)))
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_put_and_get_files(pool, path, run, tmp_path):
    source, landing = tmp_path / "in", tmp_path / "out"
    source.write_bytes(np.random.default_rng(0).bytes(10_000))
    assert run("put", path, "x", source, "--namespace", "a", "--retention", "soft") == (0, "", "")
    assert run("get", path, "x", landing, "--namespace", "a") == (0, "", "")
    assert landing.read_bytes() == source.read_bytes()
    assert Store(pool, namespace="a").get("x") == source.read_bytes()
    assert pool.objects().retention.tolist() == [1]
    status, out, error = run("put", path, "x", source, "--namespace", "a")
    assert (status, out) == (1, "") and "there is such an object already" in error
    landing.unlink()
    status, out, error = run("get", path, "x", landing)
    assert (status, out, error) == (1, "", "error: there is no object 'x'\n")
    assert run("get", path, "", landing)[2] == "error: there is no object ''\n"
    assert not landing.exists()
    assert pool.counts().num_stored == 1


def test_prefix_hashes_and_whole_keys(pool, path, run, monkeypatch):
    store = Store(pool, namespace="a")
    store.put(0xABC, b"by hash")
    key = key_text(pool.objects().keys[0])
    for text in ("0xabc", "0x0ABC", key):
        assert run("get", path, text, "--namespace", "a")[0] == 0
    assert run("get", path, key)[0] == 0, "a whole key is of any namespace"
    assert run("get", path, "0xabc")[0] == 1
    stdin_of(monkeypatch, b"from stdin")
    assert run("put", path, "0x5", "-", "--namespace", "a")[0] == 0
    assert store.get(5) == b"from stdin"
    for text in ("0x", "0xyz", "0x" + "0" * 17):
        status, _, error = run("get", path, text)
        assert status == 2 and text in error
    assert run("remove", path, key, "0x5", "--namespace", "a") == (0, "", "")
    status, _, error = run("remove", path, key, "gone")
    assert status == 1 and error == f"error: there is no object '{key}', 'gone'\n"
    assert pool.stats().num_ready == 0


def test_put_fails_when_the_pool_has_no_room(path, run, tmp_path):
    with ObjectPool.create(4096, path) as pool:
        pool.put_from((1, 1), b"x", retention="hard")
        file = tmp_path / "file"
        file.write_bytes(bytes(4096))
        status, _, error = run("put", path, "x", file)
        assert status == 1 and "cannot be evicted" in error
        file.write_bytes(bytes(4097))
        status, _, error = run("put", path, "x", file)
        assert status == 2 and "4097" in error


def test_get_removes_a_damaged_object_and_writes_nothing(pool, path, run, tmp_path):
    pool.put_from((1, 2), b"whole")
    pool.memory().fill_(1)
    status, out, error = run("get", path, key_text((1, 2)), tmp_path / "out")
    assert status == 1 and out == "" and "checksum" in error
    assert not (tmp_path / "out").exists()
    stats = pool.stats()
    assert not pool.contains((1, 2)) and (stats.num_doomed, stats.num_pins) == (0, 0)


def test_list(pool, path, run):
    for number in range(5):
        pool.put_from((number << 56, number), bytes(number))
    rows = [json.loads(line) for line in run("list", path, "--json")[1].splitlines()]
    assert [row["num_bytes"] for row in rows] == [0, 1, 2, 3, 4]
    assert run("list", path, "--prefix", "0x03")[1].split() == [
        "0x0300000000000000" + f"{3:016x}", "3", "normal"
    ]  # fmt: skip
    assert len(run("list", path, "--limit", "2")[1].splitlines()) == 2
    assert run("list", path, "--prefix", "no")[0] == 2


def test_put_reads_no_more_than_the_pool_can_hold(pool, path, run):
    status, _, error = run("put", path, "zeros", "/dev/zero")
    assert status == 2 and str(pool.stats().capacity_bytes + 1) in error
    assert run("list", path)[1] == ""


def test_stat_and_top(pool, path, run):
    store = Store(pool)
    store.put("a", bytes(2 * 4096))
    store.get("a"), store.get("b")
    status, out, _ = run("stat", path, "--json")
    told = json.loads(out)
    assert status == 0 and told["hit_rate"] == 0.5 and told["num_stored"] == 1
    assert (told["pool"], told["free_bytes"]) == (str(path), 62 * 4096)
    assert '"free_bytes": 253952,' in out  # as an integer
    status, out, _ = run("stat", path)
    assert status == 0 and "8 KiB of 256 KiB, 3.1%" in out and "50.0%" in out
    status, _, error = run("top", path)
    assert status == 2 and "must be a terminal" in error
    status, out, _ = run("top", path, "--once", "--interval", "0.01")
    assert status == 0 and "hit rate now" in out and "nothing was read" in out


def test_top_is_live(pool, path, monkeypatch):
    """In a terminal: it shows what happens, and ends with SIGINT."""
    monkeypatch.setenv("TERM", "xterm")
    terminal, its_side = pty.openpty()
    pid = forked(its_side, "top", path, "--interval", "0.05")
    os.close(its_side)
    try:
        assert shows(terminal, b"nothing was read")
        pool.get_into((1, 1), np.zeros(1, np.uint8))
        assert shows(terminal, b"0.0%")
        os.kill(pid, signal.SIGINT)
        with contextlib.suppress(OSError):  # EIO: it has ended
            while os.read(terminal, 65536):
                pass
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    finally:
        kill(pid)
        os.close(terminal)


def shows(terminal: int, words: bytes) -> bool:
    """Read until it shows the words."""
    seen = b""
    while words not in seen:
        ready, _, _ = select.select([terminal], [], [], WAIT_S)
        if not ready:
            return False
        seen += os.read(terminal, 65536)
    return True


def test_stat_and_top_of_a_server(pool, path, run, tmp_path):
    from mooncake_serving.store.admin import AdminServer

    token = tmp_path / "token"
    token.write_text("s3cret\nand nothing of this")
    with AdminServer(Store(pool), token="s3cret") as server:
        here = json.loads(run("stat", path, "--json")[1])
        there = run("stat", server.url, "--json", "--token-file", token)[1]
        assert {**here, "processes": 0} == {**json.loads(there), "processes": 0}
        assert run("stat", f"{server.url}/", "--token-file", token)[0] == 0
        arguments = ["--once", "--interval", "0.01", "--token-file", token]
        status, out, _ = run("top", server.url, *arguments)
        assert status == 0 and str(path) in out
        status, _, error = run("stat", server.url)
        assert status == 2 and "answers 401" in error
        status, _, error = run("drain", server.url, "node", "--token-file", token)
        assert status == 2 and "answers 501" in error and "no directory" in error
    status, _, error = run("stat", server.url)
    assert status == 2 and "does not answer" in error


def test_stat_reports_a_pool_held_by_a_stopped_process(run, pool, monkeypatch):
    from mooncake_serving.store.admin import AdminServer

    def stats(timeout_s):
        raise TimeoutError("a stopped process holds the pool")

    with AdminServer(Store(pool), needs_token=False) as server:
        monkeypatch.setattr(pool, "stats", stats)
        status, _, error = run("stat", server.url)
    assert status == 2 and error.endswith("answers that a stopped process holds its pool\n")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not answer as a web server does: BadStatusLine"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "web server does: IncompleteRead"),
        (b"", "RemoteDisconnected"),
        (b"HTTP/1.0 200 OK\r\n\r\n<p>hello\n", "is no admin server of a store"),
        (b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe\n", "is no admin server of a store"),
        (b"HTTP/1.0 200 OK\r\n\r\n[1]", "is no admin server of a store"),
        (b'HTTP/1.0 200 OK\r\n\r\n{"state": "left"}', "is no admin server of a store"),
    ],
)
def test_url_of_another_server_is_reported(run, answer, words):
    """A port was mistyped: one line says so, and names the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        is_closed = threading.Event()

        def serve():
            while not is_closed.is_set():
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):  # the last one says nothing
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):  # a close would reset what is not read yet
                        pass

        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            for arguments in (
                ["stat", url],
                ["drain", url, "n", "--wait"],
                ["drain", url, "n", "--cancel"],
            ):
                status, out, error = run(*arguments)
                assert (status, out) == (2, "") and words in error and url in error
                assert error.count("\n") == 1
        finally:
            is_closed.set()
            socket.create_connection(listener.getsockname()).close()
            thread.join()


def test_a_cancelled_drain_is_reported_as_such(pool, run):
    from mooncake_serving.store.admin import AdminServer, Draining

    class Cluster:
        """Of one node, which somebody has told to stay."""

        def own_name(self):
            return "n"

        def draining(self):
            return Draining("idle", 5, 3, 0, None, True)

        members = own_pool = withdraw = drain = cancel_drain = lambda self, *_, **__: None

    with AdminServer(Store(pool), cluster=Cluster(), needs_token=False) as server:
        status, out, error = run("drain", server.url, "n", "--wait")
    assert (status, out) == (1, "")
    assert error == "error: n was not drained: it was told to stay meanwhile\n"


def test_bench_evicts_no_foreign_objects(path, run):
    sizes = ["--sizes", "4KiB", "--seconds", "0.01", "--ops", "put"]
    with ObjectPool.create(64 << 12, path, num_objects=64) as pool:
        for key in range(62):
            pool.put_from((key, 1), b"stays")
        assert run("bench", path, *sizes)[0] == 0
        assert pool.put_from((62, 1), b"stays") is PutResult.STORED
        status, _, error = run("bench", path, *sizes)
        assert status == 1 and "free of the pool, 4096 bytes and 1 objects" in error
        assert pool.stats().num_ready == 63
        for key in range(1, 63, 2):
            pool.remove((key, 1))
        assert run("bench", path, *sizes)[0] == 0
        status, _, error = run("bench", path, "--sizes", "8KiB")
        assert status == 1 and "no room for another 8192 bytes in one part" in error
        assert pool.stats().num_ready == 32
    path.unlink()
    with ObjectPool.create(1 << 20, path, num_objects=16) as pool:
        assert run("bench", path, *sizes)[0] == 0, "fewer objects than have room"


def test_bench(path, run):
    sizes = ["--sizes", "4KiB,64KiB", "--seconds", "0.01"]
    rows = json.loads(run("bench", "--capacity", "1MiB", *sizes, "--json")[1])
    operations = ["put", "get", "get_into", "view"]
    expected = [(name, size) for size in (4096, 65536) for name in operations]
    assert [(row["operation"], row["num_bytes"]) for row in rows] == expected
    assert all(row["ops_per_s"] > 0 for row in rows)
    assert all((row["gb_per_s"] is None) == (row["operation"] == "view") for row in rows)
    with ObjectPool.create(1 << 20, path) as pool:
        pool.put_from((1, 1), b"stays")
        status, out, _ = run("bench", path, *sizes, "--ops", "put,get_into")
        assert status == 0 and out.count("64 KiB") == 2 and "GB/s" in out
        assert pool.objects().keys.tolist() == [[1, 1]]
    status, _, error = run("bench", "--capacity", "4096", "--sizes", "4096")
    assert status == 1 and "do not fit" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["stat", "/nowhere/kv"], "No such file"),
        (["stat", "/etc/passwd"], "/etc/passwd"),
        (["stat", "http://127.0.0.1:1"], "does not answer"),
        (["stat", "http://"], "http"),
        (["stat", "x", "--token-file", "/nowhere"], "cannot read /nowhere"),
        (
            ["stat", "x", "--token-file", "/dev/null"],
            "the first line of /dev/null must be printable ASCII, got no",
        ),
        (["stat", "x", "--token-file", "/bin/sh"], "/bin/sh"),
        (["stat", "http://127.0.0.1:port"], "nonnumeric port: 'port'"),
        (["stat", "http://a b"], "URL must be an http address, got http://a b"),
        (["top", "x", "--interval", "soon"], "must be seconds from 0.01 to 3600, got 'soon'"),
        (["serve", "/dev/shm/no-such-pool"], "--capacity must be given"),
        (["serve", "/dev/shm/no-such-pool", "--capacity", "much"], "like 4096, 64KiB or 1.5G"),
        (["serve", "x", "--eviction", "mru"], "invalid choice: 'mru'"),
        (["serve", "x", "--quota", "8GiB"], "must be NAMESPACE=SIZE, got '8GiB'"),
        (["serve", "x", "--quota", "a=much"], "a size must be like 4096, 64KiB or 1.5G"),
        (["serve", "x", "--ssd", "y"], "--ssd needs --ssd-capacity"),
        (["serve", "x", "--ssd-capacity", "1GiB"], "--ssd-capacity needs --ssd"),
        (["serve", "x", "--ssd-bucket", "1MiB"], "--ssd-bucket needs --ssd"),
        (["serve", "x", "--ssd-min-uses", "2"], "--ssd-min-uses needs --ssd"),
        (["serve", "x", "--cluster", "mooncake"], "--cluster needs --directory"),
        (["serve", "x", "--events-topic", "t"], "--events-topic needs --events"),
        (["serve", "x", "--events-namespace", "a"], "--events-namespace needs --events"),
        (["serve", "x", "--events-form", "map"], "--events-form needs --events"),
        (["serve", "x", "--events-interval", "1"], "--events-interval needs --events"),
        (["serve", "x", "--events", "y", "--events-interval", "0"], "seconds from 0.01 to 3600"),
        (["serve", "x", "--engine", "127.0.0.1:0"], "--engine needs --directory"),
        (["serve", "x", "--capacity", "1PiB"], "in units up to TiB, got '1PiB'"),
        (["serve", "x", "--ssd-min-uses", "0"], "must be an integer from 1 on, got '0'"),
        (["serve", "x", "--watermark", "0.8,0.9"], "must be HIGH,LOW"),
        (["serve", "x", "--watermark", "0.8"], "must be HIGH,LOW"),
        (["bench", "--ops", "put,pot"], "must be of put, get, get_into, view, got 'put,pot'"),
        (["bench", "--capacity", "9" * 400], "1.5G, in units up to TiB, got '999"),
        (["bench", "--sizes", "1KiB,0"], "1.5G, in units up to TiB, got '0'"),
        (["bench", "--seconds", "-1"], "must be seconds from"),
        (["drain", "/dev/shm/kv", "n"], "drain: URL must be an http address, got /dev/shm/kv\n"),
        (["drain", "http://x", "n", "--cancel", "--leave-disk"], "must not be given with --cancel"),
        (["list", "x", "--limit", "-1"], "must be an integer from 1 on, got '-1'"),
        (["put", "x", "key", "--retention", "long"], "invalid choice: 'long'"),
    ],
)
def test_wrong_arguments(run, arguments, words):
    status, out, error = run(*arguments)
    assert (status, out) == (2, "") and words in error and error.count("\n") == 1, error


def test_serve_warns_that_an_existing_pool_keeps_its_capacity(path, run):
    ObjectPool.create(1 << 20, path).close()
    bad_port = ["--port", "70000"]
    _, _, error = run("serve", path, "--capacity", "2MiB", *bad_port)
    assert "has 1048576 bytes: --capacity 2097152 changes nothing" in error and path.exists()
    assert "warning" not in run("serve", path, "--capacity", "1MiB", *bad_port)[2]


def test_failed_serve_keeps_a_disk_created_by_another_process(path, run, tmp_path, monkeypatch):
    disk, others = tmp_path / "disk", []
    ssd = ["--ssd", disk, "--ssd-capacity", "2MiB", "--ssd-bucket", "512KiB"]

    def late(*arguments, **options):
        others.append(SsdTier(*arguments, **options))
        assert others[0].put_each([(1, 1)], [b"x"]) == [PutResult.STORED]
        return SsdTier(*arguments, **options)

    monkeypatch.setattr(serve, "SsdTier", late)
    status, _, error = run("serve", path, "--capacity", "1MiB", *ssd)
    with others[0]:
        assert status == 2 and "another tier has" in error and disk.exists()

    def later(*arguments, **options):
        with SsdTier(*arguments, **options) as tier:
            assert tier.put_each([(1, 1)], [b"x"]) == [PutResult.STORED]
        return SsdTier(*arguments, **options)

    disk.unlink()
    monkeypatch.setattr(serve, "SsdTier", later)
    status, _, error = run("serve", path, "--capacity", "1MiB", *ssd, "--port", "70000")
    assert status == 2 and "port must be" in error and disk.exists() and not path.exists()


def test_failed_serve_removes_its_disk_under_lock(path, run, tmp_path, monkeypatch):
    """Once it is not, another process may have it."""
    disk, there, close = tmp_path / "disk", [], SsdTier.close

    def look_and_close(tier):
        there.append(disk.exists())
        close(tier)

    monkeypatch.setattr(SsdTier, "close", look_and_close)
    ssd = ["--ssd", disk, "--ssd-capacity", "2MiB", "--ssd-bucket", "512KiB"]
    status, _, error = run("serve", path, "--capacity", "1MiB", *ssd, "--port", "70000")
    assert status == 2 and "port must be" in error
    assert there == [False] and not disk.exists() and not path.exists()


def test_serve_rejects_invalid_options_before_creating_anything(path, run, tmp_path):
    disk = tmp_path / "disk"
    make = ["serve", path, "--capacity", "1MiB"]
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    for arguments, words in [
        (["--host", "0.0.0.0"], "--token-file must be given"),
        (["--port", "70000"], "port must be from 0 to 65535"),
        (["--events", "nowhere"], "endpoint must be an endpoint"),
        (["--replay", "tcp://127.0.0.1:0"], "--replay needs --events"),
        (
            ["--ssd", disk, "--ssd-capacity", "16MiB"],
            "serve: --ssd-capacity must be at least twice --ssd-bucket, 536870912 bytes, "
            "got 16777216",
        ),
        (
            ["--ssd", disk, "--ssd-capacity", "16MiB", "--ssd-bucket", "4KiB"],
            "serve: --ssd-bucket must be an integer from 65536 to",
        ),
        (
            ["--ssd", disk, "--ssd-capacity", "16MiB", "--ssd-bucket", "100000"],
            "serve: --ssd-bucket must be whole pages of 4096, got 100000",
        ),
        (
            ["--ssd", disk, "--ssd-capacity", "9999999TiB"],
            "serve: --ssd-capacity must be an integer from 536870912 to",
        ),
        (["--ssd", tmp_path, "--ssd-capacity", "1GiB"], str(tmp_path)),
        (["--ssd", disk, "--ssd-capacity", "1GiB", "--port", "70000"], "port must be from"),
    ]:
        status, out, error = run(*make, *arguments)
        assert (status, out) == (2, "") and words in error
        assert not path.exists()
        assert not disk.exists()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_serve_names_the_option_in_conflict_with_the_disk(path, run, tmp_path):
    disk = tmp_path / "disk"
    with SsdTier(disk, 2 << 20, bucket_bytes=512 << 10):
        pass
    for size, bucket, words in [
        ("2MiB", "256KiB", "serve: --ssd-bucket must be 524288, as"),
        ("1MiB", "512KiB", "serve: --ssd-capacity must not be less than"),
    ]:
        ssd = ["--ssd", disk, "--ssd-capacity", size, "--ssd-bucket", bucket]
        status, out, error = run("serve", path, "--capacity", "1MiB", *ssd)
        assert (status, out) == (2, "") and words in error and "SsdTier" not in error
    (disk := tmp_path / "other").write_bytes(b"something else" * 1000)
    status, _, error = run("serve", path, "--capacity", "1MiB", "--ssd", disk, *ssd[2:])
    assert status == 2 and str(disk) in error and "SsdTier" not in error, error


@pytest.mark.parametrize(
    "name", ["", "serve", "stat", "top", "list", "get", "put", "remove", "drain", "bench"]
)
def test_help_has_an_example(run, name):
    status, out, _ = run(*([name] if name else []), "--help")
    assert status == 0 and f"mooncake-store {name}".rstrip() in out.partition("example")[2]
