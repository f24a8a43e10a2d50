"""``nixl_agent``: NIXL's Python API on our engine."""

import contextlib
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import Peer, Ticket

from . import metadata as wire
from .core import DEFAULT_COMM_PORT, PLUGINS, nixl_thread_sync_t, nixlAgent, nixlAgentConfig
from .descriptors import (
    DescList,
    as_mem_type,
    as_reg_descs,
    as_xfer_descs,
    expand_strided,
    nixl_mem_t,
    nixlRegDList,
    nixlXferDList,
)
from .errors import (
    LOST,
    nixlInvalidParamError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotSupportedError,
)
from .logging import get_logger, shown
from .remotes import Notice, Remote
from .transfers import (
    Job,
    MemoryTransfer,
    Side,
    job_of,
    nixl_prepped_dlist_handle,
    nixl_xfer_handle,
    nixlXferTelemetry,
    side_of,
)

NIXL_INIT_AGENT = "NIXL_INIT_AGENT"
nixl_backend_handle = int
_ABSENT = {nixl_mem_t.OBJ_SEG: "OBJ", nixl_mem_t.BLK_SEG: "BLOCK"}
_log = get_logger(__name__)


@dataclass
class nixl_agent_config:  # noqa: N801
    """The settings of an agent.

    Args:
        enable_prog_thread: no effect: transfers always progress by themselves.
        enable_listen_thread: no effect: metadata is passed by the caller.
        listen_port: no effect.
        capture_telemetry: whether ``get_xfer_telemetry`` may be called;
            ``NIXL_TELEMETRY_ENABLE`` has the last word.
        num_threads: no effect; the setting ``transfer_lanes`` has one.
        backends: those to create; others with ``create_backend``.
        sync_mode: no effect: all calls are thread-safe.
    """

    enable_prog_thread: bool = True
    enable_listen_thread: bool = False
    listen_port: int = DEFAULT_COMM_PORT
    capture_telemetry: bool = False
    num_threads: int = 0
    backends: list[str] = field(default_factory=lambda: ["UCX"])
    sync_mode: nixl_thread_sync_t | None = None

    def __post_init__(self) -> None:
        if self.sync_mode is not None and not isinstance(self.sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode must be a nixl_thread_sync_t, got {self.sync_mode!r:.80}")
        self.enable_pthread = self.enable_prog_thread  # the names of NIXL's attributes
        self.enable_listen = self.enable_listen_thread
        self.port = self.listen_port


class nixl_agent:  # noqa: N801
    """An agent: registers memory and files, and moves data from and to other agents. Thread-safe.

    Names of agents may be texts or bytes. ``backends`` of calls must have been created; they choose
    nothing, because the transport follows from where the memory is.

    Args:
        agent_name: 1 to 1024 bytes; no two agents that know each other may share one.
        nixl_conf: settings; None: the defaults.
        instantiate_all: whether to create all backends, where there are no settings.

    Attributes:
        name: of the agent.
        notifs: what ``update_notifs`` has collected: ``{agent: [bytes]}``.
        backends: those created, and a number each.
        agent: what holds it all.

    Raises:
        nixlInvalidParamError, nixlBackendError: the engine cannot be started so.
    """

    def __init__(
        self,
        agent_name: str,
        nixl_conf: nixl_agent_config | None = None,
        instantiate_all: bool = False,
    ):
        conf = nixl_conf or nixl_agent_config()
        names = PLUGINS if instantiate_all and nixl_conf is None else conf.backends
        settings = nixlAgentConfig(captureTelemetry=conf.capture_telemetry)
        self.name = agent_name
        self.agent = nixlAgent(agent_name, settings)
        self.plugin_list = self.agent.getAvailPlugins()
        self.notifs: dict[str, list[bytes]] = {}
        self.backends: dict[str, nixl_backend_handle] = {}
        self._sent: deque[tuple[Remote, Ticket]] = deque()  # messages that went alone
        for name in names:
            if name in PLUGINS:
                self.create_backend(name)
            else:
                _log.warning("there is no backend %s here, only %s", name, [*PLUGINS])

    # Backends.

    def get_plugin_list(self) -> list[str]:
        """Return the names of backends that can be created."""
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """Return the kinds of memory of a backend, like ``DRAM_SEG``; none if it is unknown."""
        return [*PLUGINS.get(backend, ())]

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """Return a backend's parameters: it has none."""
        return {}

    def get_backend_mem_types(self, backend: str) -> list[str]:
        """Return the kinds of memory of a backend that was created; none otherwise."""
        return self.get_plugin_mem_types(backend) if backend in self.backends else []

    def get_backend_params(self, backend: str) -> dict[str, str]:
        """Return a backend's parameters: it has none."""
        return {}

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:  # noqa: N803
        """Allow the kinds of memory of a backend.

        Args:
            backend: its name.
            initParams: no effect; logged.

        Raises:
            nixlNotFoundError: there is none of that name.
            nixlInvalidParamError: it was created before.
        """
        if backend not in PLUGINS:
            raise nixlNotFoundError(
                f"create_backend: backend must be one of {', '.join(PLUGINS)}, got {backend!r:.80}"
            )
        if backend in self.backends:
            raise nixlInvalidParamError(f"create_backend: {backend} must be created once")
        if initParams:
            _log.info("create_backend: initParams of %s have no effect: %s", backend, initParams)
        self.backends[backend] = len(self.backends) + 1

    # Memory.

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlRegDList:
        """Return a list of descriptors for ``register_memory``.

        Args:
            descs: a tensor, a list of them, tuples (address, bytes, device, text), ``[n, 3]``
                integers, or such a list, which is returned.
            mem_type: ``DRAM``, ``VRAM`` or ``FILE``; not needed for tensors.

        Raises:
            nixlInvalidParamError: it is none of these.
        """
        return as_reg_descs(descs, mem_type)

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlXferDList:
        """Return a list of descriptors for transfers: as above, tuples (address, bytes, device)."""
        return as_xfer_descs(descs, mem_type)

    def get_serialized_descs(self, descs: DescList) -> bytes:
        """Return a list of descriptors as bytes, for another agent; see ``wire``."""
        return wire.encode_descs(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> DescList:
        """Return the list of descriptors of such bytes.

        Raises:
            nixlMismatchError: they are not such bytes.
        """
        return wire.decode_descs(serialized_descs)

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: list[str] | tuple = ()
    ) -> nixlRegDList:
        """Register memory or files: other agents may read and write memory from now on.

        Args:
            reg_list: as for ``get_reg_descs``. The caller keeps memory alive. The device of a file
                is its descriptor, of which a duplicate is kept; or any number, if the text opens
                it: ``"rw:/path"``, ``"rw,create:/path"``.
            mem_type: as for ``get_reg_descs``.
            backends: see the class.

        Returns:
            The list, for ``deregister_memory``.

        Raises:
            nixlInvalidParamError: an argument is wrong, or memory overlaps other registered memory
                without lying inside of it.
            nixlNotFoundError: no backend that was created takes this kind of memory.
            nixlNotSupportedError: it is OBJ or BLOCK.
            nixlBackendError: it is no such memory or file, or a NIC or driver refuses it.
        """
        descs = as_reg_descs(reg_list, mem_type)
        self._check_backends("register_memory", backends)
        self._check_kind("register_memory", descs.getType())
        if descs.getType() == nixl_mem_t.FILE_SEG:
            self.agent.files.register(descs)
        else:
            self.agent.memory.register(descs)
        return descs

    def deregister_memory(self, dereg_list: nixlRegDList, backends: list[str] | tuple = ()) -> None:
        """Undo a registration. Transfers that use the memory fail; those of files go on.

        Memory that was registered together with memory next to it, in one call, stays accessible
        to those who know its address until all of that is deregistered.

        Raises:
            nixlNotFoundError: some of it is not registered.
        """
        descs = as_reg_descs(dereg_list, None)
        if descs.getType() == nixl_mem_t.FILE_SEG:
            self.agent.files.deregister(descs)
        else:
            self.agent.memory.deregister(descs)

    def query_memory(
        self, reg_list: Any, backend: str, mem_type: str | None = None
    ) -> list[dict[str, str] | None]:
        """Return ``{"size", "mode", "mtime"}`` of files, by their texts; None for those missing.

        Raises:
            ValueError: the backend was not created.
            nixlNotSupportedError: it is not for files.
        """
        if backend not in self.backends:
            raise ValueError(
                f"query_memory: backend must be one of {[*self.backends]}, got {backend!r:.80}"
            )
        descs = as_reg_descs(reg_list, mem_type)
        if descs.getType() != nixl_mem_t.FILE_SEG or "FILE_SEG" not in PLUGINS[backend]:
            raise nixlNotSupportedError(
                "query_memory: reg_list must be files, and backend one for them, got "
                f"{descs.getType().name} by {backend}"
            )
        return self.agent.files.query(descs)

    # Other agents.

    def get_agent_metadata(self) -> bytes:
        """Return what another agent needs to use this one's memory; see ``wire``."""
        return wire.encode_metadata(self.agent.remotes.metadata())

    def get_partial_agent_metadata(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: list[str] | tuple = ()
    ) -> bytes:
        """Return the part of it that is about some registered memory, which adds to other parts.

        Args:
            descs: registered memory; may be empty.
            inc_conn_info: whether to include where the agent listens; an empty list always does.
            backends: see the class.
        """
        descs = as_reg_descs(descs, None)
        self._check_backends("get_partial_agent_metadata", backends)
        if len(descs):
            ranges = self.agent.memory.ranges(descs.getType())
            ranges.check("get_partial_agent_metadata", descs.rows, self.name)
        part = self.agent.remotes.metadata({descs.getType(): descs.rows})
        if not inc_conn_info and len(descs):
            part.address = part.machine = ""
        return wire.encode_metadata(part)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Know another agent from now on, or what has changed of it. Does not connect.

        Returns:
            Its name, in bytes, as NIXL does.

        Raises:
            nixlMismatchError: these are no metadata of this library.
            nixlInvalidParamError: they are this agent's own.
            nixlNotAllowedError: another engine has that name; ``remove_remote_agent`` first.
        """
        decoded = wire.decode_metadata(metadata)
        self.agent.remotes.add(decoded)
        return decoded.name.encode()

    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Forget another agent, and disconnect; transfers to it fail. No error if it is unknown."""
        self.agent.remotes.remove(_text(agent))

    def check_remote_metadata(self, agent: str | bytes, descs: nixlXferDList | None = None) -> bool:
        """Return whether an agent is known, and descriptors lie in its memory. Does not ask it.

        False also after a transfer has shown that it is gone: add it again then.
        """
        remote = self.agent.remotes.find(_text(agent))
        if remote is None:
            return False
        if descs is None or not len(descs):
            return True
        if descs.getType() not in (nixl_mem_t.DRAM_SEG, nixl_mem_t.VRAM_SEG):
            return False
        return remote.ranges(descs.getType()).first_outside(descs.rows) is None

    def make_connection(self, remote_agent: str | bytes, backends: list[str] | tuple = ()) -> None:
        """Begin to connect to another agent. A failure shows in the transfers to it.

        Raises:
            nixlNotFoundError: it is not known.
        """
        self._check_backends("make_connection", backends)
        self.agent.remotes.get("make_connection", _text(remote_agent)).connect()

    def send_local_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Not supported."""
        raise _by_caller("send_local_metadata")

    def send_partial_agent_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Not supported."""
        raise _by_caller("send_partial_agent_metadata")

    def fetch_remote_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Not supported."""
        raise _by_caller("fetch_remote_metadata")

    def invalidate_local_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Not supported."""
        raise _by_caller("invalidate_local_metadata")

    # Transfers.

    def prep_xfer_dlist(
        self,
        agent_name: str | bytes,
        xfer_list: Any,
        mem_type: str | None = None,
        backends: list[str] | tuple = (),
    ) -> nixl_prepped_dlist_handle:
        """Check descriptors once, for transfers that choose from them by index.

        Args:
            agent_name: ``"NIXL_INIT_AGENT"`` or ``""``: this agent's own, the local side; another
                agent's name; this one's: its own memory or files, as the remote side.
            xfer_list: as for ``get_xfer_descs``; or ``[n, 5]`` integers (address, bytes, device,
                stride, count): ``count`` descriptors each, ``stride`` bytes apart.
            mem_type: as for ``get_xfer_descs``.
            backends: see the class.

        Raises:
            nixlNotFoundError: no such agent; or a descriptor is not in its registered memory, as of
                its metadata; the message names it.
            nixlInvalidParamError: an argument is wrong.
            ValueError: ``[n, 5]`` without ``mem_type``.
        """
        op = "prep_xfer_dlist"
        if isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError(f"{op}: mem_type must be given for [n, 5] descriptors")
            kind, rows = as_mem_type(op, mem_type), expand_strided(xfer_list)
        else:
            descs = as_xfer_descs(xfer_list, mem_type)
            kind, rows = descs.getType(), descs.rows
        self._check_backends(op, backends)
        return nixl_prepped_dlist_handle(self._side(op, _text(agent_name), kind, rows))

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Any,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Any,
        notif_msg: bytes | str = b"",
        backends: list[str] | tuple = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """Return a transfer of some descriptors of prepared lists.

        Equivalent to, for ``READ``; ``WRITE`` is the reverse::

            for i, j in zip(local_indices, remote_indices):
                local[i] = remote[j]

        Args:
            operation: ``READ`` or ``WRITE``.
            local_xfer_side: from ``prep_xfer_dlist``, of this agent.
            local_indices: ``[n]`` integers, as an array or list.
            remote_xfer_side: from ``prep_xfer_dlist``.
            remote_indices: ``[n]`` integers; each descriptor is as long as the local one.
            notif_msg: arrives at the remote agent after the data; empty: none.
            backends: see the class.
            skip_desc_merge: no effect.

        Raises:
            nixlInvalidParamError: an argument is wrong, an index out of range, or the sides differ
                in number or lengths.
            nixlNotFoundError: the remote agent was removed, or lost, since then.
        """
        op = "make_prepped_xfer"
        if backends:
            self._check_backends(op, backends)
        near, far = side_of(op, local_xfer_side), side_of(op, remote_xfer_side)
        if near.remote is not None or (far.remote is None and far.devices is None):
            raise nixlInvalidParamError(
                f"{op}: local_xfer_side must be of this agent (NIXL_INIT_AGENT), and "
                "remote_xfer_side of another, or of this one by its name"
            )
        return self._transfer(
            op,
            operation,
            near.take(op, "local_indices", local_indices),
            far.take(op, "remote_indices", remote_indices),
            notif_msg,
        )

    def initialize_xfer(
        self,
        operation: str,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: bytes | str = b"",
        backends: list[str] | tuple = (),
    ) -> nixl_xfer_handle:
        """Return a transfer of all descriptors of two lists: see ``make_prepped_xfer``."""
        op = "initialize_xfer"
        if backends:
            self._check_backends(op, backends)
        lists = as_xfer_descs(local_descs, None), as_xfer_descs(remote_descs, None)
        near = self._side(op, NIXL_INIT_AGENT, lists[0].getType(), lists[0].rows)
        far = self._side(op, _text(remote_agent), lists[1].getType(), lists[1].rows)
        return self._transfer(op, operation, near, far, notif_msg)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes | str = b"") -> str:
        """Start a transfer, or start it again once it has ended.

        It does not wait for the peer. Up to 2 MiB between processes of one machine is copied by
        this call, in a millisecond at most; what is left then goes on by itself.

        Args:
            handle: the transfer.
            notif_msg: for this and later posts; empty: that of the handle.

        Returns:
            ``DONE`` if it is over already, else ``PROC``. Over a network nobody has looked yet.

        Raises:
            nixlRepostActiveError: it is still running.
            nixlNotFoundError: the remote agent was removed, or lost.
            nixlBackendError: files cannot be notified; or as for ``check_xfer_state``.
        """
        job = job_of("transfer", handle)
        remote = job.remote
        if remote is not None and not remote.is_known:
            self.agent.remotes.get("transfer", remote.name)
            raise nixlNotFoundError(
                f"transfer: handle must be of an agent that is known, got {remote.name}, which "
                "was removed or lost since"
            )
        message = handle.message = notif_msg or handle.message
        return job.post(self.agent.sender.pieces("transfer", message) if message else [])

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """Return ``DONE``, ``PROC`` or ``ERR``. Does not block.

        A failure is raised once, as the exception of its kind; later calls return ``ERR``. Local
        memory is no longer touched then.

        Raises:
            nixlNotPostedError: it was not posted.
            nixlRemoteDisconnectError: the peer is gone, was restarted, cannot be reached, or has
                not answered within the deadline.
            nixlCancelledError: this side closed what it needs, as the agent or memory.
            nixlNotAllowedError: the peer does not trust this side.
            nixlInvalidParamError: targets overlap, or local memory is no longer registered.
            nixlBackendError: anything else, such as memory that is no longer registered there.
        """
        return job_of("check_xfer_state", handle).state()

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """Free a transfer; one that runs is cancelled first: see ``nixl_xfer_handle.release``."""
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        """Free a prepared list. Transfers that were made of it go on."""
        handle.release()

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        """Return the first created backend that takes the remote side's memory."""
        kind = job_of("query_xfer_backend", handle).backend_kind.name
        return next(name for name in self.backends if kind in PLUGINS[name])

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        """Return (0, 0, ``UNKNOWN``): nothing is estimated."""
        job_of("estimate_xfer_cost", req_handle)
        return 0, 0, "UNKNOWN"

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlXferTelemetry:
        """Return how a transfer went that is done.

        Raises:
            nixlNoTelemetryError: ``NIXL_TELEMETRY_ENABLE`` is off, or is not set and the agent was
                created without ``capture_telemetry``.
            nixlInvalidParamError: it is still running, or has failed.
        """
        if not self.agent.captures_telemetry:
            raise nixlNoTelemetryError(
                "get_xfer_telemetry: the agent must be created with capture_telemetry, or "
                "NIXL_TELEMETRY_ENABLE be on"
            )
        job = job_of("get_xfer_telemetry", handle)
        if (state := job.state()) != "DONE":
            raise nixlInvalidParamError(f"get_xfer_telemetry: handle must be DONE, got {state}")
        return job.telemetry()

    # Notifications.

    def get_new_notifs(self, backends: list[str] | tuple = ()) -> dict[str, list[bytes]]:
        """Return the notifications that have come since the last call, by agent, in order."""
        self._check_backends("get_new_notifs", backends)
        self._sweep_sent()
        return self.agent.inbox.take()

    def update_notifs(self, backends: list[str] | tuple = ()) -> dict[str, list[bytes]]:
        """Add new notifications to ``notifs``, and return that."""
        for name, messages in self.get_new_notifs(backends).items():
            self.notifs.setdefault(name, []).extend(messages)
        return self.notifs

    def check_remote_xfer_done(
        self,
        remote_agent_name: str | bytes,
        lookup_tag: bytes,
        backends: list[str] | tuple = (),
        tag_is_prefix: bool = True,
    ) -> bool:
        """Return whether a notification with a tag has come from an agent, and forget that one.

        Args:
            remote_agent_name: of the sender.
            lookup_tag: what it begins with.
            backends: see the class.
            tag_is_prefix: False: what it contains.
        """
        messages = self.update_notifs(backends).get(_text(remote_agent_name), [])
        for index, message in enumerate(messages):
            if message.startswith(lookup_tag) if tag_is_prefix else lookup_tag in message:
                del messages[index]
                return True
        return False

    def send_notif(
        self, remote_agent_name: str | bytes, notif_msg: bytes | str, backend: str | None = None
    ) -> None:
        """Send a notification alone, after those of earlier transfers. Does not block.

        A failure that comes later is logged; nothing else tells of it.

        Args:
            remote_agent_name: to whom.
            notif_msg: at most 16 MiB.
            backend: see the class.

        Raises:
            nixlNotFoundError: that agent is not known.
            nixlInvalidParamError: the message is too large, or no message.
        """
        if backend is not None:
            self._check_backends("send_notif", [backend])
        pieces = self.agent.sender.pieces("send_notif", notif_msg)
        remote = self.agent.remotes.get("send_notif", _text(remote_agent_name))
        self._sweep_sent()

        def send(peer: Peer) -> None:
            for piece in pieces:
                self._sent.append((remote, self.agent.engine.write(peer, [], notify=piece)))

        remote.post(Notice(send, lambda error: self._not_sent(remote, error)))

    def _sweep_sent(self) -> None:
        """Log what became of messages that went alone."""
        for _ in range(len(self._sent)):
            with contextlib.suppress(IndexError):  # another thread has taken it
                remote, ticket = self._sent.popleft()
                if not ticket.done:
                    self._sent.append((remote, ticket))
                    continue
                try:
                    ticket.wait()
                except TransferError as error:
                    self._not_sent(remote, error)

    def _not_sent(self, remote: Remote, error: Exception) -> None:
        _log.error("a notification to agent %s failed: %s", shown(remote.name), shown(error))
        if isinstance(error, TransferError) and error.kind in LOST:
            self.agent.remotes.lose(remote, error)

    # What the calls share.

    def _transfer(
        self, op: str, operation: str, near: Side, far: Side, message: bytes | str
    ) -> nixl_xfer_handle:
        if operation not in ("READ", "WRITE"):
            raise nixlInvalidParamError(
                f"{op}: operation must be READ or WRITE, got {operation!r:.80}"
            )
        if near.devices is not None:
            raise nixlInvalidParamError(f"{op}: the local side must be memory, got files")
        near.check_matches(op, far)
        job: Job
        if far.devices is not None:
            job = self.agent.files.transfer(operation, near, far)
        else:
            agent, remote = self.agent, far.remote
            assert remote is not None
            if not remote.is_known:
                raise nixlNotFoundError(
                    f"{op}: remote_xfer_side must be of an agent that is known, got "
                    f"{remote.name}, which was removed or lost since: prepare it again"
                )
            job = MemoryTransfer(agent.engine, operation, near, far, remote, agent.remotes.lose)
        return nixl_xfer_handle(job, message)

    def _side(self, op: str, agent: str, kind: nixl_mem_t, rows: np.ndarray) -> Side:
        """Check descriptors of an agent."""
        self._check_kind(op, kind)
        is_local = agent in (NIXL_INIT_AGENT, "")
        if kind == nixl_mem_t.FILE_SEG:
            if agent != self.name:
                raise nixlInvalidParamError(
                    f"{op}: files must be a remote side of this agent, {self.name}, got {agent!r}"
                )
            return replace(Side.of(kind, rows, None), files=self.agent.files.find(op, rows))
        if is_local:
            self.agent.memory.ranges(kind).check(op, rows, self.name)
            return Side.of(kind, rows, None)
        remote = self.agent.remotes.get(op, agent)
        remote.ranges(kind).check(op, rows, agent)
        return Side.of(kind, rows, remote)

    def _check_kind(self, op: str, kind: nixl_mem_t) -> None:
        if kind in _ABSENT:
            raise nixlNotSupportedError(
                f"{op}: mem_type must be DRAM, VRAM or FILE, got {_ABSENT[kind]}: there is no "
                "backend of object stores or raw blocks here"
            )
        if not any(kind.name in PLUGINS[name] for name in self.backends):
            raise nixlNotFoundError(
                f"{op}: a backend that takes {kind.name} must be created, got {[*self.backends]}"
            )

    def _check_backends(self, op: str, backends: list[str] | tuple) -> None:
        for name in backends or ():
            if name not in self.backends:
                raise nixlNotFoundError(
                    f"{op}: backends must be created ones, {[*self.backends]}, got {name!r:.80}"
                )


def _text(name: str | bytes) -> str:
    return name.decode(errors="backslashreplace") if isinstance(name, bytes) else name


def _by_caller(op: str) -> nixlNotSupportedError:
    return nixlNotSupportedError(
        f"{op}: there is no metadata server or listener for it here: pass get_agent_metadata() to "
        "the other side's add_remote_agent()"
    )
