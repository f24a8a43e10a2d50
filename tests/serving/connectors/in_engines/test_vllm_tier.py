"""The tier by vLLM's own factory and manager, which move chunks as they do for a scheduler."""

import os
import time
import uuid
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip(
    "vllm.v1.kv_offload.tiering", reason="no vLLM: see `make test-vllm`", exc_type=ImportError
)

from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from mooncake_kernels.errors import InvalidArgument

CHUNK_BYTES = 16384
NUM_CHUNKS = 16
HIT, MISS = LookupResult.HIT, LookupResult.MISS


def spec_of(model="llama", dtype="float32", tokens=32, tp=1, is_shared=False):
    """What vLLM tells a tier of its engine."""
    return SimpleNamespace(
        config=OffloadingConfig(
            groups=(OffloadingGroupConfig(tokens, ("layer.0", "layer.1"), 0),),
            worker_kv_bytes_per_block=CHUNK_BYTES,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="e",
            model=OffloadingModelConfig(model, dtype),
            cache=OffloadingCacheConfig(tokens, 1),
            parallel=OffloadingParallelConfig(0, tp, tp, 1, 1, 1, 0, 1, None, is_shared),
        )
    )


class Engine:
    """vLLM's manager of tiers, and its memory on the host."""

    def __init__(self, url, spec=None, **options):
        region = SharedOffloadRegion(
            engine_id=f"test-{uuid.uuid4().hex}", num_chunks=NUM_CHUNKS, rank=None,
            kv_bytes_per_chunk=CHUNK_BYTES, cpu_page_size=CHUNK_BYTES,
        )  # fmt: skip
        self.primary = CPUPrimaryTierOffloadingManager(NUM_CHUNKS, region)
        view = self.primary.get_kv_memoryview()
        given = {"type": "StoreTier", "module_path": "mooncake_serving.connectors.vllm.tier"}
        try:
            self.tier = SecondaryTierFactory.create_secondary_tier(
                given | {"url": url} | options, view, spec or spec_of()
            )
        except BaseException:
            self.primary.shutdown()
            raise
        self.rows = np.asarray(view).view(np.uint8)
        self.manager = TieringOffloadingManager(self.primary, [self.tier])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        del self.rows
        self.manager.shutdown()  # with a BufferError if the tier holds a view

    def step(self, *new):
        self.manager.on_schedule_end(ScheduleEndContext(new, ()))

    def request(self, name):
        context = ReqContext(name)
        self.manager.on_new_request(context)
        return context

    def store(self, keys, seed):
        """Compute chunks, and have them stored in all tiers."""
        context = self.request(f"store {seed}")
        output = self.manager.prepare_store(keys, context)
        ids = output.store_spec.chunk_ids
        self.rows[ids] = values(seed, len(ids))
        self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.end()

    def end(self):
        """Step until nothing is under way."""
        while self.manager.has_pending_work():
            self.step()
            time.sleep(0.001)

    def lookup(self, keys, context):
        """Look up as the scheduler does: again in later steps, while chunks are on their way."""
        while True:
            found = [self.manager.lookup(key, context) for key in keys]
            if set(found) <= {HIT, MISS}:
                return found
            self.step()
            time.sleep(0.001)

    def load(self, keys):
        """Chunks of a new request, None where they are missing."""
        context = self.request(f"load {uuid.uuid4().hex}")
        found = self.lookup(keys, context)
        there = [key for key, result in zip(keys, found, strict=True) if result is HIT]
        loaded = {}
        if there:
            ids = self.manager.prepare_load(there, context).chunk_ids
            loaded = dict(zip(there, self.rows[ids].copy(), strict=True))
            self.manager.complete_load(there, context)
        self.manager.touch(there, context)
        self.manager.on_request_finished(context)
        return [loaded.get(key) for key in keys]


def values(seed, count):
    return np.random.default_rng(seed).integers(0, 256, (count, CHUNK_BYTES), np.uint8)


def keys_of(*numbers, group=0):
    return [make_offload_key(bytes([number]) * 32, group) for number in numbers]


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


def test_second_engine_loads_chunks_of_the_first(url):
    keys = keys_of(1, 2, 3, 4)
    with Engine(url) as first:
        first.store(keys, seed=1)
    with Engine(url) as second:
        assert (np.array(second.load(keys)) == values(1, 4)).all()
        assert second.load(keys_of(1, 2, group=1)) == [None, None]


def test_chunk_missing_in_the_middle_is_the_only_miss(url):
    with Engine(url) as first, Engine(url) as second:
        first.store(keys_of(1, 2, 4), seed=1)
        found = second.load(keys_of(1, 2, 3, 4))
        assert found[2] is None
        assert (np.array([found[0], found[1], found[3]]) == values(1, 3)).all()


def test_chunk_lost_between_lookup_and_load_is_a_miss(url):
    keys = keys_of(1, 2, 3)
    with Engine(url) as first, Engine(url) as second:
        first.store(keys, seed=1)
        context = second.request("r")
        while LookupResult.RETRY in [second.manager.lookup(key, context) for key in keys]:
            second.step()
        first.tier._store.remove_each(keys[1:2])
        assert second.lookup(keys, context) == [HIT, MISS, HIT]
        second.manager.on_request_finished(context)
        second.end()


def test_chunk_that_cannot_be_loaded_is_not_promoted_for_ever(url):
    [key] = keys_of(1)
    with Engine(url) as engine:
        short = np.zeros(100, np.uint8)
        assert engine.tier._store.put_each([key], [short.ctypes.data], [100]).all()
        assert engine.load([key]) == [None]  # it ends


