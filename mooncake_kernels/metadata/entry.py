"""The values in a metadata server: Mooncake's ``rpc_meta``, with our fields in it; and ``ram``, the
segments that its engines publish.

Segments are only read, so that tools can show them: our engines do not speak their protocols.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .untrusted import Malformed, integer, json_object, objects, printable, quoted, text

PROTOCOL = "mooncake_kernels"

_HOST = re.compile(r"(?=.{1,240}$)([\w.-]+|[\w.%-]*:[\w.%:-]*)", re.ASCII)  # names, and IPv6
_INSTANCE = re.compile(r"[0-9a-f]{16}")
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


@dataclass(frozen=True)
class Entry:
    """An engine that can be found.

    Attributes:
        name: the name it is opened by.
        address: ``"host:port"`` at which it listens.
        protocol: ``mooncake_kernels``; for a Mooncake engine, its segment's, like ``tcp`` or
            ``rdma``; empty if it has none.
        instance: random, distinguishes it from earlier engines of that name; 0: unknown.
        version: of mooncake_kernels.
        host: name of its machine.
        pid: of its process there; 0: unknown.
        segment: what a Mooncake engine offers to others; None for our engines.
    """

    name: str
    address: str
    protocol: str = PROTOCOL
    instance: int = 0
    version: str = ""
    host: str = ""
    pid: int = 0
    segment: Segment | None = None


def encode(entry: Entry) -> bytes:
    """Return the JSON of one of our engines."""
    host, _, port = entry.address.rpartition(":")
    document = {
        "ip_or_host_name": host.strip("[]"),
        "rpc_port": int(port),
        "protocol": PROTOCOL,
        "instance": f"{entry.instance:016x}",
        "version": entry.version,
        "host": entry.host,
        "pid": entry.pid,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def decode(name: str, value: bytes) -> Entry:
    """Return the entry, without a segment; raise ``Malformed`` if the JSON is invalid."""
    document = json_object(value)
    host, port = document.get("ip_or_host_name"), integer(document, "rpc_port", 1, 65535)
    if not isinstance(host, str) or not _HOST.fullmatch(host):
        raise Malformed(f"ip_or_host_name must be a host, got {quoted(host)}")
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if document.get("protocol") != PROTOCOL:
        return Entry(name, address, protocol="")
    instance = document.get("instance")
    if not isinstance(instance, str) or not _INSTANCE.fullmatch(instance) or not int(instance, 16):
        raise Malformed(
            f"instance must be 16 hexadecimal digits, not all 0, got {quoted(instance)}"
        )
    return Entry(
        name,
        address,
        PROTOCOL,
        int(instance, 16),
        text(document, "version"),
        text(document, "host"),
        integer(document, "pid", 0, (1 << 32) - 1),
    )
