"""Pages of an engine in a store: many at once, of several parts; failures are misses."""

import threading

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_serving.connectors.tier_store import TierStore, namespace_of
from tests.metadata.support import RedisServer

PAGE_BYTES = 48 << 10


class Memory:
    """Pages of an engine, each of some parts that are apart in memory."""

    def __init__(self, num_pages, num_parts, seed=None):
        size = PAGE_BYTES // num_parts
        self.bytes = np.zeros((num_parts, num_pages, size), np.uint8)
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.bytes.shape)
        self._size, self._base = size, self.bytes.ctypes.data

    def places(self, pages):
        num_parts, num_pages, size = self.bytes.shape
        starts = self._base + np.arange(num_parts)[None] * num_pages * size
        return starts + np.asarray(pages)[:, None] * size, np.full((len(pages), num_parts), size)

    def pages(self, pages):
        return self.bytes[:, pages]


@pytest.fixture(params=["shm", "tiered", "redis", "redis, of others"])
def url(request, tmp_path):
    if request.param == "shm":
        yield f"shm:{tmp_path}/kv?size=4MiB"
    elif request.param == "tiered":
        yield f"tiered:{tmp_path}?memory=4MiB&disk=64MiB&pool={tmp_path}/kv"
    else:
        server = RedisServer(tmp_path)
        size = "" if "others" in request.param else "size=4MiB"
        holder = TierStore(f"{server.url}?size=4MiB", "other engine")
        yield f"{server.url}?{size}"
        holder.close()
        server.stop()


def names(*numbers):
    return [f"page {number}".encode() for number in numbers]


@pytest.mark.parametrize("num_parts", [1, 3])
def test_pages_come_back_into_other_memory(url, num_parts):
    here, there = Memory(8, num_parts, seed=1), Memory(8, num_parts)
    with TierStore(url, "m") as store:
        wanted = names(*range(5))
        assert not store.exists_each(wanted).any() and store.match_prefix(wanted) == 0
        assert store.put_each(wanted, *here.places([4, 0, 7, 1, 2])).all()
        assert store.exists_each(wanted).all() and store.match_prefix(wanted) == 5
        assert store.get_each(wanted, *there.places([0, 1, 2, 3, 4])).all()
        assert (there.pages([0, 1, 2, 3, 4]) == here.pages([4, 0, 7, 1, 2])).all()
        assert not store.failures


@pytest.mark.parametrize("num_parts", [1, 3])
def test_page_missing_in_the_middle_is_the_only_miss(url, num_parts):
    here, there = Memory(4, num_parts, seed=1), Memory(4, num_parts)
    with TierStore(url, "m") as store:
        assert store.put_each(names(0, 1, 3), *here.places([0, 1, 3])).all()
        wanted = names(0, 1, 2, 3)
        assert store.exists_each(wanted).tolist() == [True, True, False, True]
        assert store.match_prefix(wanted) == 2
        assert store.get_each(wanted, *there.places(range(4))).tolist() == [True, True, False, True]
        assert (there.pages([0, 1, 3]) == here.pages([0, 1, 3])).all()
        assert not there.pages([2]).any()


def test_page_of_another_size_is_a_miss(url):
    here, there = Memory(2, 1, seed=1), Memory(2, 1)
    with TierStore(url, "m") as store:
        addresses, sizes = here.places([0, 1])
        sizes[1] //= 2
        assert store.put_each(names(0, 1), addresses, sizes).all()
        assert store.get_each(names(0, 1), *there.places([0, 1])).tolist() == [True, False]
        sizes[0] //= 2  # and now too small a buffer
        assert store.get_each(names(0, 1), addresses, sizes).tolist() == [False, True]


def test_first_of_two_writers_wins(url):
    first, second, there = Memory(1, 3, seed=1), Memory(1, 3, seed=2), Memory(1, 3)
    with TierStore(url, "m") as store:
        assert store.put_each(names(0), *first.places([0])).all()
        assert store.put_each(names(0), *second.places([0])).all()
        assert store.get_each(names(0), *there.places([0])).all()
        assert (there.bytes == first.bytes).all()


