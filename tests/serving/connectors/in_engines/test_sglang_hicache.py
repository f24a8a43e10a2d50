"""SGLang's HiCache storage by its own factory, host pools and controller, on the CPU.

The controller's threads, GPUs and process groups are left out: the functions that its threads run
are called one after the other.
"""

import os
import queue
import uuid

import pytest
import torch

pytest.importorskip("sglang", reason="no SGLang: see make_engines")

import sglang_cpu  # noqa: F401  # before SGLang
from sglang.srt.managers.cache_controller import (
    HiCacheController,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str

from mooncake_kernels.errors import InvalidArgument

PAGE, LAYERS, HEADS, DIM, NUM_PAGES = 16, 3, 2, 8, 12
LAYOUTS = ["layer_first", "page_first", "page_first_direct"]


def host_pool(layout="page_first", dtype=torch.float16, page=PAGE):
    """SGLang's host pool of keys and values."""
    size = NUM_PAGES * PAGE
    k, v = (tuple(torch.zeros(size, HEADS, DIM, dtype=dtype) for _ in range(LAYERS)) for _ in "kv")
    pointers = [torch.tensor([one.data_ptr() for one in each]) for each in (k, v)]
    buffers = KVBuffers(
        k=k, v=v, k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers, page_size=page, head_num=HEADS, head_dim=DIM, v_head_dim=DIM,
        dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    with host_memory_budget_scope(1 << 30):
        return MHATokenToKVPoolHost(
            info, 1.0, 0, page, layout, pin_memory=False, device_capacity_tokens=size,
            start_layer=0, end_layer=LAYERS - 1, host_token_capacity=size,
        )  # fmt: skip


class StatePool:
    """A pool of states, of several parts a page, as that of Mamba has."""

    page_size, layout, dtype, start_layer, end_layer = 1, "page_first", torch.float32, 0, 1

    def __init__(self):
        self.parts = [torch.zeros(NUM_PAGES, 5), torch.zeros(NUM_PAGES, 3, 4)]

    def get_page_buffer_meta(self, indices):
        pairs = [
            (part[i].data_ptr(), part[i].nbytes) for i in indices.tolist() for part in self.parts
        ]
        return [address for address, _ in pairs], [size for _, size in pairs]

    def fill(self, seed):
        for i, part in enumerate(self.parts):
            part.normal_(generator=torch.Generator().manual_seed(seed + i))


class LogicalPool:
    """A pool of indices: other pools have the data."""

    page_size, layout, kv_buffer, dtype = PAGE, "page_first", None, torch.float16


def config_of(url, model="llama", rank=0, size=1, mla=False, **options):
    extra = {
        "backend_name": "mooncake-kernels",
        "module_path": "mooncake_serving.connectors.sglang.hicache",
        "class_name": "HiCacheStore",
        "interface_v1": 1,
        "url": url,
    } | options
    return HiCacheStorageConfig(
        tp_rank=rank, tp_size=size, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=mla, enable_storage_metrics=False, is_page_first_layout=True,
        model_name=model, extra_config=extra,
    )  # fmt: skip


class Engine:
    """SGLang's controller with a host pool and its storage, without a GPU."""

    def __init__(self, url, pool=None, **options):
        self.pool = pool or host_pool()
        config = config_of(url, **options)
        self.storage = StorageBackendFactory.create_backend("dynamic", config, self.pool)
        self.storage.register_mem_pool_host(self.pool)
        self.storage.on_host_pools_registered()
        control = self.control = HiCacheController.__new__(HiCacheController)
        control.storage_backend, control.storage_host_pool = self.storage, self.pool
        control.page_size = control.mem_pool_host = PAGE
        control.prefetch_sync_queue = queue.Queue()
        is_v1 = config.extra_config["interface_v1"]
        control.page_get_func = control._page_get_zero_copy if is_v1 else control._generic_page_get
        control.page_set_func = control._page_set_zero_copy if is_v1 else control._generic_page_set

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.storage.close()

    def fill(self, seed):
        self.pool.kv_buffer.normal_(generator=torch.Generator().manual_seed(seed))

    def pages(self, numbers):
        return torch.stack([self.pool.get_data_page(number * PAGE) for number in numbers])

    def save(self, tokens, numbers):
        """Have the backup thread's function store pages of the host pool."""
        hashes = get_storage_hash_str(tokens, None, page_size=PAGE)
        operation = StorageOperation(indices(numbers), tokens, hash_value=hashes)
        self.control._page_backup(operation)
        return operation.completed_tokens // PAGE

    def load(self, tokens, numbers):
        """Have the prefetch threads' functions look up and load; how many pages came."""
        operation = PrefetchOperation("r", tokens)
        hashes, num_tokens = self.control._storage_hit_query(operation)
        operation.hash_value = hashes
        operation.host_indices = indices(numbers[: num_tokens // PAGE])
        self.control._page_transfer(operation)
        acks = list(self.control.prefetch_sync_queue.queue)
        self.control.prefetch_sync_queue.queue.clear()
        return max((ack.completed_tokens for ack in acks), default=0) // PAGE


def indices(numbers):
    return torch.tensor([n * PAGE + i for n in numbers for i in range(PAGE)], dtype=torch.int64)


def tokens_of(num_pages, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1000, (num_pages * PAGE,), generator=generator).tolist()


@pytest.fixture(params=["shm", "tiered", "redis"])
def url(request, tmp_path):
    if request.param == "shm":
        return f"shm:{tmp_path}/kv?size=4MiB"
    if request.param == "tiered":
        return f"tiered:{tmp_path}?memory=4MiB&disk=64MiB&pool={tmp_path}/kv"
    if "MK_TEST_REDIS" not in os.environ:
        pytest.skip("MK_TEST_REDIS names no redis-server")
    cluster = f"test-{uuid.uuid4().hex}"
    return f"{os.environ['MK_TEST_REDIS']}?size=4MiB&pool={tmp_path}/kv&cluster={cluster}"


@pytest.mark.parametrize("interface", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_that_one_engine_saved_are_loaded_by_another(url, layout, interface):
    tokens, numbers, others = tokens_of(5), [3, 0, 7, 1, 2], [5, 6, 4, 8, 9]
    options = {"interface_v1": interface}
    with Engine(url, host_pool(layout), **options) as first:
        first.fill(1)
        assert first.save(tokens, numbers) == 5
        saved = first.pages(numbers)
    with Engine(url, host_pool(layout), **options) as second:
        assert second.load(tokens, others) == 5
        assert torch.equal(second.pages(others), saved)
        assert not second.pages([0, 1, 2, 3]).any()
        assert second.load(tokens_of(2, seed=2), others) == 0


def test_page_missing_in_the_middle_ends_the_prefix(url):
    tokens, numbers = tokens_of(5), list(range(5))
    hashes = get_storage_hash_str(tokens, None, page_size=PAGE)
    with Engine(url) as engine:
        engine.fill(1)
        engine.save(tokens, numbers)
        names = engine.storage._kv.names(hashes[2:3])
        engine.storage._store.remove_each(names)
        assert engine.storage.batch_exists(hashes) == 2
        found = engine.storage.batch_get_v1(hashes, indices(numbers))
        assert found == [True, True, False, True, True]
        assert engine.load(tokens, numbers) == 2
        assert engine.save(tokens, numbers) == 5 and engine.load(tokens, numbers) == 5


@pytest.mark.parametrize(
    "pool, options, shares",
    [
        ({}, {}, True),
        ({}, {"model": "qwen"}, False),
        ({}, {"namespace": "team"}, False),
        ({}, {"interface_v1": 0}, False),
        ({"dtype": torch.bfloat16}, {}, False),
        ({"layout": "page_first_direct"}, {}, False),
        ({"page": 2 * PAGE}, {}, False),
        ({}, {"rank": 1, "size": 2}, False),
        ({}, {"mla": True}, False),
    ],
)
def test_engines_share_pages_only_of_one_model_rank_and_form(tmp_path, pool, options, shares):
    url = f"shm:{tmp_path}/kv?size=4MiB"
    tokens = tokens_of(2)
    hashes = get_storage_hash_str(tokens, None, page_size=PAGE)
    with Engine(url) as first, Engine(url, host_pool(**pool), **options) as second:
        first.save(tokens, [0, 1])
        assert second.storage.batch_exists(hashes) == (2 if shares else 0)


def test_ranks_of_a_replicated_pool_share_pages_but_not_those_of_states(tmp_path):
    url = f"shm:{tmp_path}/kv?size=4MiB"
    transfer = PoolTransfer(PoolName.MAMBA, torch.tensor([3]), keys=["a"])
    with Engine(url, mla=True, size=2) as first, Engine(url, mla=True, rank=1, size=2) as second:
        for engine in (first, second):
            engine.storage.register_mem_host_pool_v2(StatePool(), PoolName.MAMBA)
        first.storage.batch_set_v1(["a"], indices([0]))
        first.storage.batch_set_v2([transfer])
        assert second.storage.batch_exists(["a"]) == 1
        found = second.storage.batch_exists_v2(["a"], [transfer])
        assert found.kv_hit_pages == 0 and found.restorable_prefix_pages == []
        assert second.storage.batch_set_v2([transfer]) == {PoolName.MAMBA: [True]}
        assert second.storage.batch_exists_v2(["a"], [transfer]).kv_hit_pages == 1


def test_states_come_back_with_their_pages(url):
    keys = list("abcd")
    with Engine(url) as first, Engine(url) as second:
        for engine in (first, second):
            engine.states = StatePool()
            engine.storage.register_mem_host_pool_v2(engine.states, PoolName.MAMBA)
        first.states.fill(1)
        given = [
            PoolTransfer(PoolName.KV, indices([0, 1, 2, 3]), keys=keys),
            PoolTransfer(PoolName.MAMBA, torch.tensor([5, 7]), keys=["b", "d"]),
        ]
        first.fill(1)
        assert first.storage.batch_set_v2(given) == {
            PoolName.KV: [True] * 4, PoolName.MAMBA: [True] * 2,
        }  # fmt: skip
        wanted = [
            PoolTransfer(PoolName.KV, indices([4, 5, 6, 7]), keys=keys),
            PoolTransfer(PoolName.MAMBA, torch.tensor([1, 2, 3]), keys=["b", "c", "d"]),
        ]
        assert second.storage.batch_get_v2(wanted) == {
            PoolName.KV: [True] * 4, PoolName.MAMBA: [True, False, True],
        }  # fmt: skip
        assert torch.equal(second.pages([4, 5, 6, 7]), first.pages([0, 1, 2, 3]))
        for mine, other in zip(second.states.parts, first.states.parts, strict=True):
            assert torch.equal(mine[[1, 3]], other[[5, 7]]) and not mine[2].any()


def brute_force(num_kv, policy, window, there):
    """The prefixes that a pool can serve, by definition."""
    lengths = range(1, num_kv + 1)
    if policy is PoolHitPolicy.ALL_PAGES:
        return {n for n in lengths if all(there[:n])}
    return {n for n in lengths if all(there[max(0, n - window) : n])}


@pytest.mark.parametrize("policy", [PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES])
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("there", [0b111111, 0b101101, 0b000111, 0b110000, 0, 0b011011])
def test_prefixes_are_those_that_all_pools_can_serve(tmp_path, policy, window, there):
    keys = list("abcdef")
    present = [bool(there >> i & 1) for i in range(6)]
    with Engine(f"shm:{tmp_path}/kv?size=4MiB") as engine:
        engine.storage.register_mem_host_pool_v2(StatePool(), PoolName.SWA)
        engine.storage.batch_set_v1(keys[:5], indices(range(5)))
        stored = [key for key, ok in zip(keys, present, strict=True) if ok]
        slots = torch.arange(len(stored))
        engine.storage.batch_set_v2([PoolTransfer(PoolName.SWA, slots, keys=stored)])
        asked = PoolTransfer(PoolName.SWA, keys=keys[:window], hit_policy=policy)
        found = engine.storage.batch_exists_v2(keys, [asked])
        expected = sorted(brute_force(5, policy, window, present))
        assert found.restorable_prefix_pages == expected
        assert found.kv_hit_pages == max(expected, default=0)
        hits = {PoolName.KV: 5} | ({PoolName.SWA: max(expected)} if expected else {})
        assert found.extra_pool_hit_pages == hits


def test_pool_without_memory_has_all_pages(tmp_path):
    with Engine(f"shm:{tmp_path}/kv?size=4MiB", LogicalPool()) as engine:
        engine.storage.register_mem_host_pool_v2(StatePool(), PoolName.INDEXER)
        assert engine.storage.batch_exists(["a", "b"]) == 2
        assert engine.storage.batch_set_v1(["a"], indices([0])) == [True]
        assert engine.storage.batch_get_v1(["a"], indices([0])) == [True]
        transfer = PoolTransfer(PoolName.INDEXER, torch.tensor([1]), keys=["a"])
        assert engine.storage.batch_exists_v2(["a"], [transfer]).kv_hit_pages == 0
        engine.storage.batch_set_v2([transfer])
        assert engine.storage.batch_exists_v2(["a", "b"], [transfer]).kv_hit_pages == 1


def test_unknown_pools_and_wrong_indices_are_misses(tmp_path):
    with Engine(f"shm:{tmp_path}/kv?size=4MiB") as engine:
        storage = engine.storage
        unknown = PoolTransfer(PoolName.DRAFT, torch.tensor([0]), keys=["a"])
        storage.batch_set_v1(["a"], indices([0]))
        assert storage.batch_get_v2([unknown]) == {PoolName.DRAFT: [False]}
        assert storage.batch_set_v2([unknown]) == {PoolName.DRAFT: [False]}
        assert storage.batch_exists_v2(["a"], [unknown]).kv_hit_pages == 0
        assert storage.batch_get_v1(["a", "b"], indices([0])) == [False, False]
        assert storage.batch_exists_v2([], [unknown]).kv_hit_pages == 0
        assert storage.batch_exists([]) == 0 and storage.batch_get_v1([], indices([])) == []


def test_tensors_come_back(url):
    value, target = torch.arange(6.0), torch.zeros(6)
    with Engine(url, interface_v1=0) as engine:
        storage = engine.storage
        assert storage.get("a", target) is None and not storage.exists("a")
        assert storage.set("a", value) and storage.exists("a")
        assert storage.get("a", target) is target and torch.equal(target, value)
        assert torch.equal(storage.get("a").view(torch.float32), value)
        assert storage.batch_set(["b", "c"], [value, value])
        assert storage.batch_get(["b", "x"], [target, target])[1] is None
        assert storage.batch_get(["b"])[0].nbytes == value.nbytes


def test_clear_removes_the_models_pages_and_no_others(url):
    with Engine(url) as engine, Engine(url.replace("size=4MiB", ""), model="qwen") as other:
        for one in (engine, other):
            one.storage.batch_set_v1(["a", "b"], indices([0, 1]))
        assert engine.storage.clear()
        assert engine.storage.batch_exists(["a"]) == 0
        assert other.storage.batch_exists(["a", "b"]) == 2


def test_failing_store_is_a_miss(tmp_path, monkeypatch):
    tokens = tokens_of(3)
    with Engine(f"shm:{tmp_path}/kv?size=4MiB") as engine:
        engine.save(tokens, [0, 1, 2])

        def fail(*_, **__):
            raise OSError("the memory is gone")

        for call in ("get_headed", "put_headed", "exists_each"):
            monkeypatch.setattr(engine.storage._store._store, call, fail)
        assert engine.load(tokens, [3, 4, 5]) == 0
        assert engine.save(tokens_of(3, seed=2), [0, 1, 2]) == 0
        monkeypatch.setattr(engine.storage._store._store, "match_prefix", fail)
        assert engine.load(tokens, [3, 4, 5]) == 0
        states = PoolTransfer(PoolName.MAMBA, torch.tensor([0]), keys=["a"])
        assert engine.storage.batch_exists_v2(["a"], [states]).kv_hit_pages == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"url": "s3://bucket"}, "open_store: url must be"),
        ({"path": "/dev/shm/kv"}, "extra_config must be no others than backend_name, .*, got path"),
        ({"namespace": 3}, "namespace must be a str, got 3"),
    ],
)
def test_wrong_options_are_refused_when_the_engine_starts(tmp_path, options, message):
    with pytest.raises(InvalidArgument, match=message):
        Engine(**{"url": f"shm:{tmp_path}/kv?size=4MiB"} | options)


def test_store_smaller_than_a_page_is_refused_when_the_engine_starts(tmp_path):
    with pytest.raises(InvalidArgument, match="url must name a store with room for a page's"):
        Engine(f"shm:{tmp_path}/kv?size=4KiB", host_pool(dtype=torch.float32))
