"""The app: all routes over one store."""

from collections.abc import Collection
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer

from mooncake_kernels.errors import InvalidArgument, shown
from mooncake_kernels.http_server import LOCAL_NAMES, HostRule, in_url

from ..store import Store
from .cluster import Cluster, cluster_routes
from .errors import add_error_handlers
from .models import ErrorAnswer
from .objects import object_routes
from .pools import pool_routes
from .security import BodyLimit, HostCheck, TokenCheck, check_token

DESCRIPTION = "Look at a store of KV objects, and after it. Keys are those of the pool."


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
