"""``mooncake.engine``: ``TransferEngine`` and its constants. This module stands in its place."""

import enum
import errno
import itertools
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable

from . import names
from .codes import ERR_DNS, ERR_INVALID_ARGUMENT, ERR_SOCKET, Failed, as_natural, log, returns
from .memory import Memory
from .notify import TransferNotify, decode, encode
from .peers import Batch, Peers, columns_of, submit
from .streams import Streams

SUPPORT_CUDA = SUPPORT_EFA = SUPPORT_HIP = SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = SUPPORT_MUSA = False
_PROBE_S = 5.0  # the time that Mooncake gives a handshake to connect


class TransferOpcode(enum.IntEnum):
    """Direction of a transfer, seen from its initiator."""

    Read = 0
    Write = 1


Read, Write = TransferOpcode.Read, TransferOpcode.Write
Opcode = TransferOpcode


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


class TransferEngine:
    """Mooncake's ``TransferEngine``: registers memory, and moves it from and to peers.

    Thread-safe: up to eight calls to one peer run in parallel, each over a connection of its own.
    An engine that is dropped is closed.

    Memory is identified by its address; the caller that registered it keeps it alive.

    In calls that move memory ``target_hostname`` is the peer's ``"host:port"``, ``buffers`` are
    addresses of registered memory of this engine, ``peer_buffer_addresses`` of the peer's,
    ``lengths`` are in bytes; each is a list, tuple or array. ``transport_hint`` is ignored. A
    transfer may take ``MC_TRANSFER_TIMEOUT`` plus 1 ns a byte.

    Calls ``on_cuda`` enqueue a transfer into a CUDA stream and return: it begins when the stream
    arrives there, and what is behind it in the stream waits until it has ended. ``stream_ptr`` is
    the stream's handle; 0 is the default stream of the thread's current GPU. Only what no GPU has
    to copy can be moved: host memory at both ends; over the protocol ``rdma``, to another machine,
    any memory. A failure is logged. The stream goes on, but no other transfer that this engine has
    enqueued by then begins any more. The next of these calls raises it, or
    ``check_transfers_on_cuda`` returns -1; then the engine can be used again. They raise:

    * TransferError: an earlier transfer in a stream has failed, or the peer cannot be opened. After
      this and all below, nothing was enqueued.
    * Unavailable: a GPU would have to copy; no GPU is in use; the stream is being captured.
    * InvalidArgument: an argument is wrong; a buffer is not registered.
    * CudaError: from the driver.
    """

    TransferOpcode = Opcode

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._state: Running | None = None
        self._finalizer: weakref.finalize | None = None
        self._ids = itertools.count(1)  # of transfers that were begun
        self._batches: dict[int, Batch] = {}

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
            InvalidArgument: it is not a string.
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
            0 if it answers; -101 if there is no such name, -102 if it does not answer.
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

    # Memory.

    @returns(ERR_INVALID_ARGUMENT)
    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Let peers read and write a range; read-only memory can only be read.

        Args:
            buffer_addr: where it begins, in memory of this process: of the host, or of one
                allocation on a GPU.
            capacity: bytes.
            location: ``"*"``; or where the memory is, ``"cpu:<node>"``, ``"cuda:<GPU>"``.

        Returns:
            0; -7 if it overlaps registered memory, -303 for another kind of location, else -1.
        """
        return self._register(("buffer_addr", "capacity"), [buffer_addr], [capacity], location)

    @returns(ERR_INVALID_ARGUMENT)
    def unregister_memory(self, buffer_addr: int) -> int:
        """Undo ``register_memory``; transfers that use the memory end with a failure.

        Returns:
            0, and from now on the engine does not touch it; -3 if no registered range begins there.
        """
        self._running().memory.unregister(
            [as_natural("buffer_addr", buffer_addr)], argument="buffer_addr"
        )
        return 0

    @returns(ERR_INVALID_ARGUMENT)
    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """Register several ranges, all or, on a failure, none; see ``register_memory``."""
        arguments = ("buffer_addresses", "capacities")
        return self._register(arguments, buffer_addresses, capacities, location)

    @returns(ERR_INVALID_ARGUMENT)
    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """Unregister several ranges, all or, if one is not registered, none."""
        self._running().memory.unregister(
            _naturals("buffer_addresses", buffer_addresses), argument="buffer_addresses"
        )
        return 0

    @returns(0)
    def allocate_managed_buffer(self, length: int) -> int:
        """Return the address of new registered memory of ``length`` bytes, 0 on failure."""
        return self._running().memory.allocate(as_natural("length", length, minimum=1))

    @returns(ERR_INVALID_ARGUMENT)
    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """Free what ``allocate_managed_buffer(length)`` returned; transfers that use it fail.

        Returns:
            0; -3 if there is no such buffer.
        """
        address, num_bytes = as_natural("buffer_addr", buffer_addr), as_natural("length", length)
        self._running().memory.free(address, num_bytes)
        return 0

    @returns(ERR_INVALID_ARGUMENT)
    def write_bytes_to_buffer(self, dest_address: int, src_ptr: bytes | str, length: int) -> int:
        """Copy the first ``length`` bytes of an object into registered memory of this engine.

        Returns:
            0; -1 if the target is not inside registered memory, or the object is shorter.
        """
        address, num_bytes = as_natural("dest_address", dest_address), as_natural("length", length)
        try:
            data = memoryview(src_ptr.encode() if isinstance(src_ptr, str) else src_ptr).cast("B")
        except TypeError:
            raise InvalidArgument(f"src_ptr must be bytes, got {src_ptr!r:.80}") from None
        if num_bytes > len(data):
            raise InvalidArgument(f"length must be at most {len(data)}, got {num_bytes}")
        self._running().memory.write(address, data[:num_bytes])
        return 0

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """Return a copy of registered memory of this engine.

        Raises:
            InvalidArgument: the range is not inside registered memory.
        """
        address = as_natural("source_address", source_address)
        num_bytes = as_natural("length", length)
        return self._running("read_bytes_from_buffer").memory.read(address, num_bytes)

    # Transfers that are over when the call returns: 0, else -1.

    @returns(ERR_INVALID_ARGUMENT)
    def transfer_sync_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Write one block, and wait until it is at the peer: 0, else -1."""
        return self._submit(
            target_hostname, [buffer], [peer_buffer_address], [length], Write
        ).wait()

    @returns(ERR_INVALID_ARGUMENT)
    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Read one block, and wait until it is here: 0, else -1."""
        return self._submit(target_hostname, [buffer], [peer_buffer_address], [length], Read).wait()

    @returns(ERR_INVALID_ARGUMENT)
    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Move one block, and notify the peer when it is there: 0, else -1."""
        blocks = [buffer], [peer_buffer_address], [length]
        return self._submit(target_hostname, *blocks, opcode, notify).wait()

    @returns(ERR_INVALID_ARGUMENT)
    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Write blocks, however many, and wait until all are at the peer: 0, else -1."""
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, Write).wait()

    @returns(ERR_INVALID_ARGUMENT)
    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Read blocks, however many, and wait until all are here: 0, else -1."""
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, Read).wait()

    @returns(ERR_INVALID_ARGUMENT)
    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Move blocks, and notify the peer when all are there: 0, else -1."""
        blocks = buffers, peer_buffer_addresses, lengths
        return self._submit(target_hostname, *blocks, opcode, notify).wait()

    # Transfers that are begun.

    @returns(0)
    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Begin to write blocks: an id for one of the two calls below, else 0."""
        return self._begin(target_hostname, buffers, peer_buffer_addresses, lengths, Write)

    @returns(0)
    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Begin to read blocks: an id, else 0."""
        return self._begin(target_hostname, buffers, peer_buffer_addresses, lengths, Read)

    @returns(0)
    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: Opcode,
        transport_hint: str = "",
    ) -> int:
        """Begin to move blocks: an id, else 0."""
        return self._begin(target_hostname, buffers, peer_buffer_addresses, lengths, opcode)

    @returns(0)
    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Begin to write one block: an id, 0 on failure."""
        return self._begin(target_hostname, [buffer], [peer_buffer_address], [length], Write)

    @returns(ERR_INVALID_ARGUMENT)
    def get_batch_transfer_status(self, batch_ids: Iterable[int]) -> int:
        """Wait for the end of all of these: 0, or -1 if one failed or is unknown.

        Their ids are then invalid, and their local memory is no longer touched.
        """
        if not isinstance(batch_ids, Iterable):
            raise InvalidArgument(f"batch_ids must be a list of integers, got {batch_ids!r:.80}")
        failed = 0
        for batch_id in batch_ids:
            try:
                self._take(batch_id).wait()
            except (InvalidArgument, TransferError) as error:
                log.error("get_batch_transfer_status: %s", error)
                failed = ERR_INVALID_ARGUMENT
        return failed

    @returns(ERR_INVALID_ARGUMENT)
    def transfer_check_status(self, batch_id: int) -> int:
        """Check a transfer, without waiting.

        Returns:
            0 while it is in flight; then, once: 1 if it succeeded, -2 if it timed out, -1 if it
            failed otherwise or is unknown.
        """
        batch = self._batches.get(as_natural("batch_id", batch_id))
        if batch is not None and not batch.done:
            return 0
        try:
            self._take(batch_id).wait()
        except TransferError as error:
            log.error("transfer_check_status: %s", error)
            return -2 if error.timed_out else -1
        return 1

    # Transfers in CUDA streams.

    def transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Enqueue writing one block."""
        blocks = [buffer], [peer_buffer_address], [length]
        self._enqueue("transfer_write_on_cuda", target_hostname, blocks, Write, stream_ptr)

    def transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Enqueue reading one block."""
        blocks = [buffer], [peer_buffer_address], [length]
        self._enqueue("transfer_read_on_cuda", target_hostname, blocks, Read, stream_ptr)

    def batch_transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Enqueue writing blocks."""
        blocks = buffers, peer_buffer_addresses, lengths
        self._enqueue("batch_transfer_write_on_cuda", target_hostname, blocks, Write, stream_ptr)

    def batch_transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Enqueue reading blocks."""
        blocks = buffers, peer_buffer_addresses, lengths
        self._enqueue("batch_transfer_read_on_cuda", target_hostname, blocks, Read, stream_ptr)

    @returns(ERR_INVALID_ARGUMENT)
    def check_transfers_on_cuda(self) -> int:
        """Check those that have ended, as all before a synchronization of their stream have.

        Not in Mooncake, which ends the process when one fails.

        Returns:
            0, or -1 if one has failed since the last check, or call above that raised it.
        """
        self._running().streams.check()
        return 0

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

    def _register(
        self,
        arguments: tuple[str, str],
        addresses: Iterable[int],
        capacities: Iterable[int],
        location: str,
    ) -> int:
        begins = _naturals(arguments[0], addresses)
        sizes = _naturals(arguments[1], capacities, minimum=1)
        if len(begins) != len(sizes):
            raise InvalidArgument(
                "buffer_addresses and capacities must be equally long, got "
                f"{len(begins)} and {len(sizes)}"
            )
        self._running().memory.register(
            zip(begins, sizes, strict=True), location, argument=arguments[0]
        )
        return 0

    def _submit(
        self,
        target_hostname: str,
        buffers: Any,
        peer_buffer_addresses: Any,
        lengths: Any,
        opcode: Opcode,
        notify: TransferNotify | None = None,
    ) -> Batch:
        running = self._running()
        if not isinstance(opcode, Opcode):
            raise InvalidArgument(f"opcode must be a TransferOpcode, got {opcode!r:.80}")
        return submit(
            running.engine,
            running.peers,
            names.peer_name(target_hostname, running.metadata, "target_hostname"),
            columns_of(buffers, peer_buffer_addresses, lengths),
            reads=opcode == Read,
            notify=encode(notify),
            timeout_s=running.timeout_s,
        )

    def _begin(
        self, target: str, buffers: Any, addresses: Any, lengths: Any, opcode: Opcode
    ) -> int:
        batch = self._submit(target, buffers, addresses, lengths, opcode)
        batch_id = next(self._ids)
        self._batches[batch_id] = batch
        return batch_id

    def _take(self, batch_id: int) -> Batch:
        batch = self._batches.pop(as_natural("batch_id", batch_id), None)
        if batch is None:
            raise InvalidArgument(f"batch_id must be of a batch that is under way, got {batch_id}")
        return batch

    def _enqueue(
        self,
        call: str,
        target_hostname: str,
        blocks: tuple[Any, Any, Any],
        opcode: Opcode,
        stream_ptr: int,
    ) -> None:
        running = self._running(call)
        running.streams.enqueue(
            call,
            names.peer_name(target_hostname, running.metadata, "target_hostname"),
            columns_of(*blocks),
            reads=opcode == Read,
            stream=as_natural("stream_ptr", stream_ptr),
        )


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


def _naturals(argument: str, values: Iterable[int], *, minimum: int = 0) -> list[int]:
    try:
        return [as_natural(argument, value, minimum=minimum) for value in values]
    except TypeError:
        raise InvalidArgument(
            f"{argument} must be a list of integers, got {values!r:.80}"
        ) from None


__all__ = [
    "Read", "SUPPORT_CUDA", "SUPPORT_EFA", "SUPPORT_HIP", "SUPPORT_INTRA_NVLINK", "SUPPORT_MNNVL",
    "SUPPORT_MUSA", "TransferEngine", "TransferNotify", "TransferOpcode", "Write",
]  # fmt: skip
