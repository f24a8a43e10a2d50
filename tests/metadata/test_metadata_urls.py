"""URLs of servers: which are valid, and that their secrets stay secret."""

import logging
import sys

import numpy as np
import pytest

from mooncake_kernels import metadata
from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.metadata.url import has_secret, parse_url, without_secrets
from mooncake_kernels.transfer import TransferEngine

from .support import free_port, raw_server

SECRET = "s3cr3t%21"  # written as it must be, in a URL
UNQUOTED = "s3cr3t!"


@pytest.mark.parametrize(
    "url, shown, prefix",
    [
        ("redis://h:1/0", "redis://h:1/0", "mooncake/"),
        ("redis://h", "redis://h", "mooncake/"),
        (f"redis://u:{SECRET}@h:1/2?prefix=a/b/", "redis://h:1/2", "a/b/"),
        (f"rediss://:{SECRET}@[::1]:1?ssl_ca_certs=/x", "rediss://[::1]:1", "mooncake/"),
        (
            f"redis+sentinel://:{SECRET}@h:1,[::1]/kv",
            "redis+sentinel://h:1,[::1]:26379/kv",
            "mooncake/",
        ),
        (f"unix:///run/r.sock?db=1&password={SECRET}", "unix:///run/r.sock", "mooncake/"),
        (f"http://u:{SECRET}@h:1/metadata?prefix=", "http://h:1/metadata", ""),
        ("https://h/m?ssl_ca_certs=/x&prefix=%5B*%5D", "https://h/m", "[*]"),
    ],
)
def test_valid_urls_are_parsed(url, shown, prefix):
    parsed = parse_url("connect", "url", url)
    assert (str(parsed), parsed.prefix) == (shown, prefix)
    assert repr(parsed) == f"MetadataUrl({shown})"
    assert has_secret(url) == ("s3cr3t" in url)
    assert "s3cr3t" not in without_secrets(url)
    with metadata.connect(url) as directory:
        assert directory.url == shown
        assert "s3cr3t" not in repr(directory)


def test_url_like_text_is_shown_without_secrets():
    for text, shown in (
        ("etcd://u:hidden@h:1/x?password=hidden", "etcd://***@h:1/x"),
        ("u:hidden@h:1", "***@h:1"),
        ("etcd://u:hid@den@h", "etcd://***@h"),
        ("/dev/shm/kv", "/dev/shm/kv"),
        ("h:1", "h:1"),
        ("", ""),
    ):
        assert without_secrets(text) == shown
    assert has_secret("redis://u:p@[h") and has_secret("redis://h?password=x")
    assert not has_secret("p2p") and not has_secret("redis://h:1/0?prefix=a")


@pytest.mark.parametrize(
    "url",
    [
        "", "p2p ", "P2P", "etcd", f"etcd://:{SECRET}@h:1", f"//:{SECRET}@h", f"redis:{SECRET}",
        f"redis://:{SECRET}@", "redis://", "redis://h:0", "redis://h:65536", "redis://h:x",
        f"redis://:{SECRET}@h:1x", f"redis://:a/{SECRET}@h:1", f"redis://:a#{SECRET}@h:1",
        f"redis://:a?{SECRET}@h:1", f"redis://u:1/{SECRET}@h:2", f"redis://u:1#{SECRET}@h:2",
        f"redis://u:1?{SECRET}@h:2", f"redis://h/{SECRET}", "redis://h/-1", "redis://h?db=x",
        f"redis://h?socket_timeout=9&{SECRET}", f"redis://h?ssl_ca_certs={SECRET}",
        "redis://h?prefix=a b", "redis://h?prefix=%00", "redis://h?prefix=%C3%A9", "redis://[::1",
        f"unix://h/x{SECRET}", f"unix:{SECRET}", f"http://h/metadata?token={SECRET}",
        f"http://h/x@{SECRET}", f"http://h/\n{SECRET}", f"http://h/é{SECRET}", "ftp://h/x",
        "http://h/a b", "http://a b/metadata", "redis://h/1?db=2",
        None, 5, b"redis://h", np.zeros(2),
    ],
)  # fmt: skip
def test_invalid_urls_are_rejected(url):
    for call, argument in (
        (lambda: metadata.connect(url), "connect: url"),
        (lambda: TransferEngine(metadata=url), "TransferEngine: metadata"),
    ):
        with pytest.raises(InvalidArgument, match=f'{argument} must be "p2p", "redis://') as caught:
            call()
        assert "s3cr3t" not in str(caught.value)
        assert caught.value.__cause__ is None


