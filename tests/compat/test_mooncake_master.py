"""A configuration with the ``host:port`` of a master: it tells a directory, or what is wrong."""

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_serving.compat.mooncake import master, master_client
from mooncake_serving.compat.mooncake.store import RPC_FAIL, MooncakeDistributedStore

from ..metadata.support import RedisServer, eventually, free_port, redis_program
from .store_support import reasons, value_of

pytest.importorskip("redis")
pytest.importorskip("msgspec")

WAIT_S = 60


CONTEXT = multiprocessing.get_context("forkserver")  # a new interpreter takes seconds to import us
CONTEXT.set_forkserver_preload([master.__name__, "mooncake_serving.store.directory"])


def run_master(words: list[str], output: str) -> None:
    with open(output, "w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.exit(master.main(words))


class Master:
    """The command in a process of its own."""

    def __init__(self, folder: Path, *options: str):
        self.port = free_port()
        self._output = folder / "output"
        self._words = ["--host", "127.0.0.1", "--port", str(self.port), *options]
        self.start()

    def start(self) -> None:
        self._output.write_text("")
        arguments = self._words, str(self._output)
        self.process = CONTEXT.Process(target=run_master, args=arguments, daemon=True)
        self.process.start()
        eventually(lambda: "the directory is" in self.told, "the master does not start")

    @property
    def told(self) -> str:
        return self._output.read_text()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def wait(self) -> int:
        self.process.join(WAIT_S)
        return self.process.exitcode

    def stop(self, number: int = signal.SIGTERM) -> int:
        os.kill(self.process.pid, number)
        return self.wait()


@pytest.fixture
def running(tmp_path):
    """Starts a master with options."""
    with contextlib.ExitStack() as stack:

        def start(*options: str) -> Master:
            one = Master(tmp_path, *options)
            stack.callback(one.wait)
            stack.callback(lambda: one.process.kill())  # the one that runs by then
            return one

        yield start


def set_up(address: str, **changes) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    settings = {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE"}
    sizes = {"global_segment_size": "16MB", "local_buffer_size": "1MB"}
    assert store.setup({**settings, **sizes, "master_server_address": address, **changes}) == 0
    return store


def test_stores_share_a_directory_of_the_masters_own(running):
    redis_program()
    port = free_port()
    one = running("--directory-port", str(port))
    assert f"the directory is redis://:{port}/0" in one.told
    assert master_client.directory_at(one.address) == f"redis://127.0.0.1:{port}/0"
    first, second = set_up(one.address), set_up(one.address)
    assert first.put("a", value_of(1, 4096)) == 0
    assert second.get("a") == value_of(1, 4096) and second.remove("a") == 0
    assert first.put_batch(["b", "c"], [b"1", b"2"]) == 0
    assert second.batch_is_exist(["b", "c", "d"]) == [1, 1, 0]
    assert second.remove_all() == 2 and first.health_check() == 0
    assert one.stop() == 0
    with pytest.raises(ConnectionRefusedError):  # it took its server along
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    one.start()  # as a service manager does
    eventually(lambda: first.health_check() == 0, "the directory is not back")
    assert first.put("e", b"3") == 0
    eventually(lambda: second.get("e") == b"3", "the store is not filled again")
    for store in (first, second):
        assert store.close() == 0


def test_its_server_does_what_a_directory_needs_and_ends_with_it(running):
    import redis

    redis_program()
    port = free_port()
    one = running("--directory-port", str(port))
    with redis.Redis(port=port) as client:
        for command in ("FLUSHALL", "CONFIG GET dir", "SHUTDOWN", "DEBUG SLEEP 0", "ACL LIST"):
            with pytest.raises(redis.ResponseError, match="no permissions|NOPERM|not allowed"):
                client.execute_command(*command.split())
    one.stop(signal.SIGKILL)

    def is_gone() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=WAIT_S).close()
        except ConnectionRefusedError:
            return True
        return False

    eventually(is_gone, "the server lives on")


def test_a_master_ends_when_its_server_has(running):
    redis_program()
    one = running("--directory-port", str(free_port()))
    task = Path(f"/proc/{one.process.pid}/task/{one.process.pid}")
    [child] = (task / "children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    assert one.wait() == 2
    assert "error: " in one.told and "the directory's server has ended (-9)" in one.told


def test_a_directory_that_runs_already(running, server):
    one = running("--directory", server.url)
    assert f"warning: stores on other hosts cannot reach {server.url}" in one.told
    assert master_client.directory_at(one.address) == server.url
    store = set_up(one.address)
    assert store.put("a", b"1") == 0
    one.stop()  # it has no part in anything
    assert store.get("a") == b"1" and store.health_check() == store.close() == 0


def test_a_login_is_of_the_stores(tmp_path, monkeypatch, caplog):
    server = RedisServer(tmp_path, "--requirepass", "hidden")
    try:
        monkeypatch.setenv("MC_REDIS_PASSWORD", "hidden")
        master._check_told(server.url)  # by the login of the environment
        with answers(master_client.GREETING + server.url.encode() + b"\n") as address:
            store = set_up(address)
            assert store.put("a", b"1") == 0 and store.close() == 0
            monkeypatch.delenv("MC_REDIS_PASSWORD")
            settings = ("127.0.0.1", "P2PHANDSHAKE", 1 << 20, 1 << 20, "tcp", "", address)
            assert MooncakeDistributedStore().setup(*settings) == RPC_FAIL
            reasons(caplog, "(?i)auth")
        with pytest.raises(Unavailable, match="(?i)auth"):
            master._check_told(server.url)
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--directory", "http://127.0.0.1:1"], "--directory must begin with one of redis://, "),
        (["--directory", "redis://:pass@h:1"], r"must have no login.*got redis://\*\*\*@h:1$"),
        (["--directory", "redis://h:1/0?password=pass"], "must have no login"),
        (["--directory", "redis://h/\n"], "must be short and printable ASCII"),
        (["--directory", "redis://127.0.0.1:1"], "redis://127.0.0.1:1"),
        (["--host", "203.0.113.1"], "--host and --port must be free on this machine, got 203"),
        (["--port", "70000"], "--host and --port must be free on this machine"),
        (["--directory-port", "{taken}"], r"listen on port \d+ .*give another --directory-port"),
        (["--port", "{taken}"], "--host and --port must be free on this machine, got .* in use"),
    ],
)
def test_wrong_options_are_one_line(capsys, options, reason):
    redis_program()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        defaults = ["--host", "127.0.0.1", "--port", str(free_port())]
        words = [word.replace("{taken}", number) for word in options]
        assert master.main([*defaults, *words]) == 2
    out, error = capsys.readouterr()
    assert not out and "pass@" not in error and "=pass" not in error
    assert re.search(reason, error.strip().splitlines()[-1]), error


