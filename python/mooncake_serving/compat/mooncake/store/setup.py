"""How a store is set up: what it is made of, and its start and end."""

import contextlib
import os
import secrets
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mooncake_kernels import config
from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.metadata.url import without_secrets

from .. import names
from ..master_client import SCHEMES, directory_at
from .backend import LocalBackend
from .buffers import Buffers
from .codes import code_of, log
from .pools import join, new_pool, open_pool, open_store
from .replicas import Tasks
from .sessions import OpenSessions
from .settings import Settings

OPEN_PATHS = ("/health", "/metrics")


@dataclass(frozen=True)
class Running:
    """What ``setup`` makes."""

    settings: Settings
    backend: LocalBackend
    buffers: Buffers
    sessions: OpenSessions
    tasks: Tasks
    process_id: int = field(default_factory=os.getpid)


class Setup:
    """A store from ``setup`` to ``close``. Thread-safe."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._state: Running | None = None
        self._finalizer: weakref.finalize

    def start(self, op: str, *args: Any, **kwargs: Any) -> int:
        """Open the store with the arguments of ``Settings``, or with a dict of them: 0, or a code.

        Raises:
            TypeError: an argument is missing, or has a name that is not known.
        """
        config = args[0] if len(args) == 1 else kwargs.get("config")
        if len(args) + len(kwargs) == 1 and isinstance(config, Mapping):
            return code_of(op, lambda: self._start(Settings.of(config)))
        try:
            settings = Settings(*args, **kwargs)
        except TypeError as error:
            raise TypeError(str(error).replace("Settings.__init__", "setup")) from None
        return code_of(op, lambda: self._start(settings))

    def running(self) -> Running:
        """What was set up.

        Raises:
            InvalidArgument: nothing was, or it was in another process.
        """
        state = self._state
        if state is None:
            raise InvalidArgument("call setup first")
        if state.process_id != os.getpid():  # puts fail, and a thread's lock may stay held
            raise InvalidArgument(
                "the store is of another process: a forked child must make its own"
            )
        return state

    def health(self) -> int:
        """0; 1 if it was not set up here, or closed; 2 if the directory does not answer."""
        state = self._state
        if state is None or state.process_id != os.getpid():
            return 1
        return state.backend.health()

    def hostname(self) -> str:
        """The name of this process; "" before ``setup``."""
        state = self._state
        return "" if state is None else state.backend.hostname(state.settings.local_hostname)

    def close(self) -> None:
        """End it. Idempotent."""
        with self._starting:
            state, self._state = self._state, None
            if state is not None:
                try:
                    state.tasks.close()
                    state.sessions.close()
                finally:
                    self._finalizer()

    def _start(self, settings: Settings) -> int:
        settings = settings.checked()
        with self._starting:
            if self._state is not None:
                path = self.running().settings.path
                log.warning("setup: it is set up, on %s, and stays so", path)
                return 0
            with contextlib.ExitStack() as opened:
                backend = open_backend(settings)
                opened.callback(backend.close)
                if settings.enable_client_http_server:
                    _serve_http(backend, settings.client_http_port, opened)
                self._finalizer = weakref.finalize(self, opened.pop_all().close)
            self._state = Running(settings, backend, Buffers(), OpenSessions(), Tasks())
        return 0


def open_backend(settings: Settings) -> LocalBackend:
    """Open what ``master_server_addr`` names.

    Raises:
        InvalidArgument, Unavailable, OSError: a setting is wrong, or something cannot be opened.
    """
    names.metadata_of(settings.metadata_server)
    names.transports_of(settings.protocol)
    address = settings.master_server_addr
    if address.startswith(SCHEMES):
        return _open_cluster(settings)
    if "://" in address:
        raise Unavailable(
            "master_server_addr must be the path of a pool (/dev/shm/kv), the URL of a directory "
            "(redis://host:port) or the host:port of a master, for there is no client of "
            f"{address.partition('://')[0]:.20} here, got {without_secrets(address):.80}"
        )
    if "/" not in settings.path:
        return _open_cluster(replace(settings, master_server_addr=directory_at(address)))
    namespace = settings.namespace
    store = open_store(settings, partial(open_pool, settings), namespace=namespace)
    return LocalBackend(store, store, namespace)


def _open_cluster(settings: Settings) -> LocalBackend:
    """Join with a pool of this process alone, as Mooncake's clients do."""
    # These need an extra, which a pool of one host does without.
    from mooncake_serving.store import ClusterStore, directory

    from .cluster_backend import ClusterBackend
    from .segments import Segments

    namespace = settings.namespace
    with contextlib.ExitStack() as opened:
        servers = opened.enter_context(directory.connect(settings.master_server_addr))
        store = None
        if settings.global_segment_size:
            pool = partial(new_pool, settings.global_segment_size, None)
            store = opened.enter_context(open_store(settings, pool, namespace=namespace))
        elif settings.enable_ssd_offload:
            raise InvalidArgument(
                "global_segment_size must be above 0 with enable_ssd_offload, which needs a pool "
                "of this process, got 0"
            )
        node = join(settings, store, servers, opened)
        segments = Segments(settings, servers, node)
        opened.callback(segments.close)
        cluster = ClusterStore(node, namespace=None if store else namespace)
        return ClusterBackend(cluster, servers, segments, namespace, opened.pop_all())


def _serve_http(backend: LocalBackend, port: int, opened: contextlib.ExitStack) -> None:
    """Serve this process's pool on a port of this machine, until ``opened`` is closed.

    Health and metrics are for every process of the machine, as Mooncake's are; the rest needs the
    token of the setting ``admin_token``, and is not served if that is empty.

    If that is impossible the store works without it, as Mooncake's does: often all processes of a
    host are given the same port.

    Args:
        backend: of the store; closed after ``opened``.
        port: of 127.0.0.1; 0: a free one, which is logged.
        opened: closes the server.
    """
    if backend.own is None:
        log.warning("setup: there is no HTTP server: the process has no pool of its own")
        return
    try:  # needs an extra, which a store does without
        from mooncake_serving.store.admin import AdminServer, NodeCluster

        node = backend.node
        cluster = None if node is None else opened.enter_context(NodeCluster(node))
        server = opened.enter_context(
            AdminServer(
                backend.own,
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
