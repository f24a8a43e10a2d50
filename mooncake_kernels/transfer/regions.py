"""The memory that a peer has registered: what ``TransferEngine.regions`` returns."""

from dataclasses import dataclass

from .. import _host
from .handles import ACCESS, Access, Peer

NAME_OF: dict[tuple[bool, bool], Access] = {
    rights: name for name, rights in ACCESS.items() if any(rights)
}


@dataclass(frozen=True)
class RemoteRegion:
    """Memory of a peer.

    Attributes:
        address: where it begins, in the peer's address space.
        num_bytes: its length.
        access: what its owner lets peers do: ``read_write``, ``read`` or ``write``.
        location: ``cpu:0``, or ``cuda:1`` for GPU memory, by the ordinals of the peer's process.
    """

    address: int
    num_bytes: int
    access: Access
    location: str = "cpu:0"


def regions_of(engine: _host.TransferEngine, peer: Peer, deadline_s: float) -> list[RemoteRegion]:
    """Ask a peer for its regions, in the order of registration."""
    return [
        RemoteRegion(
            address,
            num_bytes,
            NAME_OF[readable, writable],
            f"cuda:{device}" if device >= 0 else "cpu:0",
        )
        for address, num_bytes, readable, writable, device in engine.list_regions(
            peer._peer, deadline_s
        )
    ]