def test_bad_certificate_file_for_http_is_reported(tmp_path):
    for file in (tmp_path / "missing", tmp_path):
        with metadata.connect(f"https://127.0.0.1:1/m?ssl_ca_certs={file}") as directory:
            with pytest.raises(Unavailable, match=f"https://127.0.0.1:1/m: ssl_ca_certs={file}: "):
                directory.lookup("a")


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
@pytest.mark.parametrize("content", [None, "no certificate"])
def test_bad_certificate_file_for_redis_is_reported(tmp_path, option, content):
    file = tmp_path / "file.pem"
    if content is not None:
        file.write_text(content)
    with metadata.connect(f"rediss://127.0.0.1:1/0?{option}={file}") as directory:
        with pytest.raises(Unavailable, match=f"rediss://127.0.0.1:1/0: {option}={file}"):
            directory.lookup("a")


@pytest.mark.parametrize("name", [None, 5, b"h:1", "é" * 10_000, "h:1\n"])
def test_p2p_lookup_requires_host_and_port(name):
    with metadata.connect("p2p") as directory:
        assert directory.lookup("h:1").address == "h:1"
        with pytest.raises(InvalidArgument, match='^lookup: name must be "host:port", got ') as got:
            directory.lookup(name)
        assert len(str(got.value)) < 200


def unknown_command(connection):
    """A server without AUTH: it quotes what it was told, as Redis does."""
    connection.recv(1 << 16)
    connection.sendall(f"-ERR unknown command `AUTH`, with args: `{UNQUOTED}`\r\n".encode())


def gibberish(connection):
    connection.recv(1 << 16)
    connection.sendall(b"gibberish\r\n\r\n")


@pytest.mark.parametrize("scheme", ["redis", "http", "rediss", "https"])
@pytest.mark.parametrize("behave", [unknown_command, gibberish, None])
def test_secrets_appear_in_no_message(scheme, behave, caplog):
    caplog.set_level(logging.DEBUG)

    def messages(port):
        url = f"{scheme}://user:{SECRET}@127.0.0.1:{port}"
        for call in (
            lambda: TransferEngine("a", metadata=url),
            lambda: metadata.connect(url).lookup("a"),
            lambda: metadata.connect(url).entries(),
        ):
            with pytest.raises(Unavailable, match=f"{scheme}://127.0.0.1:{port}: ") as caught:
                call()
            yield str(caught.value)

    if behave is None:
        found = list(messages(free_port()))
    else:
        with raw_server(behave) as port:
            found = list(messages(port))
    for text in [*found, *(record.getMessage() for record in caplog.records)]:
        assert UNQUOTED not in text and SECRET not in text


@pytest.mark.parametrize("login", [f"{SECRET}@", f":{SECRET}@", f"user:{SECRET}@"])
def test_secrets_quoted_by_the_server_are_masked(login):
    parsed = parse_url("connect", "url", f"https://{login}h/metadata")
    assert str(parsed.error(f"no such user: user {UNQUOTED}")).endswith("no such user: user ***")


def test_missing_redis_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(Unavailable, match=r"redis://h: .*pip install 'mooncake-kernels\[metadata"):
        TransferEngine(metadata="redis://h")
    metadata.connect("http://h/metadata").close()
