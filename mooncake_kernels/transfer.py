"""Move memory between engines: one-sided writes and reads of registered regions.

An engine registers memory, and opens peers by name. Who is given an address of a registered region
may write to it or read from it, without the owner's program taking part::

    with mk.TransferEngine() as engine:
        engine.register(cache)
        peer = engine.open("10.0.0.2:4711")                # engine.name of the other side
        engine.write(peer, [(local_address, remote_address, num_bytes)]).wait()
        engine.write_blocks(peer, pool.blocks(src_ids), peer_pool.blocks(dst_ids)).wait()

Without a server a name is an address; with one (``metadata="redis://10.0.0.1:6379"``) it is of your
choice, ``"prefill-3"``, and leads to that very engine or nowhere.

Every transfer has a deadline; nothing here waits for ever. Transports: ``local`` (the peer is an
engine of this process: a copy), ``shm`` (a process of this user on this machine, in the same
network namespace: this process copies into and out of its memory, faster for what
``shared_memory()`` made), ``cuda_ipc`` (such a process, and memory of GPUs, which copy), ``rdma``
(NICs of both sides move the data, all of them at once; what is agreed upon, and notifications, go
over a TCP connection beside them), ``tcp``, and ``file``, for what is no engine but a file on a
local disk: ``engine.open("file:/mnt/ssd/pool")`` is a peer whose addresses are offsets in that
file. Memory of GPUs goes by all of them, see docs/gpu_memory.md.

Without a secret whoever can connect to the port can use the registered regions, which is why an
engine listens on 127.0.0.1 unless told otherwise. With one, both sides of a connection prove that
they know it. That says nothing of the bytes that follow: where others can reach into the network,
use TLS as well.

After ``fork()`` the child must make an engine of its own; all that it can do with the parent's is
to close it, which has no effect. Until it ends or calls ``exec()`` the child holds copies of the
parent's sockets. A parent that closes its engine disconnects all the same (only the name of an
engine without ``tcp`` stays taken); but if it is killed, its peers see their connections end, and
its port is free, when the child is gone as well.
"""

import warnings
import weakref
from collections.abc import Collection
from typing import Any

from . import _host, _transfer_log
from ._arguments import as_integer, as_seconds, shown
from ._closing import Closing
from ._transfer_arguments import as_checksum, as_deadline
from ._transfer_handles import ACCESS, Access, Peer, Region, Ticket
from ._transfer_inspection import Inspection
from ._transfer_names import Names, Options
from ._transfer_nics import NicChoice, choose_nics
from ._transfer_objects import (
    MAX_ASKED_BYTES,
    MAX_ASKED_KEYS,
    WHOLE,
    ObjectCalls,
    ObjectsReply,
    ObjectStatus,
    Served,
    ServedPool,
)
from ._transfer_paths import PathChoice
from ._transfer_pools import BlockPool, Blocks
from ._transfer_regions import RemoteRegion
from ._transfer_requests import Requests
from ._transfer_security import Tls, as_secret, as_tls
from .buffers import as_buffer
from .errors import InvalidArgument, TransferError
from .topology import Topology

__all__ = [
    "MAX_ASKED_BYTES",
    "MAX_ASKED_KEYS",
    "WHOLE",
    "Access",
    "BlockPool",
    "Blocks",
    "PathChoice",
    "ObjectStatus",
    "ObjectsReply",
    "Peer",
    "Region",
    "RemoteRegion",
    "Served",
    "ServedPool",
    "Ticket",
    "Tls",
    "TransferEngine",
]

TRANSPORTS = ("local", "shm", "cuda_ipc", "rdma", "tcp", "file")

_in_use: list[set[Region]] = []  # of closed engines, and never freed: someone may write there yet


