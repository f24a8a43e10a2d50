"""The value of a name in a metadata server: Mooncake's ``rpc_meta``, with our fields in it."""

import json
import re
from dataclasses import dataclass

from .segment import Segment
from .untrusted import Malformed, integer, json_object, quoted, text

PROTOCOL = "mooncake_kernels"

_HOST = re.compile(r"(?=.{1,240}$)([\w.-]+|[\w.%-]*:[\w.%:-]*)", re.ASCII)  # names, and IPv6
_INSTANCE = re.compile(r"[0-9a-f]{16}")


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
