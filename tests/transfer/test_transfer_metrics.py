"""Metrics for Prometheus, as its own parser reads them, and docs/transfer/metrics.md."""

import gc
import importlib.util
import logging
import os
import re
import threading
from pathlib import Path

import pytest

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.transfer import TransferEngine

from .secret import ANOTHER, OURS, THEIRS, cause_of_opening, initiator, rejections
from .support import addressed, connect, raw_server, stall, untouched

prometheus = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")

PREFIX = "mooncake_kernels_transfer_"
PAGE = (Path(__file__).parents[2] / "docs/transfer/metrics.md").read_text()
SIZE = 1 << 16


def scrape(collector) -> dict[tuple, float]:
    """What Prometheus gets: {(name, labels): value}."""
    registry = prometheus.CollectorRegistry()
    registry.register(collector)
    text = prometheus.generate_latest(registry).decode()
    samples = [
        sample
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    ]
    values = {(one.name, frozenset(one.labels.items())): one.value for one in samples}
    assert len(values) == len(samples), "a series is there twice"
    return values


def value(values, name: str, **labels: str) -> float:
    return values[PREFIX + name, frozenset(labels.items())]


@pytest.fixture
def used(pair):
    """A pair that has written 1000 bytes, read 10, and failed once."""
    near, far = pair.regions(addressed(SIZE), untouched(SIZE))
    pair.near.write(pair.peer, [(near.address, far.address, 1000)]).wait()
    pair.near.read(pair.peer, [(near.address, far.address, 10)]).wait()
    with pytest.raises(TransferError):
        pair.near.write(pair.peer, [(near.address, 1, 1)]).wait()
    return pair


def test_peers(used):
    values = scrape(mk.prometheus_collector(used.near))
    labels = {"engine": used.near.name, "peer": used.far.name, "transport": used.peer.transport}
    assert value(values, "bytes_total", direction="write", **labels) == 1000
    assert value(values, "bytes_total", direction="read", **labels) == 10
    assert value(values, "requests_total", **labels) == 3
    assert value(values, "errors_total", **labels) == 1
    for name in ("retries_total", "in_flight", "in_flight_bytes"):
        assert value(values, name, **labels) == 0


def test_latency_histogram(used):
    labels = {"engine": used.near.name, "transport": used.peer.transport}
    values = scrape(mk.prometheus_collector(used.near))
    buckets = sorted(
        (float(dict(key)["le"]), count)
        for (name, key), count in values.items()
        if name == PREFIX + "request_seconds_bucket"
    )
    counts = [count for _, count in buckets]
    assert counts == sorted(counts) and counts[-1] == 3
    assert value(values, "request_seconds_count", **labels) == 3
    bounds_s = [bound for bound, _ in buckets]
    assert bounds_s[0] == 1e-6 and bounds_s[-2] == pytest.approx(67.1, abs=0.1)
    latency = used.near.stats()["transports"][used.peer.transport]["latency_total_us"]
    assert value(values, "request_seconds_sum", **labels) == latency / 1e6 > 0


def test_paths_are_sums_over_peers(tcp_pair):
    with TransferEngine() as third:
        for far in (tcp_pair.far, third):
            here, there = tcp_pair.near.register(addressed(64)), far.register(untouched(64))
            with tcp_pair.near.open(far.name) as peer, here:
                tcp_pair.near.write(peer, [(here.address, there.address, 64)]).wait()
        values = scrape(mk.prometheus_collector(tcp_pair.near))
    labels = {"engine": tcp_pair.near.name, "transport": "tcp", "path": "tcp:0"}
    assert value(values, "path_bytes_total", direction="write", **labels) == 128
    assert value(values, "path_bytes_total", direction="read", **labels) == 0
    assert value(values, "path_pieces_total", **labels) == 2
    for name in ("path_retries_total", "path_reconnects_total", "path_failures_total"):
        assert value(values, name, **labels) == 0


def test_metrics_without_the_peer_label(used):
    values = scrape(mk.prometheus_collector(used.near, by_peer=False))
    labels = {"engine": used.near.name, "transport": used.peer.transport}
    assert value(values, "bytes_total", direction="write", **labels) == 1000
    assert value(values, "requests_total", **labels) == 3
    assert not any("peer" in dict(key) for _, key in values)


def test_in_flight():
    with raw_server(stall) as name, TransferEngine() as engine:
        region = engine.register(addressed(SIZE))
        ticket = engine.write(engine.open(name), [(region.address, 1, 1000)])
        values = scrape(mk.prometheus_collector(engine))
        labels = {"engine": engine.name, "peer": name, "transport": "tcp"}
        assert value(values, "in_flight", **labels) == 1
        assert value(values, "in_flight_bytes", **labels) == 1000
        ticket.cancel()


def test_rejections():
    with TransferEngine(secret=OURS, secret_only=True) as engine, initiator(THEIRS) as stranger:
        assert cause_of_opening(stranger, engine.name) == ANOTHER
        assert rejections(engine) == {ANOTHER: 1}
        values = scrape(mk.prometheus_collector(engine))
        assert value(values, "rejections_total", engine=engine.name, cause=ANOTHER) == 1