@pytest.mark.parametrize(
    "other, shares",
    [
        ({}, True),
        ({"model": "qwen"}, False),
        ({"dtype": "bfloat16"}, False),
        ({"tokens": 64}, False),
        ({"tp": 2}, False),
    ],
)
def test_engines_share_chunks_only_of_one_model_and_layout(tmp_path, other, shares):
    url = f"shm:{tmp_path}/kv?size=4MiB"
    with Engine(url) as first, Engine(url, spec_of(**other)) as second:
        first.store(keys_of(1), seed=1)
        assert (second.load(keys_of(1))[0] is not None) == shares


def test_topologies_share_chunks_where_vllm_says_that_their_bytes_are_the_same(tmp_path):
    url = f"shm:{tmp_path}/kv?size=4MiB"
    one, two = (spec_of(tp=tp, is_shared=True) for tp in (1, 2))
    with Engine(url, one) as first, Engine(url, two) as second:
        first.store(keys_of(1), seed=1)
        assert second.load(keys_of(1))[0] is not None
    with Engine(url, one, namespace="team") as other:
        assert other.load(keys_of(1)) == [None]


def test_store_smaller_than_the_chunks_evicts(tmp_path):
    with Engine(f"shm:{tmp_path}/kv?size=128KiB") as engine:  # 8 chunks
        for number in range(0, 40, 2):
            engine.store(keys_of(number, number + 1), seed=number)
    with Engine(f"shm:{tmp_path}/kv") as again:
        assert (np.array(again.load(keys_of(38, 39))) == values(38, 2)).all()
        assert again.load(keys_of(0, 1)) == [None, None]


def test_reset_waits_for_jobs_and_keeps_the_store(url):
    keys = keys_of(1, 2, 3)
    with Engine(url) as engine:
        context = engine.request("r")
        output = engine.manager.prepare_store(keys, context)
        engine.rows[output.store_spec.chunk_ids] = values(1, 3)
        engine.manager.complete_store(keys, context)
        engine.manager.on_request_finished(context)
        engine.manager.reset_cache()
        assert (np.array(engine.load(keys)) == values(1, 3)).all()


def test_failing_store_is_a_miss_and_releases_vllms_memory(tmp_path, monkeypatch, caplog):
    with Engine(f"shm:{tmp_path}/kv?size=4MiB") as engine:

        def fail(*_, **__):
            raise OSError("the memory is gone")

        for call in ("put_headed", "exists_each"):
            monkeypatch.setattr(engine.tier._store._store, call, fail)
        for number in range(0, 64, 2):  # more than vLLM's own memory holds
            engine.store(keys_of(number, number + 1), seed=number)
        assert engine.load(keys_of(0)) == [None]
        assert engine.tier._store.failures["store: OSError"] == 32


@pytest.mark.parametrize("call", ["submit_store", "submit_load"])
def test_job_on_a_chunk_outside_of_vllms_memory_fails_and_touches_none(tmp_path, call):
    with Engine(f"shm:{tmp_path}/kv?size=4MiB") as engine:
        engine.store(keys_of(1, 2), seed=1)
        before = engine.rows.copy()
        for ids in ([0, NUM_CHUNKS], [0, -1]):
            keys = keys_of(1, 2) if call == "submit_load" else keys_of(3, 4)
            context = engine.request("r")
            job = TransferJob(7, keys, np.array(ids), call == "submit_load", context)
            getattr(engine.tier, call)(job)
            engine.tier.drain_jobs()
            [result] = engine.tier.get_finished_jobs()
            assert (result.job_id, result.success, result.transfer_bytes) == (7, False, 0)
            assert not result.successful_keys
            engine.manager.on_request_finished(context)
        assert (engine.rows == before).all()
        assert engine.load(keys_of(3, 4)) == [None, None]


def test_load_that_ends_after_its_request_leaves_nothing(tmp_path):
    with Engine(f"shm:{tmp_path}/kv?size=4MiB") as engine:
        tier, missing = engine.tier, keys_of(1)
        for is_first in (True, False):
            context = engine.request(f"r{is_first}")
            job = SimpleNamespace(
                job_id=1 << 40, keys=missing, chunk_ids=[0], is_promotion=True, req_context=context
            )
            tier.submit_load(job)
            tier.drain_jobs()
            if is_first:
                tier.on_request_finished(context)
            assert [result.success for result in tier.get_finished_jobs()] == [False]
            assert tier._failed == ({} if is_first else {context.req_id: set(missing)})
            if not is_first:
                assert tier.lookup(missing[0], context) is MISS
                tier.on_request_finished(context)
        assert not tier._failed


@pytest.mark.parametrize(
    "options, message",
    [
        ({"url": "s3://bucket"}, "open_store: url must be"),
        ({"url": ""}, "open_store: url must be"),
        ({"pool": "/dev/shm/kv"}, "options must be no others than url, namespace, .*, got pool"),
        ({"num_threads": 0}, "num_threads must be an integer from 1 to 64, got 0"),
        ({"namespace": 3}, "namespace must be a str, got 3"),
        ({"locality": "NEAR"}, 'locality must be "LOCAL", "REMOTE" or nothing, got'),
    ],
)
def test_wrong_options_are_refused_when_the_engine_starts(tmp_path, options, message):
    with pytest.raises(InvalidArgument, match=message):
        Engine(**{"url": f"shm:{tmp_path}/kv?size=4MiB"} | options)


def test_store_smaller_than_a_chunk_is_refused_when_the_engine_starts(tmp_path):
    with pytest.raises(InvalidArgument, match="url must name a store with room for a page's 16384"):
        Engine(f"shm:{tmp_path}/kv?size=8KiB")