@contextlib.contextmanager
def answers(*pieces: bytes, pause_s: float = 0, goes_on: bool = False):
    """Something else on a port: sends pieces to each that connects, and closes, or goes on."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connected, _ = listener.accept()
                    with connected:
                        for piece in pieces:
                            connected.sendall(piece)
                            over.wait(pause_s)
                        if goes_on:
                            over.wait(WAIT_S)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(WAIT_S)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ([b"SSH-2.0-OpenSSH_9\r\n"], "it sends b'SSH-2.0-OpenSSH_9"),
        ([], "it sends b''"),
        ([master_client.GREETING + b"http://h:1\n"], "it sends b'mooncake-kernels directory http"),
        (
            [master_client.GREETING + b"redis://h\x1b[2J\n"],
            "it sends b'mooncake-kernels directo",
        ),
        ([b"x" * 1_000_000], "it sends b'xxx"),
    ],
)
def test_another_program_on_the_port_is_named(sent, reason):
    with answers(*sent) as address:
        with pytest.raises(Unavailable, match=f"got {address}: {reason}") as raised:
            master_client.directory_at(address)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("pieces", [[], [b"m"] * 100], ids=["silent", "slow"])
def test_waiting_for_a_master_ends(monkeypatch, pieces):
    """A mooncake_master waits for a request."""
    monkeypatch.setattr(master_client, "DEADLINE_S", 0.5)
    began_s = time.monotonic()
    with answers(*pieces, pause_s=0.05, goes_on=True) as address:
        with pytest.raises(Unavailable, match="it says nothing within"):
            master_client.directory_at(address)
        assert time.monotonic() - began_s < WAIT_S / 2


@pytest.mark.parametrize("address", ["h", "h:", ":1", "h:0", "h:65536", "h:x", "h:-1", "h:²"])
def test_what_is_no_address(address):
    with pytest.raises(InvalidArgument, match="or the host:port of a master, got"):
        master_client.directory_at(address)


def test_hosts_and_logins_are_filled_in():
    with answers(master_client.GREETING + b"redis://:7/0\n") as address:
        environ = {"MC_REDIS_USERNAME": "u", "MC_REDIS_PASSWORD": "p&s"}
        assert master_client.directory_at(address, {}) == "redis://127.0.0.1:7/0"
        told = master_client.directory_at(address, environ)
        assert told == "redis://127.0.0.1:7/0?username=u&password=p%26s"
    with answers(master_client.GREETING + b"redis+sentinel://a:1,b:2/s?db=3\n") as address:
        environ = {"MC_REDIS_PASSWORD": "p", "MC_REDIS_HOST": "B, a"}
        told = master_client.directory_at(address, environ)
        assert told == "redis+sentinel://a:1,b:2/s?db=3&password=p"


@pytest.mark.parametrize(
    "url",
    ["redis://other:7/0", "rediss://other", "unix:///tmp/x", "redis+sentinel://127.0.0.1,b/s"],
)
def test_a_login_goes_to_no_other_host(url):
    with answers(master_client.GREETING + url.encode() + b"\n") as address:
        assert master_client.directory_at(address, {}) == url
        for more in ({}, {"MC_REDIS_HOST": "another"}):
            with pytest.raises(Unavailable, match="sent to the host of the master only") as raised:
                master_client.directory_at(address, {"MC_REDIS_PASSWORD": "hidden", **more})
            assert "hidden" not in str(raised.value) and "set MC_REDIS_HOST to" in str(raised.value)
    with answers(master_client.GREETING + b"redis://h:x/0\n") as address:
        with pytest.raises(Unavailable, match="must be where"):
            master_client.directory_at(address, {"MC_REDIS_PASSWORD": "hidden"})


@pytest.mark.parametrize("host", ["a" * 300, "\ud800", "h\0", "."])
def test_what_is_no_host_is_no_master(host, caplog):
    with pytest.raises(Unavailable, match="must be where"):
        master_client.directory_at(f"{host}:5")
    settings = ("127.0.0.1", "P2PHANDSHAKE", 1 << 20, 1 << 20, "tcp", "", f"{host}:5")
    assert MooncakeDistributedStore().setup(*settings) == RPC_FAIL
    reasons(caplog, "must be where")


def test_a_url_is_no_address():
    with pytest.raises(InvalidArgument, match=r"or the host:port of a master, got '\*\*\*@h:5'"):
        master_client.directory_at("user:hidden@h:5")


@pytest.mark.parametrize("asked", ["127.0.0.1", "[::1]"])
def test_all_addresses_are_those_of_ipv4_too(running, asked):
    redis_program()
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    port = free_port()
    one = running("--host", "::", "--directory-port", str(port))
    url = master_client.directory_at(f"{asked}:{one.port}", {})
    assert url == f"redis://{asked}:{port}/0"
    master._check_answers(url)


def test_a_server_that_has_the_port_is_not_taken_for_its_own(server, capsys, monkeypatch):
    words = ["--host", "127.0.0.1", "--port", str(free_port())]
    assert master.main([*words, "--directory-port", str(server.port)]) == 2
    assert "give another --directory-port" in capsys.readouterr().err
    with pytest.raises(Unavailable, match="another server is at port 7: give another --directory-"):
        master._check_is(os.getpid(), server.url, 7)
