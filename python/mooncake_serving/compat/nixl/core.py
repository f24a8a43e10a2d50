"""``nixl._bindings.nixlAgent``: what an agent holds. ``nixl_agent`` is the API in front of it."""

import enum
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument, Unavailable

from .errors import nixlBackendError, nixlInvalidParamError
from .files import Files
from .memory import Memory
from .notifications import Inbox, Sender
from .remotes import Remotes

DEFAULT_COMM_PORT = 8888
PLUGINS: dict[str, tuple[str, ...]] = {  # backends, and the kinds of memory they take
    "UCX": ("DRAM_SEG", "VRAM_SEG"),
    "POSIX": ("DRAM_SEG", "FILE_SEG"),
    "GDS": ("DRAM_SEG", "VRAM_SEG", "FILE_SEG"),
    "GDS_MT": ("DRAM_SEG", "VRAM_SEG", "FILE_SEG"),
}
# What UCX_TLS may name, and the transports of ours it allows.
_UCX: dict[str, tuple[str, ...]] = {
    "all": ("shm", "cuda_ipc", "rdma", "tcp"),
    "tcp": ("tcp",),
    "self": (),  # within the process, which is always allowed
    **dict.fromkeys(("cuda", "cuda_ipc"), ("cuda_ipc",)),
    **dict.fromkeys(("sm", "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem"), ("shm",)),
    **dict.fromkeys(
        [
            "ib",
            *("rc", "rc_v", "rc_x", "rc_mlx5", "rc_verbs"),
            *("ud", "ud_v", "ud_x", "ud_mlx5", "ud_verbs"),
            *("dc", "dc_x", "dc_mlx5"),
        ],
        ("rdma",),
    ),
}


class nixl_thread_sync_t(enum.IntEnum):  # noqa: N801
    """How calls of several threads are kept apart: always so that all are safe."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = 0


@dataclass
class nixlAgentConfig:  # noqa: N801
    """The settings of a ``nixlAgent``; all but ``captureTelemetry`` have no effect here."""

    useProgThread: bool = True  # noqa: N815
    useListenThread: bool = False  # noqa: N815
    listenPort: int = DEFAULT_COMM_PORT  # noqa: N815
    syncMode: int = nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT  # noqa: N815
    pthrDelay: int = 0  # noqa: N815
    lthrDelay: int = 0  # noqa: N815
    captureTelemetry: bool = False  # noqa: N815


class nixlAgent:  # noqa: N801
    """An engine, the memory and files it has registered, and the agents it knows.

    It is closed when it is dropped, or the interpreter exits.

    Args:
        name: of the agent.
        config: its settings.

    Raises:
        nixlInvalidParamError: the name is empty or longer than 1024 bytes.
        nixlBackendError: the engine cannot be started.
    """

    def __init__(self, name: str, config: nixlAgentConfig):
        if not isinstance(name, str) or not 1 <= _num_bytes(name) <= 1024:
            raise nixlInvalidParamError(
                f"nixl_agent: agent_name must be a text of 1 to 1024 bytes, got {name!r:.80}"
            )
        self.name = name
        self.captures_telemetry = _is_on("NIXL_TELEMETRY_ENABLE", config.captureTelemetry)
        try:
            self.engine = mk.TransferEngine(transports=transports_of())
        except (InvalidArgument, Unavailable, OSError) as error:
            raise nixlBackendError(f"nixl_agent: {error}") from None
        self.memory = Memory(self.engine)
        self.files = Files(self.engine)
        self.remotes = Remotes(self.engine, name, self.memory)
        self.sender = Sender(name)
        self.inbox = Inbox(self.engine)
        self._finalizer = weakref.finalize(self, _close, self.engine, self.remotes, self.files)

    def getAvailPlugins(self) -> list[str]:  # noqa: N802
        """The names of backends."""
        return [*PLUGINS]

    def close(self) -> None:
        """Cancel transfers, forget agents and memory, stop listening. Idempotent."""
        self._finalizer()


def transports_of(environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """The transports that ``UCX_TLS`` allows, with those of this process and of files.

    None: all, as if it is empty. A name that is not known allows nothing; ``^`` in front excludes.

    Raises:
        nixlInvalidParamError: it allows none of ours.
    """
    text = environ.get("UCX_TLS", "").strip() or "all"
    names = {name.strip() for name in text.removeprefix("^").split(",")}
    listed = {transport for name in names for transport in _UCX.get(name, ())}
    if text.startswith("^"):
        listed = {*_UCX["all"]} - listed
    if listed == {*_UCX["all"]}:
        return None
    if not listed and (text.startswith("^") or "self" not in names):
        raise nixlInvalidParamError(
            f"nixl_agent: UCX_TLS must allow one of {', '.join(_UCX)}, got {text!r:.80}"
        )
    return ["local", "file", *sorted(listed)]


def _num_bytes(text: str) -> int:
    """In UTF-8; 0 if it cannot be encoded."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


def _is_on(variable: str, otherwise: bool) -> bool:
    """What a variable says; where it is not set, what the program says."""
    value = os.environ.get(variable, "").lower()
    return value in ("1", "y", "yes", "true", "on") if value else otherwise


def _close(engine: mk.TransferEngine, remotes: Remotes, files: Files) -> None:
    files.close()
    engine.close()
    remotes.close()
