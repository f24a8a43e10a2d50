from urllib.parse import quote

import pytest

from mooncake_kernels import config

from ..conftest import skip
from .support import (
    TTL_S,
    HttpServer,
    MooncakeServer,
    RedisServer,
    has_tls,
    impatience,
    make_certificate,
    redis_program,
)


@pytest.fixture
def short_ttl():
    """Names of dead engines expire soon."""
    with config.override(metadata_ttl_s=TTL_S):
        yield


@pytest.fixture
def impatient():
    """A server that does not answer is soon abandoned."""
    with impatience():
        yield


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """One of each kind, started on first use."""
    running = {}

    def start(kind):
        if kind not in running:
            folder = tmp_path_factory.mktemp("redis")
            running[kind] = RedisServer(folder) if kind == "redis" else HttpServer()
        return running[kind]

    yield start
    for server in running.values():
        server.stop()


@pytest.fixture(params=["redis", "http"])
def url(request, servers):
    """A permanent server of each kind in turn; every test has its own prefix."""
    return f"{servers(request.param).url}?prefix={quote(request.node.name.replace(' ', ''))}/"


@pytest.fixture(params=["redis", "http"])
def server(request, tmp_path):
    """A server that may be stopped and started."""
    server = RedisServer(tmp_path) if request.param == "redis" else HttpServer()
    yield server
    server.stop()


@pytest.fixture(params=[False, True], ids=["refuses", "same_again"])
def mooncake_server(request):
    """A server that behaves like Mooncake's."""
    server = HttpServer(lambda port: MooncakeServer(port, request.param))
    yield server
    server.stop()


@pytest.fixture
def mooncake_url(mooncake_server):
    return mooncake_server.url


@pytest.fixture
def tls_url(tmp_path):
    """Of a Redis that accepts TLS only, with its own certificate."""
    if not has_tls(redis_program()):
        skip("redis", f"{redis_program()} was built without TLS")
    certificate, key = make_certificate(tmp_path)
    options = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    server = RedisServer(tmp_path, *options, "--tls-auth-clients", "no", tls=True)
    yield f"rediss://127.0.0.1:{server.port}/0?ssl_ca_certs={certificate}"
    server.stop()
