"""What Mooncake's engines publish about themselves: ``ram``, a segment descriptor in JSON.

Read-only, so that tools can show it: our engines do not speak their protocols.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .untrusted import Malformed, integer, json_object, objects, printable, quoted, text

_MAX_U64 = (1 << 64) - 1


@dataclass(frozen=True)
class SegmentBuffer:
    """Memory that a segment offers.

    Attributes:
        location: ``cpu:0``, ``cuda:1``, or ``*``.
        address: where it starts in that process; for CXL memory, its offset.
        num_bytes: its size.
    """

    location: str
    address: int
    num_bytes: int


@dataclass(frozen=True)
class SegmentDevice:
    """A NIC by which a segment is reached.

    Attributes:
        name: of the device, like ``mlx5_0``.
        lid: its local identifier, for InfiniBand.
        gid: its global identifier; for UB, its EID.
    """

    name: str
    lid: int
    gid: str


@dataclass(frozen=True)
class Segment:
    """A segment of a Mooncake engine.

    Attributes:
        protocol: like ``tcp`` or ``rdma``; several are separated by commas.
        buffers: the memory it offers.
        devices: its NICs.
        topology: for each location the names of the preferred NICs, and of the others.
    """

    protocol: str
    buffers: tuple[SegmentBuffer, ...]
    devices: tuple[SegmentDevice, ...]
    topology: Mapping[str, tuple[tuple[str, ...], ...]]


def decode_segment(value: bytes) -> Segment:
    """Return the segment; raise ``Malformed`` if the JSON is invalid."""
    document = json_object(value)
    protocol = document.get("protocol")
    protocols: list[Any] = protocol if isinstance(protocol, list) else [protocol]
    if not all(isinstance(item, str) for item in protocols):
        raise Malformed(f"protocol must be a string or a list of them, got {quoted(protocol)}")
    return Segment(
        printable(",".join(protocols)),
        tuple(_buffer(item) for item in objects(document, "buffers")),
        tuple(_device(item) for item in objects(document, "devices")),
        _topology(document.get("priority_matrix") or {}),
    )


def _buffer(item: dict[str, Any]) -> SegmentBuffer:
    where = next((field for field in ("addr", "offset") if field in item), None)
    return SegmentBuffer(
        text(item, "name"),
        integer(item, where, 0, _MAX_U64) if where else 0,  # files have none
        integer(item, "length", 0, _MAX_U64),
    )


def _device(item: dict[str, Any]) -> SegmentDevice:
    lid = integer(item, "lid", 0, 0xFFFF) if "lid" in item else 0
    return SegmentDevice(text(item, "name"), lid, text(item, "gid") or text(item, "eid"))


def _topology(matrix: Any) -> dict[str, tuple[tuple[str, ...], ...]]:
    try:
        return {
            printable(location): tuple(tuple(map(printable, names)) for names in ranks)
            for location, ranks in matrix.items()
        }
    except (AttributeError, TypeError):
        raise Malformed(f"priority_matrix must be lists of names, got {quoted(matrix)}") from None
