"""What a caller may take of an admin server: bodies, connections, time; and who is one."""

import contextlib
import dataclasses
import os
import socket
import stat
import urllib.parse
from pathlib import Path

import pytest

from mooncake_kernels import config
from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.store import Store
from mooncake_serving.store.admin import AdminServer
from mooncake_serving.store.admin import server as server_module
from mooncake_serving.store.cli import main
from mooncake_serving.store.cli.admin_client import AdminClient, find_token, saved_token

from ..store.conftest import pool  # noqa: F401
from ..store.surfaces.support import serving, url_of
from .http_support import answer, eventually, is_closed, silent, status

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /evict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def store(pool):  # noqa: F811
    return Store(pool, namespace="a")


@contextlib.contextmanager
def running(store, **limits):
    changed = dataclasses.replace(server_module.LIMITS, **limits)
    with AdminServer(store, needs_token=False, limits=changed) as server:
        yield server.port


@pytest.mark.parametrize(
    "request_", [POST + b"Content-Length: 65537\r\n\r\n", CHUNKED + b"10001\r\n" + bytes(65537)]
)
def test_body_over_64_kib_is_rejected(store, request_):
    with running(store) as port:
        refusal = answer(port, request_)
        assert refusal.startswith(b"HTTP/1.1 413 ") and b"at most 65536 bytes" in refusal
        whole = b'{"num_bytes": 1}'.ljust(65536)
        request_ = POST + b"Content-Length: 65536\r\n\r\n" + whole
        assert status(port, request_) == 200


@pytest.mark.parametrize("body", [b"9" * 60_000, b"[" * 60_000, b'{"num_bytes": ' + b"9" * 60_000])
def test_unparsable_bodies_are_rejected(store, body):
    with running(store) as port:
        assert status(port, POST + b"Content-Length: %d\r\n\r\n" % len(body) + body) == 400
        assert status(port, GET) == 200


@pytest.mark.parametrize(
    "start", [b"", b"GET /hea", POST, POST + b"Content-Length: 9\r\n\r\n{", CHUNKED + b"9\r\n{"]
)
def test_incomplete_requests_time_out_without_blocking_others(store, start):
    with running(store, headers_s=3600, body_s=3600) as port:
        with silent(port, 200, start) as held:
            assert status(port, GET) == status(port, GET, "127.0.0.2") == 200
            assert is_closed(held[0])
    with running(store, headers_s=0.1, body_s=0.1) as port, silent(port, 4, start) as held:
        assert all(map(is_closed, held))


def test_body_is_not_read_without_the_token(store):
    with AdminServer(store, token="s3cret") as server:
        refusal = answer(server.port, POST + b"Content-Length: 2000000000\r\n\r\n")
        assert refusal.startswith(b"HTTP/1.1 401 ")


def test_open_paths_need_no_token(store):
    with AdminServer(store, token="s3cret", open_paths=["/health"]) as server:
        assert status(server.port, GET) == 200
        assert status(server.port, GET.replace(b"/health", b"/metrics")) == 401
        assert status(server.port, GET.replace(b"localhost", b"evil.example")) == 421


def test_unix_socket_is_private_to_its_user(store, tmp_path, capsys):
    path = tmp_path / "private" / "admin.sock"
    with AdminServer(store, socket=path) as server:
        assert server.url == f"unix://{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert b'"ok"' in AdminClient(server.url, None).request("/health")
        assert main(["stat", server.url, "--json"]) == 0
        assert store.pool.path in capsys.readouterr().out
        with pytest.raises(OSError, match="a server listens at"):
            AdminServer(store, socket=path)
    assert not path.exists()
    with pytest.raises(OSError, match=r"unix://.* does not answer"):
        AdminClient(server.url, None).request("/health")
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()  # as by a server that was killed
    AdminServer(store, socket=path).close()


