"""``TransferEngine``: its lifetime, its regions and its peers."""

import warnings
import weakref
from collections.abc import Collection
from typing import Any

from .. import _host
from .._arguments import as_bool, as_integer, as_seconds
from ..buffers import as_buffer
from ..closeable import Closeable
from ..errors import InvalidArgument, TransferError, Unavailable, shown
from ..topology import Topology
from . import log
from .arguments import as_checksum, as_deadline
from .files import is_file, open_file
from .handles import ACCESS, Access, Peer, Region
from .inspection import Inspection
from .names import Names, Options
from .nics import NicChoice, choose_nics
from .objects import (
    ObjectCalls,
)
from .requests import Requests
from .security import Tls, Trust

TRANSPORTS = ("local", "shm", "cuda_ipc", "rdma", "tcp", "file")

_in_use: list[set[Region]] = []  # of closed engines; never freed: a peer may still write there


class TransferEngine(Requests, Inspection, ObjectCalls, Closeable):
    """Register memory, listen for peers, and write to and read from their memory.

    Thread-safe. ``close()`` fails pending requests and closes peers and regions. An engine that is
    left open is closed when the interpreter exits.

    Args:
        name: under p2p, the ``"host:port"`` to listen on, where peers reach this engine. Port 0
            takes a free one; None means the setting ``listen_host`` (127.0.0.1) and a free port.
            With a metadata server, the name peers open it by: 1 to 255 printable ASCII characters
            other than space and ``/``; None generates one.
        metadata: how peers are found. ``"p2p"``: a peer's name is its address. The URL of a server
            (``redis://host:port/db``, ``http://host:port/metadata``; see ``mk.metadata``): the
            engine is published there until it is closed. If it dies, its entry expires after the
            setting ``metadata_ttl_s``. If the server goes away, the entry is published again once
            it is back.
        listen: with a metadata server, ``"host:port"`` to listen on; None as for ``name``.
        transports: the allowed ones, of ``local``, ``shm``, ``cuda_ipc``, ``rdma``, ``tcp`` and
            ``file``; there is no fallback to any other. None: ``local`` for a peer in this process;
            ``shm`` for one on this machine, with ``cuda_ipc`` for its GPU memory; for others
            ``rdma`` if both sides have a NIC for it (but not with ``tls``, which does not cover
            it), else ``tcp``; ``file`` for files. An engine without ``tcp`` and ``rdma`` does not
            listen for other machines, one without ``shm`` and ``cuda_ipc`` not for other processes
            of this machine, and one without ``local`` or ``tcp`` does not let its memory be moved
            by that transport.
        topology: which NICs ``rdma`` uses, and which of them are near which memory. It uses every
            NIC that the topology would choose for some NUMA node or GPU, and registers memory on
            each. None: ``Topology.discover()``, with the GPUs visible to the process. A NIC that
            cannot be opened is logged and left out. Having none is logged, too, and is an error
            only if ``rdma`` is named.
        secret: 16 to 4096 bytes shared by all engines that may use each other's memory, also within
            a process. Peers with another secret, or none, are refused, and so are those that have
            dialled an address that is not this engine's. ``tcp`` then uses TLS 1.3, with a key that
            comes from the secret; what NICs move (``rdma``) is not encrypted. None: the setting
            ``secret`` or ``secret_file``; if neither is set, no secret.
        secret_only: for a trusted network: a secret without TLS. Every frame but its data is
            authenticated, nothing is encrypted. The same on all engines. None: the setting
            ``secret_only``, where there is a secret and no ``tls``.
        tls: certificates. ``tcp`` then uses TLS 1.3 with these, and peers without it are refused.
            Within a machine, processes of this engine's user do without TLS.
        local_users: ids of other users whose processes on this machine (more exactly, in its
            network namespace) may connect other than by ``tcp``, and to whose this engine connects.
            They have to prove what peers on other machines do, and share no memory. All others are
            refused, root too. None: the setting ``local_users``.
        reached_at: further addresses, ``"host:port"``, by which peers with the secret reach this
            engine, as through NAT, a proxy or a DNS name. Where it listens need not be listed.
        max_connections: how many connections to peers it keeps, 1 to 2**31 - 1. To open one more,
            it closes an idle one (chosen by SIEVE), which is reconnected at the next request to its
            peer. While all are in use, a request that needs one waits, within its deadline. A peer
            serves at most 2048 connections, half of them from one host, and refuses more. Every
            open ``Peer`` has a thread and five file descriptors besides, connected or not, and
            within the machine a few more if several threads use it at once.
        checksum: the default of ``checksum`` for calls that do not pass it.
        spin_us: how long a thread that waits for a peer's next message polls before it sleeps, in
            microseconds, 0 to 1,000,000. Shortens round trips over ``tcp``, on either side, at the
            cost of a core.

    Attributes:
        name: the name peers open.
        address: ``"host:port"`` where it listens; under p2p, its name.

    Raises:
        InvalidArgument: an argument is wrong, named in the message; or another engine, not known
            to be gone, has that name.
        Unavailable: the host cannot be resolved, the metadata server does not answer, OpenSSL 3 is
            missing for a secret or TLS, ``rdma`` was named and there is no NIC, or ``cuda_ipc``
            alone and there is no driver.
        OSError: the port is taken, the host is not an address of this machine, the secret's file
            cannot be read, or ``rdma`` was named and no NIC can be opened.
    """

    _closed = True  # for __del__, in case __init__ raises, or is never reached

    def __init__(
        self,
        name: str | None = None,
        *,
        metadata: str = "p2p",
        listen: str | None = None,
        transports: Collection[str] | None = None,
        topology: Topology | None = None,
        secret: bytes | str | None = None,
        secret_only: bool | None = None,
        tls: Tls | None = None,
        local_users: Collection[int] | None = None,
        reached_at: Collection[str] = (),
        max_connections: int = 512,
        checksum: bool = False,
        spin_us: int = 0,
    ):
        allowed = TRANSPORTS if transports is None else transports
        is_list = isinstance(allowed, Collection) and not isinstance(allowed, str)
        is_known = is_list and all(isinstance(i, str) and i in TRANSPORTS for i in allowed)
        if not is_known or len(allowed) == 0:
            raise InvalidArgument(
                f"TransferEngine: transports must be a list of {', '.join(TRANSPORTS[:-1])} and "
                f"{TRANSPORTS[-1]}, got {shown(transports)}"
            )
        max_connections = as_integer(
            "TransferEngine", "max_connections", max_connections, 1, (1 << 31) - 1
        )
        spin_us = as_integer("TransferEngine", "spin_us", spin_us, 0, 1_000_000)
        self._checksum = as_checksum("TransferEngine", checksum, default=False)
        if set(allowed) == {"cuda_ipc"} and (missing := _host.missing_cuda_driver()):
            raise Unavailable(f"TransferEngine: cuda_ipc alone needs a driver: {missing}")
        trust = Trust.of(secret, secret_only, tls, local_users, reached_at)
        named = transports is not None and "rdma" in allowed
        nics = NicChoice()
        if named or (transports is None and trust.tls is None):
            nics = choose_nics(topology, named=named)
        self._names = Names(metadata)
        self._engine = self._names.start(
            name,
            listen,
            Options(tuple(allowed), nics, trust, max_connections, spin_us),
        )
        self._regions: set[Region] = set()
        self._closed = False
        self.name = self._engine.name
        self.address = self._engine.address
        for reason in self._engine.missing_nics:
            log.nic_left_out(self.name, reason)
        # Runs when this object is collected or the interpreter exits; holds the memory until then.
        self._finalizer = weakref.finalize(self, _close, self._names, self._engine, self._regions)

    def close(self) -> None:
        """Fail pending requests ("the engine was closed"), close peers and regions. Idempotent.

        When it returns, no thread of the engine touches the memory, even if another thread made the
        call that closes it. The name is released first; if the metadata server does not answer,
        that takes a few seconds.
        """
        self._closed = True
        self._finalizer()  # no effect if another thread has called it
        self._engine.close()  # also waits for that thread

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def __repr__(self) -> str:
        name = getattr(self, "name", "?")  # none yet, if __init__ raises
        return f"TransferEngine({name}{', closed' if self._closed else ''})"

    def __del__(self) -> None:
        """Warn about an engine that was not closed."""
        if not self._closed:
            warnings.warn(f"unclosed TransferEngine {self.name}", ResourceWarning, stacklevel=2)

    def register(self, buffer: Any, access: Access = "read_write") -> Region:
        """Register memory: this engine may use it from now on, and peers as ``access`` allows.

        Args:
            buffer: a torch tensor, cupy or numpy array or object with the buffer protocol: packed
                memory of the host or of one GPU, not overlapping other regions of this engine. The
                engine keeps the memory alive, also if a tensor is given other memory meanwhile
                (``t.data = ...``, ``module.half()``).
            access: what peers may do: ``read_write``, ``read`` or ``write``; or ``windows``: read
                those parts on which a ``Region.window`` is open.

        Returns:
            A ``Region``; pass its address to the peers that should use it.

        Raises:
            InvalidArgument: the buffer is empty, not packed, overlaps another region, is not all
                on one GPU, or is read-only and offered for writing.
            Unavailable: it is CUDA memory and the driver cannot be used; the message says why.
            OSError: no NIC can register it, and ``rdma`` was named: the errno and its reason.
                If it was not named, or only some cannot, this is logged, and is the region's
                ``note``.
        """
        self._check_open("register")
        if not isinstance(access, str) or access not in ACCESS:
            raise InvalidArgument(f"register: access must be one of {list(ACCESS)}, got {access!r}")
        try:
            memory = as_buffer(buffer)
        except InvalidArgument as error:
            raise InvalidArgument(f"register: {error}") from None
        except ValueError as error:  # from memoryview, e.g. for a dtype it has no name for
            raise InvalidArgument(
                f"register: buffer must have the buffer protocol, got {type(buffer).__name__} "
                f"({error})"
            ) from None
        if not memory.writable and access not in ("read", "windows"):
            raise InvalidArgument(
                f'register: access must be "read" for read-only memory, got {access!r}'
            )
        region = Region(self._engine, self._regions, memory, access)
        if region.note:
            log.without_nics(self.name, region.note)
        return region

    def open(
        self,
        name: str,
        *,
        allow_file: bool = True,
        deadline_s: float | None = None,
        descriptor: int | None = None,
    ) -> Peer:
        """Connect to another engine, or open a file.

        A file is ``"file:"`` and an absolute path. It must exist and be a regular file or a block
        device; transfers do not extend it. docs/transfer/files.md lists which addresses and sizes
        are fast,
        and what a finished ``Ticket`` guarantees.

        Args:
            name: the other engine's ``name``. With a metadata server it is looked up there. Under
                p2p it is ``"host:port"``: an engine of this process is found by that exact
                spelling. Under another spelling (``localhost`` for ``127.0.0.1``) it is reached by
                ``tcp``, and not at all if it has ``transports=("local",)``.
            allow_file: whether the name may be a file's. Pass False for a name that comes from
                anyone else, such as in a message: else its author chooses which file this process
                opens.
            deadline_s: seconds for connecting; None: the setting ``deadline_s``. A metadata server
                gets a few seconds of its own. DNS lookup of a host name is not covered:
                resolv.conf(5) bounds that.
            descriptor: of a file that is open already, and is opened again in place of whatever is
                at its path by now; only with ``file:``. It may be closed afterwards.

        Returns:
            A ``Peer``. After a failed transfer it reconnects for the next one. If the peer is no
            longer the same engine, that fails, because addresses belong to the old one: open it
            again.

        Raises:
            InvalidArgument: the name is not valid, or it is a file's and ``allow_file`` is False,
                or ``file`` is not among the transports.
            Unavailable: there is no such host, or the metadata server does not answer.
            TransferError: the peer is not there, is no engine, or did not answer in time; the file
                does not exist, is not a file, or may not be read; the metadata server has no such
                name, or its entry is stale: another engine has that address now; or one side does
                not trust the other: ``the peer's secret is another``, ``the peer has no secret``,
                ``the peer speaks TLS only`` (or no TLS), ``TLS: certificate verify failed``, ``the
                engine that answers is not of this address, unless its reached_at says so``; or
                there is no file descriptor or thread left here.
        """
        self._check_open("open")
        may_be_file = as_bool("open", "allow_file", allow_file)
        deadline_s = as_deadline("open", deadline_s)
        if is_file(name) and not may_be_file:
            raise InvalidArgument(f"open: name must be an engine's, got {shown(name)}, a file's")
        if descriptor is not None:
            descriptor = as_integer("open", "descriptor", descriptor, 0, (1 << 31) - 1)
            if not is_file(name):
                raise InvalidArgument(f"open: name must be of a file, got {shown(name)}")
        try:
            opened = (
                open_file(self._engine, name, deadline_s, descriptor)
                if is_file(name)
                else self._names.open(self._engine, name, deadline_s)
            )
            peer = Peer(self._engine, opened)
        except TransferError as error:
            log.not_opened(self.name, error)
            raise
        log.opened(self.name, peer.name, peer.transport)
        return peer

    def receive_notifications(self, timeout_s: float = 0.0) -> list[tuple[str, bytes]]:
        """Return the notifications received since the last call, in order of arrival.

        Args:
            timeout_s: how long to wait for the first one, in seconds.

        Returns:
            ``(name of the sender's engine, bytes)`` each; empty if none came in time. The queue
            holds 64 MiB, an entry counting as its bytes plus 512; when full, it refuses senders.

        Raises:
            InvalidArgument: the engine is closed, or another thread closes it during the wait.
        """
        self._check_open("receive_notifications")
        timeout_s = as_seconds("receive_notifications", "timeout_s", timeout_s, minimum=0.0)
        return self._engine.take_notifications(timeout_s)

    def refuse_notifications(self) -> list[tuple[str, bytes]]:
        """Return the notifications that have not been received, and refuse all that come until the
        next ``receive_notifications``: their senders' requests fail at once.

        For a receiver that stops while the engine stays open.

        Returns:
            See ``receive_notifications``.

        Raises:
            InvalidArgument: the engine is closed.
        """
        self._check_open("refuse_notifications")
        return self._engine.refuse_notifications()


def _close(names: Names, engine: _host.TransferEngine, regions: set[Region]) -> None:
    try:
        names.close()  # first: a closed engine must not be found
        log.rejected(engine)
    finally:
        if engine.close():
            regions.clear()
        else:
            _in_use.append(regions)
            log.kept(engine.name)