def test_engines_are_added_and_removed():
    collector = mk.prometheus_collector()
    assert scrape(collector) == {}
    with TransferEngine() as one, TransferEngine() as other, one.open(other.name):
        collector.add(one, other)
        collector.add(one)
        engines = {dict(key)["engine"] for _, key in scrape(collector)}
        assert engines == {one.name}  # the other one has asked for nothing
        with other.open(one.name):
            engines = {dict(key)["engine"] for _, key in scrape(collector)}
            assert engines == {one.name, other.name}
    assert scrape(collector), "a closed engine is still there"
    del one, other
    gc.collect()
    assert scrape(collector) == {}


def test_scrapes_during_transfers(tcp_pair):
    """The counters never go back."""
    here, there = tcp_pair.regions(addressed(SIZE), untouched(SIZE))
    collector, over = mk.prometheus_collector(tcp_pair.near), threading.Event()

    def move():
        while not over.is_set():
            with tcp_pair.near.open(tcp_pair.far.name) as peer:
                tcp_pair.near.write(peer, [(here.address, there.address, 640)]).wait()

    threads = [threading.Thread(target=move) for _ in range(2)]
    for thread in threads:
        thread.start()
    before: dict[tuple, float] = {}
    for _ in range(30):
        now = scrape(collector)
        for key, count in before.items():
            assert "_in_flight" in key[0] or now[key] >= count, key
        before = now
    over.set()
    for thread in threads:
        thread.join()


def test_invalid_arguments_are_rejected(pair):
    with pytest.raises(InvalidArgument, match="engines must be TransferEngines, got 7"):
        mk.prometheus_collector(pair.near, 7)
    with pytest.raises(InvalidArgument, match="by_peer must be a bool, got 'no'"):
        mk.prometheus_collector(pair.near, by_peer="no")
    collector = mk.prometheus_collector(pair.near)
    pair.far.name = pair.near.name  # as of two metadata servers
    with pytest.raises(InvalidArgument, match="names of their own"):
        collector.add(pair.far)


def test_missing_prometheus_package_is_reported(pair, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"mooncake-kernels\[metrics\]"):
        mk.prometheus_collector(pair.near)


def test_forked_child_omits_its_parents_engines(used):
    collector = mk.prometheus_collector(used.near)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if scrape(collector) == {} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_documentation_lists_every_metric_and_its_labels(used):
    described = {
        name: set(re.findall(r"`(\w+)`", labels))
        for name, labels in re.findall(r"^\| `(\w+)` \| (`.*?) \|", PAGE, re.M)
        if "engine" in labels
    }
    collected = {}
    with (
        TransferEngine(secret=OURS, secret_only=True) as guarded,
        connect(guarded.name) as stranger,
    ):
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        assert rejections(guarded)
        for name, key in scrape(mk.prometheus_collector(used.near, guarded)):
            name = re.sub("_(bucket|sum|count)$", "", name.removeprefix(PREFIX))
            collected[name] = {label for label, _ in key} - {"le"}
    assert collected == described


def test_logs(pair, caplog):
    near, far = pair.regions(addressed(64), untouched(64))
    with caplog.at_level(logging.DEBUG, "mooncake_kernels.transfer"):
        with pair.near.open(pair.far.name) as peer:
            [opened] = caplog.records
            assert opened.levelno == logging.INFO
            assert (opened.engine, opened.peer) == (pair.near.name, pair.far.name)
            assert opened.transport == peer.transport
            caplog.clear()
            pair.near.write(peer, [(near.address, far.address, 64)]).wait()
            assert caplog.records == []
            with pytest.raises(TransferError) as caught:
                pair.near.write(peer, [(near.address, 1, 64)]).wait()
            [failed] = caplog.records
            assert failed.levelno == logging.DEBUG and failed.getMessage() == str(caught.value)
            assert (failed.peer, failed.transport) == (pair.far.name, peer.transport)
            assert (failed.cause, failed.num_bytes, failed.num_bytes_done) == (
                caught.value.cause,
                64,
                0,
            )
            assert failed.timed_out is False


def test_rejections_are_logged_when_an_engine_closes(caplog):
    engine = TransferEngine(secret=OURS, secret_only=True)
    with initiator(THEIRS) as stranger:
        for _ in range(3):
            assert cause_of_opening(stranger, engine.name) == ANOTHER
    assert rejections(engine, 3) == {ANOTHER: 3}
    engine.close()
    engine.close()
    [record] = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert record.name == "mooncake_kernels.transfer"
    assert (record.engine, record.count) == (engine.name, 3)
    assert record.cause == ANOTHER


def test_failed_open_is_logged(caplog):
    with caplog.at_level(logging.DEBUG, "mooncake_kernels.transfer"), TransferEngine() as engine:
        with pytest.raises(TransferError):
            engine.open("127.0.0.1:1")
        [record] = caplog.records
        assert (record.peer, record.cause) == ("127.0.0.1:1", "connection refused")