def test_concurrent_puts_of_one_page_all_report_it_stored(url):
    memory, there = Memory(1, 1, seed=1), Memory(1, 1)
    with TierStore(url, "m") as store:
        results = []

        def put():
            for number in range(20):
                results.append(store.put_each(names(number), *memory.places([0]))[0])

        threads = [threading.Thread(target=put) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(results) and len(results) == 80
        for number in range(20):
            assert store.get_each(names(number), *there.places([0])).all()
            assert (there.bytes == memory.bytes).all()


def test_namespaces_do_not_share_pages(url):
    memory = Memory(1, 1, seed=1)
    with TierStore(url, "m") as store:
        store.put_each(names(0), *memory.places([0]))
        assert store.get(names(0)[0]) == memory.bytes.tobytes()
    if url.startswith("redis"):
        return
    with TierStore(url, "n") as other:
        assert other.get(names(0)[0]) is None
        other.put_each(names(0), *memory.places([0]))
        assert other.clear() and other.get(names(0)[0]) is None
    with TierStore(url, "m") as again:  # after a restart
        assert again.get(names(0)[0]) == memory.bytes.tobytes()


def test_removed_pages_are_gone(url):
    memory = Memory(3, 1, seed=1)
    with TierStore(url, "m") as store:
        store.put_each(names(0, 1, 2), *memory.places([0, 1, 2]))
        assert store.remove_each(names(1, 5)).tolist() == [True, False]
        assert store.exists_each(names(0, 1, 2)).tolist() == [True, False, True]


def test_full_store_evicts_the_tail_of_old_prompts(tmp_path):
    memory = Memory(16, 1, seed=1)
    with TierStore(f"shm:{tmp_path}/kv?size=1MiB", "m") as store:  # 21 pages
        for prompt in range(10):
            wanted = names(*range(100 * prompt, 100 * prompt + 16))
            assert store.put_each(wanted, *memory.places(range(16))).all()
        assert store.match_prefix(wanted) == 16 and not store.failures
        used, size = store.used_bytes()
        assert 0 < used <= size == 1 << 20


def test_used_pages_stay(tmp_path):
    memory = Memory(4, 1, seed=1)
    with TierStore(f"shm:{tmp_path}/kv?size=1MiB", "m") as store:
        for first in range(0, 400, 4):
            store.put_each(names(*range(first, first + 4)), *memory.places(range(4)))
            store.use_each(names(0, 1, 2, 3, 1000))
        assert store.exists_each(names(0, 1, 2, 3, 4)).tolist() == [True] * 4 + [False]


def test_page_larger_than_the_store_is_refused_by_name(tmp_path):
    memory = Memory(1, 1)
    with TierStore(f"shm:{tmp_path}/kv?size=32KiB", "m") as store:
        with pytest.raises(
            InvalidArgument, match=f"StoreTier: url must .* {PAGE_BYTES} bytes, got"
        ):
            store.check_page("StoreTier", PAGE_BYTES)
        assert not store.put_each(names(0), *memory.places([0]))[0]
        assert store.failures == {"store: InvalidArgument": 1}


def test_store_with_only_retained_objects_stores_nothing(tmp_path, caplog):
    memory = Memory(30, 1, seed=1)
    with TierStore(f"shm:{tmp_path}/kv?size=1MiB", "m") as store:
        for key in range(21):
            store._store.put(key, bytes(PAGE_BYTES), retention="hard")
        for _ in range(3):
            assert not store.put_each(names(0, 1), *memory.places([0, 1])).any()
        assert store.failures == {"store: FULL": 3}
    assert caplog.text.count("pages are not stored: FULL") == 1


def test_failures_are_misses_and_are_logged_once(tmp_path, caplog, monkeypatch):
    memory = Memory(2, 3, seed=1)
    with TierStore(f"shm:{tmp_path}/kv?size=1MiB", "m") as store:
        store.put_each(names(0, 1), *memory.places([0, 1]))

        def fail(*_, **__):
            raise Unavailable("the disk is on fire")

        for call in ("exists_each", "match_prefix", "put_headed", "get_headed", "remove_each"):
            monkeypatch.setattr(store._store, call, fail)
        for _ in range(3):
            assert not store.exists_each(names(0, 1)).any()
            assert store.match_prefix(names(0)) == 0
            assert not store.put_each(names(0, 1), *memory.places([0, 1])).any()
            assert not store.get_each(names(0, 1), *memory.places([0, 1])).any()
            assert not store.remove_each(names(0)).any()
    assert caplog.text.count("on fire") == len(store.failures) == 4
    assert store.failures["look up: Unavailable"] == 6


def test_directory_that_is_gone_is_a_miss(tmp_path):
    server = RedisServer(tmp_path)
    memory, there = Memory(2, 1, seed=1), Memory(2, 1)
    with TierStore(f"{server.url}?size=1MiB", "m") as store:
        store.put_each(names(0), *memory.places([0]))
        server.stop()
        assert not store.put_each(names(1), *memory.places([1])).any()
        assert store.get_each(names(0), *there.places([0])).all()  # it is here
        assert not store.get_each(names(1), *there.places([1])).any()
        assert "store: Unavailable" in store.failures and "load: Unavailable" in store.failures


@pytest.mark.parametrize("scheme", ["shm", "redis"])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_damaged_page_is_a_miss_and_can_be_put_again(tmp_path, num_parts, scheme, request):
    memory, there = Memory(2, num_parts, seed=1), Memory(2, num_parts)
    url = f"shm:{tmp_path}/kv?size=1MiB"
    if scheme == "redis":
        server = RedisServer(tmp_path)
        request.addfinalizer(server.stop)
        url = f"{server.url}?size=1MiB"
    with TierStore(url, "m") as store:
        store.put_each(names(0, 1), *memory.places([0, 1]))
        store._own.pool.memory()[2048::4096] ^= 1
        assert not store.get_each(names(0, 1), *there.places([0, 1])).any()
        assert not store.exists_each(names(0, 1)).any()
        assert store.put_each(names(0, 1), *memory.places([0, 1])).all()
        assert store.get_each(names(0, 1), *there.places([0, 1])).all()
        assert (there.bytes == memory.bytes).all()


def test_pages_of_several_parts_come_from_the_disk(tmp_path):
    url = f"tiered:{tmp_path}?memory=1MiB&disk=64MiB&pool={tmp_path}/kv"
    memory, there = Memory(64, 3, seed=1), Memory(64, 3)
    with TierStore(url, "m") as store:
        for first in range(0, 64, 4):
            pages = range(first, first + 4)
            assert store.put_each(names(*pages), *memory.places(pages)).all()
        assert store._store.flush(60)
        found = store.get_each(names(*range(64)), *there.places(range(64)))
        assert found.sum() > 40
        assert (there.bytes[:, found] == memory.bytes[:, found]).all()


def test_namespace_names_everything_in_one_order():
    one = namespace_of("vllm", {"b": 1, "a": (1, "x")})
    assert one == namespace_of("vllm", {"a": [1, "x"], "b": 1}) != namespace_of("vllm", {"b": 1})
    assert one != namespace_of("sglang", {"a": [1, "x"], "b": 1})
