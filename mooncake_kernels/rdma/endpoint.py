"""What the other side of a connection must know, and its wire form."""

import struct
from dataclasses import dataclass
from typing import Any

from .._arguments import as_instance, as_integer, as_one_of
from ..errors import InvalidArgument, shown
from .info import gid_text

_MAGIC = b"MKe1"
_LAYOUT = struct.Struct("<4sIIHBBHH16s")  # magic, qp_num, psn, lid, type, layer, mtu, reads, gid
_GID_TYPES = ("", "IB", "RoCE v1", "RoCE v2")
_LINK_LAYERS = ("Unspecified", "InfiniBand", "Ethernet")


@dataclass(frozen=True)
class Endpoint:
    """A queue pair as its peer sees it; ``to_bytes()`` is 36 bytes on every machine.

    Attributes:
        qp_num: its number on its NIC.
        psn: number of the first packet that it sends.
        lid: of its port, on InfiniBand.
        gid: of its port, 16 bytes.
        gid_type: ``"RoCE v2"``, ``"RoCE v1"``, ``"IB"``; both sides' must be equal.
        link_layer: ``"InfiniBand"`` or ``"Ethernet"``; likewise.
        mtu: of its port, in bytes; the smaller of both is used.
        max_reads_in: the most incoming reads in flight it supports.
    """

    qp_num: int
    psn: int
    lid: int
    gid: bytes
    gid_type: str
    link_layer: str
    mtu: int
    max_reads_in: int

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        bits = {"qp_num": 32, "psn": 32, "lid": 16, "mtu": 16, "max_reads_in": 16}
        for name, width in bits.items():
            as_integer("Endpoint", name, getattr(self, name), 0, (1 << width) - 1)
        as_one_of("Endpoint", "gid_type", self.gid_type, _GID_TYPES)
        as_one_of("Endpoint", "link_layer", self.link_layer, _LINK_LAYERS)
        if not isinstance(self.gid, bytes) or len(self.gid) != 16:
            raise InvalidArgument(f"Endpoint: gid must be 16 bytes, got {shown(self.gid)}")

    def to_bytes(self) -> bytes:
        """Serialize it for the peer."""
        return _LAYOUT.pack(
            _MAGIC,
            self.qp_num,
            self.psn,
            self.lid,
            _GID_TYPES.index(self.gid_type),
            _LINK_LAYERS.index(self.link_layer),
            self.mtu,
            self.max_reads_in,
            self.gid,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Endpoint":
        """Parse a peer's ``to_bytes()``.

        Raises:
            InvalidArgument: the bytes are not an endpoint.
        """
        as_instance("Endpoint.from_bytes", "data", data, (bytes, bytearray, memoryview), "bytes")
        if len(data) != _LAYOUT.size or data[:4] != _MAGIC:
            raise InvalidArgument(
                f"Endpoint.from_bytes: data must be {_LAYOUT.size} bytes that begin with "
                f"{_MAGIC!r}, got {len(data)} that begin with {bytes(data[:4])!r}"
            )
        _, qp_num, psn, lid, gid_type, layer, mtu, reads, gid = _LAYOUT.unpack(data)
        if gid_type >= len(_GID_TYPES) or layer >= len(_LINK_LAYERS):
            raise InvalidArgument(
                "Endpoint.from_bytes: data must name a type of GID and a link layer, "
                f"got {gid_type} and {layer}"
            )
        types = _GID_TYPES[gid_type], _LINK_LAYERS[layer]
        return cls(qp_num, psn, lid, gid, *types, mtu, reads)

    def __str__(self) -> str:
        return f"queue pair {self.qp_num} at {gid_text(self.gid)}"


def endpoint_of(values: tuple[Any, ...]) -> Endpoint:
    """Make one from the compiled code's values, in the order of the attributes."""
    return Endpoint(*values)