def test_invalid_socket_paths_are_rejected(store, tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(InvalidArgument, match=r"must be a folder of this user of mode 0700, got"):
        AdminServer(store, socket=tmp_path / "admin.sock")
    tmp_path.chmod(0o700)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match=r"socket must be free, got .*file, which is a file"):
        AdminServer(store, socket=tmp_path / "file")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(InvalidArgument, match="socket must be free"):
        AdminServer(store, socket=tmp_path / "link")
    for path in ("admin.sock", tmp_path / ("x" * 100)):
        with pytest.raises(InvalidArgument, match="socket must be an absolute path of at most 100"):
            AdminServer(store, socket=path)
    with pytest.raises(InvalidArgument, match="socket must be a path or None, got 5"):
        AdminServer(store, socket=5)
    assert (tmp_path / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_socket_in_another_users_folder_is_rejected(store, tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    with pytest.raises(InvalidArgument, match="must be a folder of this user"):
        AdminServer(store, socket=folder / "admin.sock")


def test_serve_saves_its_token_for_later_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = f"/dev/shm/mk-test-{os.getpid()}-saved"
    options = ["--capacity", "1MiB", "--port", 0, "--temporary"]
    with serving(path, *options, access=()) as (_, lines):
        url, file = url_of(lines), Path(lines[-2].removeprefix("token in "))
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        port = urllib.parse.urlsplit(url).port
        assert status(port, GET) == 401
        assert main(["stat", url, "--json"]) == 0 and path in capsys.readouterr().out
        monkeypatch.setenv("HOME", str(tmp_path / "another"))
        assert main(["stat", url]) == 2 and "answers 401" in capsys.readouterr().err
        with config.override(admin_token=file.read_text().strip()):
            assert main(["stat", url, "--json"]) == 0
    Path(path).unlink(missing_ok=True)


def test_saved_token_is_used_for_its_own_server_only(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with saved_token(7, "first") as file:
        assert find_token("http://127.0.0.1:7") == "first"
        assert find_token("http://localhost:7/") == "first"
        for elsewhere in ("http://10.0.0.1:7", "http://evil.example:7", "unix:///x", "http://["):
            assert find_token(elsewhere) is None
        with saved_token(7, "second"):
            pass
        assert find_token("http://127.0.0.1:7") is None
    assert not file.exists()
    with saved_token(7, "third"):
        file.parent.chmod(0o750)
    with pytest.raises(InvalidArgument, match="of mode 0700"), saved_token(8, "x"):
        pass


def test_no_token_excludes_token_file(tmp_path, capsys):
    (tmp_path / "token").write_text("s3cret")
    options = ["--capacity", "1MiB", "--no-token", "--token-file", str(tmp_path / "token")]
    assert main(["serve", str(tmp_path / "kv"), *options]) == 2
    assert "--no-token must not be given with --token-file" in capsys.readouterr().err


def test_malformed_requests_log_no_errors(store, caplog):
    with running(store) as port:
        for request_ in (b"\x16\x03\x01\x02\x00", GET[:20], POST + b"Content-Length: 9\r\n\r\n{"):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(request_)
        eventually(lambda: status(port, GET) == 200, "it does not answer")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_password_in_command_line_url_triggers_warning(tmp_path, capsys):
    command = ["serve", str(tmp_path / "kv"), "--capacity", "1MiB", "--port", "0", "--no-token"]
    url = "redis://user:hidden-word@127.0.0.1:1"
    (tmp_path / "directory").write_text(f"{url}\n")
    for options, variable, is_warned in (
        (["--directory", url], "", True),
        (["--directory-file", str(tmp_path / "directory")], "", False),
        ([], url, False),
    ):
        with config.override(directory=variable):
            assert main([*command, *options]) == 2
        out, error = capsys.readouterr()
        assert "metadata server redis://127.0.0.1:1" in error and "hidden-word" not in out + error
        assert error.count("warning: --directory has a login") == is_warned
    assert main([*command, "--directory", url, "--directory-file", "x"]) == 2
    assert "--directory must not be given with --directory-file" in capsys.readouterr().err
