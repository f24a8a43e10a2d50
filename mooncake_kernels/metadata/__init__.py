"""Metadata servers: a directory of engines and their addresses.

``mk.TransferEngine("prefill-3", metadata="redis://...")`` publishes itself in one, and finds others
by name there. Tools can query it, too::

    with mk.metadata.connect("redis://10.0.0.1:6379/0") as metadata:
        for entry in metadata.entries():
            print(entry.name, entry.address, entry.protocol)

A server is Redis, or one of Mooncake's HTTP form, such as ``python -m mooncake_kernels metadata``.
Anyone who can write to it decides which engine a name resolves to. See docs/transfer/metadata.md.
"""

from typing import Any

from .base import Metadata, Publication, Store
from .directory import P2P, Directory, KeptPublication
from .entry import PROTOCOL, Entry, Segment, SegmentBuffer, SegmentDevice
from .url import MetadataUrl, parse_url

__all__ = [
    "PROTOCOL",
    "P2P",
    "Directory",
    "Entry",
    "KeptPublication",
    "Metadata",
    "MetadataUrl",
    "Publication",
    "Segment",
    "SegmentBuffer",
    "SegmentDevice",
    "Store",
    "choose",
    "connect",
    "open_store",
    "parse_url",
]


def connect(url: str) -> Metadata:
    """Make a client of a metadata server. It connects on first use.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, ``http://`` or ``https://``, with the query
            parameter ``prefix`` for keys other than ``mooncake/...``; or ``p2p``, where a name is
            an address.

    Returns:
        A ``Directory``: ``lookup(name)``, ``entries()``, ``close()``. Thread-safe.

    Raises:
        InvalidArgument: the URL is none of these.
        Unavailable: redis-py is not installed.
    """
    return choose("connect", "url", url)


def choose(op: str, argument: str, url: Any) -> Metadata:
    """Like ``connect``, for another call's argument, which errors name."""
    if isinstance(url, str) and url == "p2p":
        return P2P()
    parsed = parse_url(op, argument, url)
    return Directory(str(parsed), open_store(parsed), parsed.prefix)


def open_store(url: MetadataUrl) -> Store:
    """Make a client of the keys and values at a server. It connects on first use.

    Raises:
        Unavailable: redis-py is not installed.
    """
    if url.parts.scheme in ("http", "https"):
        from .http_store import HttpStore

        return HttpStore(url)
    from .redis_store import RedisStore

    return RedisStore(url)
