"""An engine's counters of its peers, as rows per peer and transport, and in sums."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import _host

Counters = dict[str, Any]  # integers; of requests also latency_us, {upper bound in us: requests}
Table = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class PeerRow:
    """The counters of one peer by one transport, and those of each path to it."""

    peer: str
    transport: str
    requests: Counters
    paths: dict[str, dict[str, int]]


def rows_of(engine: _host.TransferEngine) -> list[PeerRow]:
    """Return a row for each peer and transport, with all its counters."""
    rows = []
    for peer, transport, requests, latency, total_ns, paths in engine.stats():
        counters: Counters = {
            **requests,
            "num_requests": sum(latency),
            "num_retries": sum(path["num_retries"] for path in paths.values()),
            "latency_us": dict(zip(bounds_us(len(latency)), latency, strict=True)),
            "latency_total_us": total_ns // 1000,
        }
        rows.append(PeerRow(peer, transport, counters, paths))
    return rows


def bounds_us(num_buckets: int) -> list[float]:
    """The upper bounds of latency buckets: a request in bucket i took less than 2**i us."""
    return [*(1 << i for i in range(num_buckets - 1)), math.inf]


def table_of(rows: Iterable[PeerRow]) -> Table:
    """Sum the rows: by peer, by transport, and by path of a peer."""
    table: Table = {"peers": {}, "transports": {}, "paths": {}}
    for row in rows:
        add(table["peers"].setdefault(row.peer, {}), row.requests)
        add(table["transports"].setdefault(row.transport, {}), row.requests)
        for path, counters in row.paths.items():
            add(table["paths"].setdefault(row.peer, {}).setdefault(path, {}), counters)
    return table


def add(sums: dict[Any, Any], counters: Mapping[Any, Any]) -> None:
    """Add counters to sums with the same keys; nested dictionaries key by key."""
    for key, count in counters.items():
        if isinstance(count, dict):
            add(sums.setdefault(key, {}), count)
        else:
            sums[key] = sums.get(key, 0) + count
