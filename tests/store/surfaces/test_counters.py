"""Sums over processes, dead or alive."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.store import Store
from mooncake_serving.store.counters import Counters, Counts, counters_folder, read_counts
from mooncake_serving.store.observer import ObservedPool

from ..support import child, ended_well, kill

KEYS = np.array([[1, 2], [3, 4]], np.uint64)


def files(path) -> list[str]:
    return sorted(file.name for file in counters_folder(str(path)).iterdir())


def test_what_is_counted(pool):
    with Counters(pool.path) as counters:
        pool.observe(counters)
        store = Store(pool, evict_ratio=0)
        store.put("a", b"123")
        store.put("a", b"123")
        store.get("a")
        store.get("b")
        store.remove("a")
        store.put("c", bytes(60 * 4096))
        store.put("d", bytes(60 * 4096))
        counts = Counts(1, 1, 3, 1, 1, 3, 3 + 2 * 60 * 4096)
        assert counters.own() == read_counts(pool.path) == counts
        assert counts.hit_rate == 0.5 and counts.num_reads == 2
        assert counts - Counts(1, 0, 1) == Counts(0, 1, 2, 1, 1, 3, 3 + 2 * 60 * 4096)


def test_nobody_counts(path):
    assert read_counts(str(path)) == Counts() and Counts().hit_rate is None


def test_a_file_each_and_the_next_one_goes_on(path):
    with Counters(str(path)) as first, Counters(str(path)) as second:
        first.on_stored(KEYS, 10)
        second.on_stored(KEYS, 20)
        assert files(path) == ["0", "1"]
        assert read_counts(str(path)) == Counts(num_stored=4, stored_bytes=30)
    with Counters(str(path)) as third:
        third.on_removed(KEYS, evicted=True)
        assert third.own() == Counts(num_stored=2, stored_bytes=10, num_evicted=2)
        assert files(path) == ["0", "1"]
    assert read_counts(str(path)) == Counts(num_stored=4, stored_bytes=30, num_evicted=2)


def test_a_closed_one_counts_for_itself(path):
    counters = Counters(str(path))
    counters.on_read(1, 0, 5)
    counters.close()
    counters.close()
    counters.on_read(1, 0, 5)
    assert counters.own().num_hits == 2 and read_counts(str(path)).num_hits == 1


def test_a_killed_process_has_counted(path):
    ready, tell = os.pipe()

    def life():
        with Counters(str(path)) as counters:
            counters.on_read(3, 1, 30)
            os.write(tell, b"!")
            signal.pause()

    with child(life) as pid:
        assert os.read(ready, 1) == b"!"
        with Counters(str(path)):
            assert files(path) == ["0", "1"]
        kill(pid)
        with Counters(str(path)) as heir:
            heir.on_read(1, 0, 1)
            assert heir.own() == Counts(num_hits=4, num_misses=1, read_bytes=31)
    os.close(ready)
    os.close(tell)


def test_a_forked_child_counts_in_a_file_of_its_own(path):
    with Counters(str(path)) as counters:
        counters.on_read(1, 0, 1)

        def life():
            for _ in range(100):
                counters.on_read(1, 0, 1)
            assert counters.own().num_hits == 100
            counters.close()

        with child(life) as pid:
            assert ended_well(pid)
        assert files(path) == ["0", "1"] and counters.own().num_hits == 1
        with Counters(str(path)) as other:
            assert other.own().num_hits == 100, "the parent still has its own"
        assert read_counts(str(path)).num_hits == 101


def test_a_pool_without_a_name_is_counted_in_its_process():
    with ObservedPool.create(4096) as pool, Counters(pool.path) as counters:
        counters.on_stored(KEYS, 1)
        assert counters.own().num_stored == 2 and read_counts(pool.path) == Counts()


def test_files_that_are_just_being_made_are_passed_over(path):
    with Counters(str(path)) as counters:
        counters.on_stored(KEYS, 1)
        (counters_folder(str(path)) / "9").touch()
        assert read_counts(str(path)).num_stored == 2


def test_a_folder_that_cannot_be_made():
    with pytest.raises(OSError, match="nowhere"):
        Counters(str(Path("/nowhere/kv")))


def test_what_is_no_path():
    with pytest.raises(InvalidArgument, match="^Counters: pool_path must be a str, got 5$"):
        Counters(5)
