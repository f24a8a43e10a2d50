"""The admin app of a store, and the server that runs it in a thread of its own."""

from collections.abc import Collection
from os import PathLike
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer

from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import InvalidArgument, shown
from mooncake_kernels.http_server import (
    LOCAL_NAMES,
    HostRule,
    HttpServer,
    Limits,
    in_url,
    is_loopback,
    listen,
    listen_unix,
    resolve,
)

from ..store import Store
from .cluster import Cluster
from .models import ErrorAnswer, add_error_handlers
from .routes import cluster_routes, object_routes, pool_routes
from .security import MAX_BODY_BYTES, BodyLimit, HostCheck, TokenCheck, check_token

DESCRIPTION = "Look at a store of KV objects, and after it. Keys are those of the pool."
CLOSE_S = 5  # for requests in flight
LIMITS = Limits(connections=128, per_address=64, body_bytes=MAX_BODY_BYTES)


def make_app(
    store: Store,
    *,
    cluster: Cluster | None = None,
    token: str | None = None,
    host: str = "localhost",
    open_paths: Collection[str] = (),
) -> FastAPI:
    """Make the admin app of a store, to be served by any ASGI server.

    A body may have 64 KiB. How many connections there may be, and how long each may take, is the
    server's: ``AdminServer`` limits both.

    Args:
        store: whose pool is administered; it must stay open.
        cluster: the cluster of the store, such as ``NodeCluster(node)``; None: a single host.
        token: required of callers ("Authorization: Bearer ..."). None: anyone who can connect may
            use the app.
        host: a name of this machine, as localhost, 127.0.0.1 and [::1] are. Where something can be
            had without the token, the app answers only to these, and to no page of another origin,
            so that no web page can reach it through a local user's browser.
        open_paths: what anyone may get without the token, as ``"/metrics"``.

    Raises:
        InvalidArgument: what is no store or no cluster; the token is empty, or not printable ASCII;
            the host is no text.
    """
    if not isinstance(store, Store):
        raise InvalidArgument(f"make_app: store must be a Store, got {shown(store)}")
    if not isinstance(cluster, Cluster | None):
        raise InvalidArgument(f"make_app: cluster must be a Cluster or None, got {shown(cluster)}")
    if token is not None:
        check_token(token)
    if not isinstance(host, str):
        raise InvalidArgument(f"make_app: host must be a str, got {shown(host)}")
    errors: dict[int | str, dict[str, Any]] = {
        "default": {"model": ErrorAnswer, "description": "Why it was not done"}
    }
    app = FastAPI(
        title="mooncake-store",
        version="1",
        description=DESCRIPTION,
        responses=errors,
        # Their scripts come from elsewhere, and could do all that needs no token.
        docs_url=None if token is None else "/docs",
        redoc_url=None if token is None else "/redoc",
        dependencies=[] if token is None else [Depends(HTTPBearer(auto_error=False))],  # for /docs
    )
    app.add_middleware(BodyLimit)  # the innermost
    if token is not None:
        pages = (app.openapi_url, app.docs_url, app.redoc_url, app.swagger_ui_oauth2_redirect_url)
        shown_to_all = [*(page for page in pages if page), *open_paths]
        app.add_middleware(TokenCheck, token=token, open_paths=shown_to_all)
    if token is None or open_paths:
        app.add_middleware(
            HostCheck, rule=HostRule([*LOCAL_NAMES, in_url(host)], any_address=False)
        )
    add_error_handlers(app)
    app.include_router(pool_routes(store, cluster))
    app.include_router(object_routes(store, cluster))
    app.include_router(cluster_routes(cluster))
    return app


class AdminServer(Closeable):
    """Serves a store's admin app until it is closed. A context manager.

    Callers need the token. There is none where only this user can connect (``socket``), and where
    that is wanted (``needs_token=False``).

    Args:
        store: see ``make_app``.
        host: address to listen on.
        port: port to listen on; 0: a free one.
        socket: listen on a Unix socket at this path instead, of mode 0600 in a folder of mode 0700.
        cluster: see ``make_app``.
        token: see ``make_app``.
        needs_token: False: every process of this machine may do everything; the host must be a
            loopback address.
        open_paths: see ``make_app``.
        limits: of the connections.

    Attributes:
        url: address of the server; ``unix://`` and the path for a socket.
        port: it listens on; 0 for a socket.

    Raises:
        InvalidArgument: there is no such host or port, there must be a token, or the socket or its
            folder is not this user's alone.
        OSError: the address is in use, ...
    """

    def __init__(
        self,
        store: Store,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        socket: str | PathLike[str] | None = None,
        cluster: Cluster | None = None,
        token: str | None = None,
        needs_token: bool = True,
        open_paths: Collection[str] = (),
        limits: Limits = LIMITS,
    ):
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65_535:
            raise InvalidArgument(f"AdminServer: port must be from 0 to 65535, got {port!r}")
        if not isinstance(host, str):
            raise InvalidArgument(f"AdminServer: host must be an address, got {host!r}")
        if not isinstance(socket, str | PathLike | None):
            raise InvalidArgument(f"AdminServer: socket must be a path or None, got {socket!r}")
        if token is None and socket is None:
            _check_openness(host, needs_token)
        app = make_app(store, cluster=cluster, token=token, host=host, open_paths=open_paths)
        self._path = None if socket is None else Path(socket).expanduser()
        if self._path is not None:
            listening = listen_unix("AdminServer", self._path)
            self.port, self.url = 0, f"unix://{self._path}"
        else:
            listening = listen("AdminServer", host, port)
            self.port = listening.getsockname()[1]
            self.url = f"http://{in_url(host)}:{self.port}"
        self._server = HttpServer(
            app, listening, name="store-admin", limits=limits, close_s=CLOSE_S
        )
        self._is_closed = False

    def close(self) -> None:
        """Answer the requests in flight, for at most 5 s, then stop. Idempotent.

        Requests that have not arrived whole are refused.
        """
        if not self._is_closed and self._path is not None:
            self._path.unlink(missing_ok=True)
        self._is_closed = True
        self._server.close()


def _check_openness(host: str, needs_token: bool) -> None:
    """Refuse a server without a token, unless it is wanted and of this machine only."""
    if not is_loopback(resolve("AdminServer", host)[1]):
        raise InvalidArgument(
            f"AdminServer: token must be given where others reach the host, got none and {host}"
        )
    if needs_token:
        raise InvalidArgument(
            "AdminServer: token must be given, or socket, or needs_token=False, with which every "
            "process of this machine may use it, got none of them"
        )
