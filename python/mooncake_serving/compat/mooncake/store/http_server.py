"""The HTTP server of a store: health, metrics, and what else the admin server has."""

import contextlib
import secrets

from mooncake_kernels import config

from .codes import log
from .objects import Objects

OPEN_PATHS = ("/health", "/metrics")


def serve_http(objects: Objects, port: int, opened: contextlib.ExitStack) -> None:
    """Serve this process's pool on a port of this machine, until ``opened`` is closed.

    Health and metrics are for every process of the machine, as Mooncake's are; the rest needs the
    token of the setting ``admin_token``, and is there for no one if that is empty.

    Where that is impossible a store goes on without, as Mooncake's does: often all processes of a
    host ask for the same port.

    Args:
        objects: of the store; closed after ``opened``.
        port: of 127.0.0.1; 0: a free one, which is logged.
        opened: closes the server.
    """
    if objects.own is None:
        log.warning("setup: there is no HTTP server: the process has no pool of its own")
        return
    try:  # needs an extra, which a store does without
        from mooncake_serving.store.admin import AdminServer, NodeCluster

        node = objects.node
        cluster = None if node is None else opened.enter_context(NodeCluster(node))
        server = opened.enter_context(
            AdminServer(
                objects.own,
                port=port,
                cluster=cluster,
                token=config.current().admin_token or secrets.token_hex(),
                open_paths=OPEN_PATHS,
            )
        )
    except (ImportError, OSError) as error:
        log.warning("setup: there is no HTTP server on port %d: %s", port, error)
    else:
        log.info("setup: HTTP at %s", server.url)
