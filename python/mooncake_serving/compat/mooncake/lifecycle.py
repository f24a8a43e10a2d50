"""Calls about an engine as a whole: its start, its name, and which peers it reaches."""

import errno
import os
import threading
import weakref
from dataclasses import dataclass, field

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable

from . import names
from .codes import ERR_DNS, ERR_INVALID_ARGUMENT, ERR_SOCKET, Failed, log, returns
from .memory import Memory
from .notify import TransferNotify, decode
from .peers import Peers
from .streams import Streams

_PROBE_S = 5.0  # the time that Mooncake gives a handshake to connect


@dataclass(frozen=True)
class Running:
    """What ``initialize`` makes."""

    engine: mk.TransferEngine
    metadata: str
    memory: Memory
    peers: Peers
    timeout_s: float
    streams: Streams
    process_id: int = field(default_factory=os.getpid)


class Lifecycle:
    """The calls of ``TransferEngine`` that do not move data."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._state: Running | None = None
        self._finalizer: weakref.finalize | None = None

    @returns(ERR_INVALID_ARGUMENT)
    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str | None
    ) -> int:
        """Start listening. A running engine must be closed before it can be initialized again.

        Args:
            local_hostname: the host or address at which peers reach this engine, and where it
                listens; with a port, that port if it is free. Ask ``get_rpc_port``.
            metadata_server: ``"P2PHANDSHAKE"``: peers are named by host and port. With
                ``"redis://host:port"`` or ``"http://host:port/metadata"`` they are named by their
                ``local_hostname``, as they have spelled it.
            protocol: ``"tcp"``; ``"rdma"``, if there are NICs for it, and then only to machines
                that have some; any if the environment has ``MC_FORCE_TCP``, which makes it tcp.
            device_name: the RDMA devices that ``"rdma"`` uses, separated by commas; empty: all
                usable ones.

        Returns:
            0, or -1 on failure.
        """
        return self._initialize(local_hostname, metadata_server, protocol, device_name, "etcd")

    @returns(ERR_INVALID_ARGUMENT)
    def initialize_ext(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str | None,
        metadata_type: str,
    ) -> int:
        """Like ``initialize``; ``metadata_type`` is the type of a server without ``type://``."""
        return self._initialize(
            local_hostname, metadata_server, protocol, device_name, metadata_type
        )

    @returns(ERR_INVALID_ARGUMENT)
    def get_rpc_port(self) -> int:
        """Return the port at which this engine listens; under P2P it is part of its name."""
        return int(self._running().engine.address.rpartition(":")[2])

    def get_engine(self) -> mk.TransferEngine | None:
        """Return the engine underneath, to share it; None before ``initialize``.

        The caller becomes an owner too: from now on it is closed by ``close`` or when all
        references are gone.
        """
        if self._state is None:
            return None
        if self._finalizer is not None:
            self._finalizer.detach()
        return self._state.engine

    def get_local_topology(self, device_name: str | None = None) -> str:
        """Return ``{"cpu:0": [[preferred], [others]], "cuda:0": ...}`` of this machine's NICs.

        Args:
            device_name: only these, separated by commas; None or empty: all.

        Raises:
            InvalidArgument: it is no string.
        """
        topology = mk.Topology.discover()
        if device_name is None or device_name == "":
            return topology.to_mooncake_json()
        names.check_text("device_name", device_name)
        wanted = {name.strip() for name in device_name.split(",")}
        known = wanted & {nic.name for nic in topology.nics}
        if known != wanted:
            log.warning("get_local_topology: this machine has no %s", sorted(wanted - known))
        return topology.to_mooncake_json(policy=mk.NicPolicy(allow=sorted(known)))

    def get_notifies(self) -> list[TransferNotify]:
        """Return the notifications received since the last call, in order of arrival.

        Raises:
            InvalidArgument: before ``initialize``.
        """
        engine = self._running("get_notifies").engine
        return [decode(*one) for one in engine.receive_notifications()]

    @returns(ERR_INVALID_ARGUMENT)
    def send_probe(self, peer_server_name: str) -> int:
        """Connect to a peer, by a new connection, and disconnect.

        Returns:
            0 if it is there; -101 if there is no such name, -102 if it does not answer.
        """
        running = self._running()
        try:
            name = names.peer_name(peer_server_name, running.metadata, "peer_server_name")
            deadline_s = min(_PROBE_S, running.timeout_s)
            running.engine.open(name, allow_file=False, deadline_s=deadline_s).close()
        except (InvalidArgument, Unavailable) as error:
            raise Failed(ERR_DNS, str(error)) from None
        except (TransferError, OSError) as error:
            raise Failed(ERR_SOCKET, str(error)) from None
        return 0

    @returns(0)
    def get_first_buffer_address(self, segment_name: str) -> int:
        """Ask a peer for the address of the oldest of its currently registered memory ranges.

        Returns:
            The address; 0 if nothing is registered there, or the peer does not tell: it tells
            processes of its machine and user, and others only if both have a secret.
        """
        running = self._running()
        name = names.peer_name(segment_name, running.metadata, "segment_name")
        lane = running.peers.take(name, running.timeout_s)
        failed = True  # the peer may have been restarted
        try:
            regions = running.engine.regions(lane.peer)
            failed = False
        finally:
            running.peers.give_back(lane, failed=failed)
        return regions[0].address if regions else 0

    def warmup_efa_segment(self, segment_name: str) -> int:
        """Return 0: there is no EFA transport to warm up."""
        return 0

    def close(self) -> None:
        """Fail pending requests, forget all memory, stop listening. Not in Mooncake. Idempotent."""
        with self._starting:
            state, self._state = self._state, None
        if state is not None:
            state.engine.close()

    def _initialize(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str | None,
        metadata_type: str,
    ) -> int:
        listen = names.listen_name(local_hostname)
        metadata = names.metadata_of(metadata_server, metadata_type)
        transports = names.transports_of(protocol)
        timeout_s = names.timeout_s()
        topology = names.topology_of(device_name, transports)
        with self._starting:
            if self._state is not None:
                raise InvalidArgument(f"it is initialized, as {self._state.engine.name}")
            engine = start_engine(local_hostname, listen, metadata, transports, topology)
            self._finalizer = weakref.finalize(self, engine.close)
            self._state = Running(
                engine,
                metadata,
                Memory(engine),
                Peers(engine),
                timeout_s,
                Streams(engine, timeout_s),
            )
        return 0

    def _running(self, call: str = "") -> Running:
        # `call`: for what raises; what is logged begins with it already.
        where = call and f"{call}: "
        state = self._state
        if state is None:
            raise InvalidArgument(f"{where}call initialize first")
        if state.process_id != os.getpid():  # where another thread's locks may be held forever
            raise InvalidArgument(
                f"{where}the engine {state.engine.name} is of another process: a forked child "
                "must make its own"
            )
        return state


def start_engine(
    name: str,
    listen: str,
    metadata: str,
    transports: tuple[str, ...],
    topology: mk.Topology | None = None,
) -> mk.TransferEngine:
    """Make an engine that listens there, or on another port if that one is taken."""

    def make(where: str) -> mk.TransferEngine:
        if metadata == "p2p":
            return mk.TransferEngine(where, transports=transports, topology=topology)
        return mk.TransferEngine(
            name, metadata=metadata, listen=where, transports=transports, topology=topology
        )

    try:
        return make(listen)
    except OSError as error:
        host, _, port = listen.rpartition(":")
        if error.errno != errno.EADDRINUSE or port == "0":
            raise
        # Mooncake ignores the port under P2PHANDSHAKE: programs start several engines with the same
        # one.
        log.warning("initialize: %s is taken, listening on another port", listen)
        return make(f"{host}:0")
