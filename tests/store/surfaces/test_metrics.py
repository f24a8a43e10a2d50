"""Metrics of stores, as Prometheus' own parser reads them, and the page that lists them."""

import re
from pathlib import Path

import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import SsdTier, Store, TieredStore

prometheus = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")
metrics = pytest.importorskip("mooncake_serving.store.metrics")

PAGE = (Path(__file__).parents[3] / "docs/store/admin.md").read_text()


def scrape(collector) -> dict[tuple[str, str], float]:
    """What Prometheus gets: {(name, pool): value}."""
    registry = prometheus.CollectorRegistry()
    registry.register(collector)
    text = prometheus.generate_latest(registry).decode()
    samples = [
        sample
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    ]
    values = {
        (one.name.removeprefix(metrics.PREFIX), one.labels["pool"]): one.value for one in samples
    }
    assert len(values) == len(samples), "a series is there twice"
    return values


def test_what_is_reported(pool):
    store = Store(pool, evict_ratio=0)
    store.put("a", bytes(4097))
    store.get("a")
    store.get("b")
    store.evict(1)
    store.put("c", b"x")
    with store.view("c"):
        values = scrape(metrics.StoreCollector(store))
    told = {name: value for (name, path), value in values.items() if path == pool.path}
    assert told == {
        "up": 1,
        "capacity_bytes": 64 * 4096,
        "free_bytes": 63 * 4096,
        "largest_free_bytes": pool.stats().largest_free_bytes,
        "free_spans": pool.stats().num_free_spans,
        "fragmentation": pool.stats().fragmentation,
        "max_objects": 64,
        "objects": 1,
        "objects_being_written": 0,
        "doomed_objects": 0,
        "doomed_bytes": 0,
        "pins": 1,
        "processes": 1,
        "hits_total": 2,
        "misses_total": 1,
        "stored_total": 2,
        "removed_total": 0,
        "evicted_total": 1,
        "read_bytes_total": 4098,
        "stored_bytes_total": 4098,
        "repairs_total": 0,
    }


@pytest.fixture
def tiered(pool, tmp_path):
    tier = SsdTier(tmp_path / "tier", 1 << 20, bucket_bytes=1 << 18)
    with TieredStore(pool, tier, min_uses=1, evict_ratio=0) as store:
        yield store


def test_a_disk_is_reported(pool, tiered):
    tiered.put_each(range(10), [bytes(4096)] * 10)
    tiered.evict(4 * 4096)
    assert tiered.flush() and tiered.get(9) == bytes(4096)
    stats = tiered.tier.stats()
    collector = metrics.StoreCollector(tiered)
    told = {name: v for (name, _), v in scrape(collector).items() if name.startswith("ssd_")}
    assert told == {
        "ssd_capacity_bytes": 1 << 20,
        "ssd_live_bytes": 4 * 4096,
        "ssd_objects": 4,
        "ssd_free_buckets": stats.num_free_buckets,
        "ssd_is_writable": 1,
        "ssd_queued": 0,
        "ssd_queued_bytes": 0,
        "ssd_hits_total": 1,
        "ssd_stored_bytes_total": 4 * 4096,
        "ssd_written_bytes_total": stats.written_bytes,
        "ssd_dropped_total": 0,
        "ssd_damaged_total": 0,
        "ssd_write_errors_total": 0,
        "ssd_demoted_total": 4,
        "ssd_not_demoted_total": 0,
        "ssd_unadmitted_total": 0,
        "ssd_queue_full_total": 0,
        "ssd_too_large_total": 0,
        "ssd_unwritten_total": 0,
        "ssd_damaged_in_pool_total": 0,
        "ssd_removed_in_queue_total": 0,
    }
    tiered.close()
    assert not scrape(collector)


def test_scrape_while_a_stopped_process_holds_the_pool(pool, tiered, monkeypatch):
    def stats(timeout_s):
        assert timeout_s < 10, "Prometheus does not wait longer"
        raise TimeoutError("a stopped process holds the pool")

    with Store.create(4096) as other:
        collector = metrics.StoreCollector(tiered, other)
        before = scrape(collector)
        monkeypatch.setattr(pool, "stats", stats)
        values = scrape(collector)
    assert values["up", pool.path] == 0 and values["up", other.pool.path] == 1
    told = {name for name, path in before if path == other.pool.path}
    assert told == {name for name, path in values if path == other.pool.path}
    assert ("objects", pool.path) not in values
    for without_the_pool in ("hits_total", "ssd_objects", "ssd_queued"):
        assert (without_the_pool, pool.path) in values


def test_collector_with_several_and_closed_stores(pool):
    other = Store.create(4096)
    collector = metrics.StoreCollector(Store(pool))
    collector.add(other)
    collector.add(other)
    assert {path for _, path in scrape(collector)} == {pool.path, other.pool.path}
    with pytest.raises(InvalidArgument, match="stores must have pools of their own, got two of"):
        collector.add(Store(pool))
    other.close()
    assert {path for _, path in scrape(collector)} == {pool.path}
    with (
        Store.create(4096) as third,
        pytest.raises(InvalidArgument, match=r"stores\[1\] must be a"),
    ):
        collector.add(third, 5)
    assert {path for _, path in scrape(collector)} == {pool.path}, "all or none"


def test_a_pool_that_is_reopened_is_reported_again(path):
    collector = metrics.StoreCollector()
    for _ in range(3):
        with ObjectPool.create(4096, path) as made:
            collector.add(Store(made))
            assert {path for _, path in scrape(collector)} == {str(path)}
        path.unlink()
        assert not scrape(collector)
    assert not collector._stores, "nor does it keep what was closed"


def test_documentation_lists_all_metrics(tiered):
    names = {name for name, _ in scrape(metrics.StoreCollector(tiered))}
    table = PAGE[PAGE.index("## Metrics") :].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE)) == names
