"""Which path a transfer takes, and why: what ``TransferEngine.explain_path`` returns."""

from collections.abc import Iterable
from dataclasses import dataclass

from .. import _host
from .._arguments import as_integer
from ..errors import InvalidArgument
from .handles import Peer, Region

LARGEST = (1 << 64) - 1


@dataclass(frozen=True)
class PathChoice:
    """The path between local memory and memory of a peer.

    Attributes:
        transport: that of the peer: ``local``, ``shm``, ``rdma``, ``tcp`` or ``file``; or
            ``cuda_ipc``.
        method: how the bytes move. ``copy``: within this process. ``mapped``: this process copies
            into and out of the peer's memory, which it has mapped. ``process_vm``: the same by
            process_vm_readv and process_vm_writev. ``ipc``: a GPU copies into and out of GPU memory
            of the peer, opened here. ``nics``: NICs move them. ``connection``: they are sent.
            ``disk``: a disk reads and writes the memory. ``staged``: a disk reads and writes pinned
            memory, to and from which a GPU copies.
        local: location of the local memory, like ``cpu:0`` or ``cuda:1``.
        remote: the owner of the memory at the other end: ``this process``, ``process 4711``, ``the
            file``, or the address of the peer.
        lanes: the connections to the peer, or the NICs that can be used, as ``stats()`` names them.
            Requests of one piece use the first connection.
        writable: whether a write of that range would be allowed.
        readable: whether a read would.
        reasons: findings, a sentence each: why not one transport, why another, why this method.
    """

    transport: str
    method: str
    local: str
    remote: str
    lanes: tuple[str, ...]
    writable: bool
    readable: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """Return all of it in words, a line for the path and one for each reason."""
        way = f"{self.transport} ({self.method}): {self.local} - {self.remote}"
        return "\n  ".join([f"{way}, by {', '.join(self.lanes)}", *self.reasons])


def explain(
    engine: _host.TransferEngine,
    regions: Iterable[Region],
    local: Region | int,
    peer: Peer,
    remote: int,
    num_bytes: int,
    deadline_s: float,
) -> PathChoice:
    """Ask the peer over a separate connection, and try its memory: see ``explain_path``."""
    address = local.address if isinstance(local, Region) else _integer("local", local)
    num_bytes = as_integer("explain_path", "num_bytes", num_bytes, 1, LARGEST)
    remote = _integer("remote", remote)
    holder = next((r for r in list(regions) if 0 <= address - r.address < r.num_bytes), None)
    if holder is None or address + num_bytes > holder.address + holder.num_bytes:
        raise InvalidArgument(
            "explain_path: local must be inside one registered region, got "
            f"{address:#x} + {num_bytes} bytes"
        )
    method, whose, lanes, reasons, write_refusal, read_refusal = engine.explain_path(
        peer._peer, address, remote, num_bytes, deadline_s
    )
    for op, refusal in (("write", write_refusal), ("read", read_refusal)):
        reasons += [f"a {op} would be refused: {refusal}"] if refusal else []
    return PathChoice(
        "cuda_ipc" if method == "ipc" else peer.transport,
        method,
        holder.location,
        whose or peer.name,
        tuple(lanes),
        not write_refusal,
        not read_refusal,
        tuple(reasons),
    )


def _integer(argument: str, value: int) -> int:
    if isinstance(value, Region):
        raise InvalidArgument(f"explain_path: {argument} must be an address, got a Region")
    return as_integer("explain_path", argument, value, 0, LARGEST)
