"""Setting up a store, and calls about the store as a whole."""

import contextlib
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mooncake_kernels.errors import InvalidArgument

from .buffers import Buffers
from .codes import code_of, log
from .http_server import serve_http
from .objects import Objects
from .sessions import Sessions
from .settings import Settings
from .standing import open_objects
from .tasks import Tasks


@dataclass(frozen=True)
class Running:
    """What ``setup`` makes."""

    settings: Settings
    objects: Objects
    buffers: Buffers
    sessions: Sessions
    tasks: Tasks
    process_id: int = field(default_factory=os.getpid)


class Lifecycle:
    """The calls that start and end a store."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._state: Running | None = None
        self._finalizer: weakref.finalize

    def setup(self, *args: Any, **kwargs: Any) -> int:
        """Open the store. A second call has no effect.

        Call it with the arguments of ``Settings``, or with a dict of them, in which numbers may be
        strings.

        Returns:
            0; -600 if an argument is wrong, -1 if it cannot be opened.

        Raises:
            TypeError: an argument is missing, or has a name that is not known, by which engines
                find out what this version supports.
        """
        config = args[0] if len(args) == 1 else kwargs.get("config")
        if len(args) + len(kwargs) == 1 and isinstance(config, Mapping):
            return code_of("setup", lambda: self._setup(Settings.of(config)))
        try:
            settings = Settings(*args, **kwargs)
        except TypeError as error:
            raise TypeError(str(error).replace("Settings.__init__", "setup")) from None
        return code_of("setup", lambda: self._setup(settings))

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Open an existing store, without a pool of its own: see ``Settings``.

        Args:
            mem_pool_size: ignored: memory of callers is registered in place.
            local_buffer_size: as in ``setup``.
            server_address: as ``master_server_addr`` of ``setup``.

        Returns:
            As ``setup``; -600 if the pool does not exist.
        """
        return code_of(
            "setup_dummy",
            lambda: self._setup(
                Settings(
                    "127.0.0.1", "P2PHANDSHAKE", 0, local_buffer_size, "tcp", "", server_address
                )
            ),
        )

    def health_check(self) -> int:
        """Return 0 if the store can be used, 1 if it was not set up here, or closed.

        2 if the directory of a store of many hosts does not answer.
        """
        state = self._state
        if state is None or state.process_id != os.getpid():
            return 1
        return state.objects.health()

    def get_hostname(self) -> str:
        """Return the name of this process; "" before ``setup``."""
        state = self._state
        return "" if state is None else state.objects.hostname(state.settings.local_hostname)

    def close(self) -> int:
        """Leave the store; existing ``BufferHandle``s stay valid. Returns 0.

        In a pool of the host objects stay; those of a process among many hosts go with it.
        """
        with self._starting:
            state, self._state = self._state, None
            if state is not None:
                try:
                    state.tasks.close()
                    state.sessions.close()
                finally:
                    self._finalizer()
        return 0

    def _setup(self, settings: Settings) -> int:
        settings = settings.checked()
        with self._starting:
            if self._state is not None:
                path = self._running().settings.path
                log.warning("setup: it is set up, on %s, and stays so", path)
                return 0
            with contextlib.ExitStack() as opened:
                objects = open_objects(settings)
                opened.callback(objects.close)
                if settings.enable_client_http_server:
                    serve_http(objects, settings.client_http_port, opened)
                self._finalizer = weakref.finalize(self, opened.pop_all().close)
            self._state = Running(settings, objects, Buffers(), Sessions(), Tasks())
        return 0

    def _running(self) -> Running:
        state = self._state
        if state is None:
            raise InvalidArgument("call setup first")
        if state.process_id != os.getpid():  # puts fail, and a thread's lock may stay held
            raise InvalidArgument(
                "the store is of another process: a forked child must make its own"
            )
        return state
