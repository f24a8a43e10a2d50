"""The metrics of ``metrics.py``: engines' counters as Prometheus families."""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from .errors import InvalidArgument
from .transfer import TransferEngine
from .transfer.stats import Counters, add, rows_of

PREFIX = "mooncake_kernels_transfer_"
DIRECTIONS = {"read": "num_bytes_read", "write": "num_bytes_written"}
OF_REQUESTS = {  # the rest of a metric's name: the counter, and its description
    "requests": ("num_requests", "Requests that are over."),
    "errors": ("num_errors", "Requests that failed, were cancelled or ran out of time."),
    "retries": ("num_retries", "Parts of requests that were tried again."),
}
IN_FLIGHT = {
    "in_flight": ("num_in_flight", "Requests that are not over."),
    "in_flight_bytes": ("num_bytes_in_flight", "Bytes of the requests that are not over."),
}
OF_PATHS = {
    "path_pieces": ("num_pieces", "Pieces of requests that went by a connection or NIC."),
    "path_retries": ("num_retries", "Parts of requests that it lost, and that were tried again."),
    "path_reconnects": ("num_reconnects", "Times that it was connected anew."),
    "path_failures": ("num_failures", "Times that it was lost, or could not be connected."),
}

Sums = dict[tuple[str, ...], Counters]


def families(engines: Sequence[TransferEngine], *, by_peer: bool) -> Iterator[Metric]:
    """Return all metrics of the engines."""
    requests: Sums = {}  # by engine, (peer,) transport
    transports: Sums = {}  # by engine, transport
    paths: Sums = {}  # by engine, transport, path
    rejections: dict[tuple[str, str], int] = {}
    for engine in engines:
        try:
            rows, causes = rows_of(engine._engine), engine.rejections()
        except InvalidArgument:  # a forked child: the parent owns them
            continue
        for row in rows:
            labels = (engine.name, row.transport)
            by = (engine.name, row.peer, row.transport) if by_peer else labels
            add(requests.setdefault(by, {}), row.requests)
            add(transports.setdefault(labels, {}), row.requests)
            for path, counters in row.paths.items():
                add(paths.setdefault((*labels, path), {}), counters)
        rejections |= {(engine.name, cause): count for cause, count in causes.items()}

    labels_of_requests = ["engine", "peer", "transport"] if by_peer else ["engine", "transport"]
    yield _bytes("bytes", "Bytes that were confirmed.", labels_of_requests, requests)
    yield from _counters(OF_REQUESTS, labels_of_requests, requests)
    for name, (counter, text) in IN_FLIGHT.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels_of_requests)
        for key, counters in requests.items():
            gauge.add_metric(key, counters[counter])
        yield gauge
    yield _histogram(transports)
    labels_of_paths = ["engine", "transport", "path"]
    yield _bytes("path_bytes", "Bytes by connection or NIC.", labels_of_paths, paths)
    yield from _counters(OF_PATHS, labels_of_paths, paths)
    turned_away = CounterMetricFamily(
        PREFIX + "rejections", "Connections that were turned away.", labels=["engine", "cause"]
    )
    for by_cause, count in rejections.items():
        turned_away.add_metric(by_cause, count)
    yield turned_away


def _bytes(name: str, text: str, labels: list[str], sums: Sums) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=[*labels, "direction"])
    for key, counters in sums.items():
        for direction, counter in DIRECTIONS.items():
            family.add_metric([*key, direction], counters[counter])
    return family


def _counters(table: dict[str, tuple[str, str]], labels: list[str], sums: Sums) -> Iterator[Metric]:
    for name, (counter, text) in table.items():
        family = CounterMetricFamily(PREFIX + name, text, labels=labels)
        for key, counters in sums.items():
            family.add_metric(key, counters[counter])
        yield family


def _histogram(sums: Sums) -> Metric:
    family = HistogramMetricFamily(
        PREFIX + "request_seconds",
        "Seconds from the call of a request until it was over.",
        labels=["engine", "transport"],
    )
    for key, counters in sums.items():
        latency = counters["latency_us"]
        bounds = ["+Inf" if bound == math.inf else str(bound / 1e6) for bound in latency]
        buckets = [*zip(bounds, accumulate(latency.values()), strict=True)]
        family.add_metric(key, buckets, counters["latency_total_us"] / 1e6)
    return family
