"""No page in a browser reaches a server here, under whatever name or from whatever origin."""

import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.http_server import LOCAL_NAMES, CallerRefused, HostRule, host_name
from mooncake_kernels.metadata.server import MetadataServer
from mooncake_serving.store import Store
from mooncake_serving.store.admin import AdminServer

from ..store.conftest import pool  # noqa: F401
from .http_support import status

LOCAL = HostRule(LOCAL_NAMES, any_address=False)
ANY_ADDRESS = HostRule([*LOCAL_NAMES, "meta.example"], any_address=True)
EVIL = [
    "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "localhost:1@evil",
    "evil@localhost", "localhost:80:80", "localhost:", "localhost:x", "localhost:99999",
    "localhost:-1", "localhost.", " localhost", "localhost, evil", "[::1]evil", "[::1", "::1", "[]",
    "127.1", "2130706433", "0x7f.1", "127.0.0.1/", "localhost\x00", "",
    "localhost:\u0661",
]  # fmt: skip


def refusal(rule: HostRule, **headers: str) -> int:
    """The status of the answer; 0: the request is admitted."""
    given = [(n.replace("_", "-").encode(), v.encode()) for n, v in headers.items()]
    try:
        rule.check(given)
    except CallerRefused as refused:
        return refused.status if str(refused).isascii() else -1
    return 0


@pytest.mark.parametrize("host", EVIL)
def test_foreign_host_names_are_rejected(host):
    assert refusal(LOCAL, host=host) == refusal(ANY_ADDRESS, host=host) == 421


@pytest.mark.parametrize("host", ["localhost", "LocalHost:8080", "127.0.0.1:1", "[::1]:65535"])
def test_local_host_names_are_accepted(host):
    assert refusal(LOCAL, host=host) == refusal(ANY_ADDRESS, host=host) == 0


@pytest.mark.parametrize(
    "host", ["10.0.0.1:8080", "[fd00::1]", "[fe80::1%eth0]:80", "META.example"]
)
def test_wildcard_bind_accepts_addresses_and_allowed_names(host):
    assert (refusal(LOCAL, host=host), refusal(ANY_ADDRESS, host=host)) == (421, 0)


def test_exactly_one_host_header_is_required():
    assert refusal(LOCAL) == 421
    with pytest.raises(CallerRefused):
        LOCAL.check([(b"host", b"localhost"), (b"host", b"localhost")])
    assert host_name("a:1") == "a" and host_name("a:65536") is None


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:81"}, 403),
        ({"origin": "http://localhost:80"}, 0),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"sec_fetch_site": "same-origin"}, 0),
        ({"sec_fetch_site": "none"}, 0),
    ],
)
def test_cross_origin_requests_are_rejected(headers, expected):
    assert refusal(LOCAL, host="localhost:80", **headers) == expected


def test_metadata_server_rejects_browser_writes():
    with MetadataServer("127.0.0.1", 0, ["meta.example"]) as running:
        port = int(running.url.rpartition(":")[2].partition("/")[0])
        for host, more, expected in (
            ("evil.example", "", 421),
            ("127.0.0.1", "Origin: http://evil.example\r\n", 403),
            ("meta.example:99", "", 200),
            (f"127.0.0.1:{port}", "", 200),
        ):
            for method, length in (("PUT", 2), ("GET", 0), ("DELETE", 0)):
                head = f"{method} /metadata?key=a HTTP/1.1\r\nHost: {host}\r\n{more}"
                request = head.encode() + b"Content-Length: %d\r\n\r\n" % length + b"{}"[:length]
                assert status(port, request) == expected
        assert running.values.keys("") == []


@pytest.mark.parametrize("name", ["a:1", "a/b", "", "a b", "http://a", "*"])
def test_invalid_allow_host_is_rejected(name):
    with pytest.raises(InvalidArgument, match="allow_host must be a name"):
        MetadataServer("127.0.0.1", 0, [name])


def test_admin_server_rejects_browser_requests(pool):  # noqa: F811
    store = Store(pool, namespace="a")
    store.put(1, b"x")
    with AdminServer(store, needs_token=False) as running:
        body = b'{"num_bytes": 1}'
        for host, more, expected in (
            ("evil.example", "", 421),
            ("localhost:1@evil", "", 421),
            ("localhost", "Origin: http://evil.example\r\n", 403),
            ("localhost", "Sec-Fetch-Site: cross-site\r\n", 403),
        ):
            head = f"POST /evict HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            request = f"{head}{more}Content-Length: {len(body)}\r\n\r\n".encode() + body
            assert status(running.port, request) == expected
        assert store.get(1) == b"x"