class TransferEngine(Requests, Inspection, ObjectCalls, Closing):
    """Registers memory, listens to peers, and writes to and reads from their memory.

    Thread-safe. Close it: that fails what is pending, closes its peers and its regions. What is
    left open is closed when the interpreter exits.

    Args:
        name: under p2p, ``"host:port"`` to listen on, at which peers reach this engine; port 0
            takes a free one, and None the setting ``listen_host`` (127.0.0.1) and a free port.
            With a metadata server, whatever peers shall call it: 1 to 255 printable ASCII
            characters other than space and ``/``; None: made up.
        metadata: how peers are found. ``"p2p"``: a peer's name is its address. The URL of a server
            (``redis://host:port/db``, ``http://host:port/metadata``; see ``mk.metadata``): the
            engine is entered there until it is closed. If it dies, it is forgotten after the
            setting ``metadata_ttl_s``; if the server is away, it is entered again once it is back.
        listen: with a metadata server, ``"host:port"`` to listen on; None as for ``name``.
        transports: those that may be used, of ``local``, ``shm``, ``cuda_ipc``, ``rdma``, ``tcp``
            and ``file``; nothing else is fallen back to. None: ``local`` for a peer in this
            process, ``shm`` for one on this machine, with ``cuda_ipc`` for its GPU memory, ``rdma``
            for others if both sides have a NIC for it (but not beside ``tls``, which it goes
            without), else ``tcp``; ``file`` for files. An engine without ``tcp`` and ``rdma`` does
            not listen to machines, one without ``shm`` and ``cuda_ipc`` not to processes of this
            one, and one without ``local`` or ``tcp`` does not let its memory be moved by that.
        topology: which NICs ``rdma`` goes over: all that it would choose for some NUMA node or GPU,
            on each of which memory is registered; and which of them are near to which memory.
            None: ``Topology.discover()``, with the GPUs that the process sees. If there is no NIC,
            that is logged, and an error only where ``rdma`` is named.
        secret: 16 to 4096 bytes that all engines have in common which may use each other's memory
            over ``tcp`` and ``shm``; others are refused, and so are those without. None: the
            setting ``secret`` or ``secret_file``, and without these there is none. Engines of one
            process need not prove anything over ``local``.
        tls: certificates: ``tcp`` is TLS 1.3 then, and peers without are refused. ``shm``, which
            stays among the processes of one user on one machine, goes without.
        max_connections: how many connections to peers it keeps, 1 to 2**31 - 1. For one more an
            idle one is closed, by SIEVE, and made again when its peer is next asked for something;
            while all are in use, what needs one waits, within its deadline.
        checksum: what ``checksum`` is in calls that do not say.
        spin_us: how long a thread that waits for a peer's next words looks for them before it
            sleeps, in microseconds, 0 to 1,000,000: shorter round trips over ``tcp``, on either
            side, for a core that does nothing else meanwhile.

    Attributes:
        name: what peers open.
        address: ``"host:port"`` at which it is reached; under p2p, its name.

    Raises:
        InvalidArgument: an argument is wrong, named in the message; another engine, which is not
            known to be gone, has that name.
        Unavailable: the host cannot be resolved, the metadata server does not answer, there is no
            OpenSSL 3 for a secret or TLS, or no NIC for an ``rdma`` that was named.
        OSError: the port is taken, the host is not of this machine, or the file of the secret
            cannot be read.
    """

    _closed = True  # for __del__, should something be refused in __init__, or before

    def __init__(
        self,
        name: str | None = None,
        *,
        metadata: str = "p2p",
        listen: str | None = None,
        transports: Collection[str] | None = None,
        topology: Topology | None = None,
        secret: bytes | str | None = None,
        tls: Tls | None = None,
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
        files = as_tls(tls)
        named = transports is not None and "rdma" in allowed
        nics = NicChoice()
        if named or (transports is None and files is None):
            nics = choose_nics(topology, named=named)
        self._names = Names(metadata)
        self._engine = self._names.start(
            name,
            listen,
            Options(tuple(allowed), nics, as_secret(secret), files, max_connections, spin_us),
        )
        self._regions: set[Region] = set()
        self._closed = False
        self.name = self._engine.name
        self.address = self._engine.address
        # Runs when this object goes, or when the interpreter exits; keeps the memory until then.
        self._finalizer = weakref.finalize(self, _close, self._names, self._engine, self._regions)

    def close(self) -> None:
        """Fail what is pending ("the engine was closed"), close peers and regions. Idempotent.

        When it returns, no thread of the engine touches the memory, whoever else is closing it.
        First its name is given back; a metadata server that does not answer takes a few seconds.
        """
        self._closed = True
        self._finalizer()  # does nothing if another thread has called it
        self._engine.close()  # and waits for that one

    def __del__(self) -> None:
        """Warn about an engine that nobody closed."""
        if not self._closed:
            warnings.warn(f"unclosed TransferEngine {self.name}", ResourceWarning, stacklevel=2)

    def register(self, buffer: Any, access: Access = "read_write") -> Region:
        """Register memory: this engine may use it from now on, and peers as far as allowed.

        Args:
            buffer: a torch tensor, cupy or numpy array or object with the buffer protocol: packed
                memory of the host or of one GPU, not overlapping other regions of this engine. It
                is kept alive.
            access: what peers may do: ``read_write``, ``read`` or ``write``.

        Returns:
            A ``Region``; pass its address to those who should use it.

        Raises:
            InvalidArgument: the buffer is empty, not packed, overlaps another region, is not all
                of one GPU, or is read-only and offered for writing.
            Unavailable: it is CUDA memory, and the driver cannot be used, for the reason given.
            OSError: a NIC cannot register it, and ``rdma`` was named: the errno and its reason.
                If it was not, that is logged, and the region's ``note``.
        """
        self._check_open("register")
        if not isinstance(access, str) or access not in ACCESS:
            raise InvalidArgument(f"register: access must be one of {list(ACCESS)}, got {access!r}")
        try:
            memory = as_buffer(buffer)
        except InvalidArgument as error:
            raise InvalidArgument(f"register: {error}") from None
        except ValueError as error:  # memoryview's, as of a dtype that it has no name for
            raise InvalidArgument(
                f"register: buffer must have the buffer protocol, got {type(buffer).__name__} "
                f"({error})"
            ) from None
        if not memory.writable and access != "read":
            raise InvalidArgument(
                f'register: access must be "read" for read-only memory, got {access!r}'
            )
        region = Region(self._engine, self._regions, memory, access)
        if region.note:
            _transfer_log.without_nics(self.name, region.note)
        return region

    def open(self, name: str, *, deadline_s: float | None = None) -> Peer:
        """Connect to another engine, or open a file.

        A file, ``"file:"`` and an absolute path, must be there, a regular file or a block device;
        it does not grow by a transfer. Which addresses and sizes are fast, and what a ``Ticket``
        that is done promises: docs/files.md.

        Args:
            name: its ``name``. With a metadata server it is looked up there. Under p2p it is
                ``"host:port"``: an engine of this process is found by that very spelling; by
                another one (``localhost`` for ``127.0.0.1``) ``tcp`` reaches it, but not an engine
                with ``transports=("local",)``.
            deadline_s: seconds for connecting; None: the setting ``deadline_s``. A metadata server
                has a few seconds of its own. Asking DNS for a host name is not covered:
                resolv.conf(5) bounds that.

        Returns:
            A ``Peer``. After a failed transfer it reconnects for the next; if the peer's engine is
            not the one it was, that fails, because addresses are of the old one: open it again.

        Raises:
            InvalidArgument: nobody can be called so, or ``file`` is not among the transports.
            Unavailable: there is no such host, or the metadata server does not answer.
            TransferError: it is not there, is no engine, or did not answer in time; the file is
                not there, is none, or may not be read; the metadata
                server has no such name, or its entry is stale: another engine has that address now;
                or one side does not trust the other: ``the peer's secret is another``, ``the peer
                has no secret``, ``the peer speaks TLS only``, ``TLS: certificate verify failed``.
        """
        self._check_open("open")
        deadline_s = as_deadline("open", deadline_s)
        try:
            peer = Peer(self._engine, self._names.open(self._engine, name, deadline_s))
        except TransferError as error:
            _transfer_log.not_opened(self.name, error)
            raise
        _transfer_log.opened(self.name, peer.name, peer.transport)
        return peer

    def receive_notifications(self, timeout_s: float = 0.0) -> list[tuple[str, bytes]]:
        """Return the notifications that have come since the last call, in order of arrival.

        Args:
            timeout_s: how long to wait for the first one, in seconds.

        Returns:
            (name of the sender's engine, bytes) each; empty if none came in time. The queue holds
            64 MiB, an entry counting its bytes and 512; a full one refuses the sender.

        Raises:
            InvalidArgument: the engine is closed, or another thread closes it during the wait.
        """
        self._check_open("receive_notifications")
        timeout_s = as_seconds("receive_notifications", "timeout_s", timeout_s, minimum=0.0)
        return self._engine.take_notifications(timeout_s)


def _close(names: Names, engine: _host.TransferEngine, regions: set[Region]) -> None:
    try:
        names.close()  # first, for what is closed should not be found
        _transfer_log.rejected(engine)
    finally:
        if engine.close():
            regions.clear()
        else:
            _in_use.append(regions)
            _transfer_log.kept(engine.name)
