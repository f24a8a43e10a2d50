"""``StoreConnector`` between vLLM and its two sides, with stand-ins for what it imports of vLLM.

What vLLM itself does, these tests do not show.
"""

import importlib
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mooncake_kernels.errors import InvalidArgument, Unavailable

BLOCK, NUM_BLOCKS = 4, 8
NAME = "mooncake_serving.connectors.vllm.connector"
WITH_VLLM = (NAME, *(f"mooncake_serving.connectors.vllm.{n}" for n in ("stats", "kv_events")))


class Base:
    """``KVConnectorBase_V1``, as far as it is used."""

    requires_kv_delivery = True

    def __init__(self, vllm_config, role, kv_cache_config):
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self.metadata = None

    def _get_connector_metadata(self):
        return self.metadata


@dataclass
class Results:
    """``KVConnectorTransferResults``."""

    finished_sending: set = field(default_factory=set)
    finished_recving: set = field(default_factory=set)
    failed_recving: set = field(default_factory=set)


@dataclass
class Stats:
    """``KVConnectorStats``."""

    data: dict = field(default_factory=dict)


class Metrics:
    """``KVConnectorPromMetrics``."""

    def __init__(self, vllm_config, metric_types, labels, values):
        self.per_engine_labelvalues = values


class Metric:
    """One of Prometheus."""

    def __init__(self, made, name, **_):
        self.values = made.setdefault(name, [])

    def labels(self, *values):
        return self

    def inc(self, value):
        self.values.append(value)

    observe = inc


class Stored(SimpleNamespace):
    """``BlockStored``."""


class Removed(SimpleNamespace):
    """``BlockRemoved``."""


class Spec:
    """A layer's form: the same string in all processes."""

    block_size, non_causal, sliding_window = BLOCK, False, 6

    def __str__(self):
        return "spec"


@pytest.fixture
def connector(monkeypatch):
    """The module, imported with the stand-ins, and forgotten afterwards."""
    kinds = (
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "SlidingWindowSpec",
        "MambaSpec",
        "UniformTypeKVCacheSpecs",
    )
    sources = dict.fromkeys(("HOST", "DISK", "EXTERNAL_UNSPECIFIED"), "somewhere")
    modules = {
        "vllm": {"__version__": "0"},
        "vllm.distributed.kv_events": {
            "MEDIUM_CPU": "CPU",
            "MEDIUM_STORAGE": "STORAGE",
            "KVCacheEvent": object,
            "BlockStored": Stored,
            "BlockRemoved": Removed,
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorBase_V1": Base,
            "KVConnectorHandshakeMetadata": object,
            "KVConnectorMetadata": object,
            "KVConnectorWorkerMetadata": object,
            "KVConnectorTransferResults": Results,
            "KVConnectorRole": SimpleNamespace(SCHEDULER="scheduler", WORKER="worker"),
            "SupportsHMA": type("SupportsHMA", (), {}),
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
            "KVConnectorStats": Stats,
            "KVConnectorPromMetrics": Metrics,
        },
        "prometheus_client": {"Counter": "counter", "Histogram": "histogram"},
        "vllm.distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: 0},
        "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1"},
        "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cpu")},
        "vllm.v1.core.kv_cache_utils": {
            "resolve_kv_cache_block_sizes": lambda caches, config: (BLOCK, BLOCK),
            "maybe_convert_block_hash": lambda name: name[0],
            "generate_block_hash_extra_keys": lambda request, first, end, _: ((first, end), 0),
            "to_event_extra_keys": list,
        },
        "vllm.v1.kv_cache_interface": {kind: type(kind, (Spec,), {}) for kind in kinds}
        | {
            "get_kv_cache_spec_kind": lambda spec: SimpleNamespace(value=type(spec).__name__),
            "get_kv_cache_spec_sliding_window": lambda spec: None,
        },
        "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": SimpleNamespace(**sources)},
    }
    for name, contents in modules.items():
        parents = [name.rsplit(".", n)[0] for n in range(name.count("."), -1, -1)]
        for parent in parents:
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        vars(sys.modules[name]).update(contents)
    for name in WITH_VLLM:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(NAME)
    module.kinds = SimpleNamespace(**modules["vllm.v1.kv_cache_interface"])
    yield module
    for name in WITH_VLLM:
        sys.modules.pop(name, None)


def configs(url, groups, **parallel):
    """What vLLM gives a connector: its configuration, and that of the caches."""

    class Anything(SimpleNamespace):
        def __getattr__(self, name):
            return None

    transfers = Anything(kv_connector_extra_config={"url": url})
    transfers.is_kv_consumer = transfers.is_kv_producer = True
    parts = ("model_config", "cache_config", "load_config", "attention_config")
    config = Anything(**{part: Anything() for part in parts}, kv_transfer_config=transfers)
    sizes = dict.fromkeys(
        ("world_size", "tensor_parallel_size", "pipeline_parallel_size",
         "decode_context_parallel_size", "prefill_context_parallel_size"), 1,
    )  # fmt: skip
    config.parallel_config = SimpleNamespace(
        **sizes | {"rank": 0, "distributed_executor_backend": "uni"} | parallel
    )
    caches = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer{i}"])
            for i, spec in enumerate(groups)
        ],
        num_blocks=NUM_BLOCKS,
        kv_tp_replicas=1,
        prefix_cacheable_group_ids=tuple(range(len(groups))),
    )
    return config, caches


class EngineOfVllm:
    """A scheduler's connector and a worker's, and caches whose blocks are full of one number."""

    def __init__(self, module, url, *, events=False):
        config, caches = configs(url, [module.kinds.FullAttentionSpec()])
        config.kv_events_config = SimpleNamespace(enable_kv_cache_events=events)
        self.module = module
        self.scheduler = module.StoreConnector(config, "scheduler", caches)
        self.worker = module.StoreConnector(config, "worker", caches)
        self.cache = torch.zeros(NUM_BLOCKS, BLOCK, 2)
        self.worker.register_kv_caches({"layer0": self.cache})

    def step(self, new=(), scheduled=None, ids=None):
        """Build a step, run it, and give the scheduler what the worker reports."""
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled or {},
            scheduled_new_reqs=list(new),
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], num_computed_tokens=[], resumed_req_ids=set()
            ),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: ids, boundary_state_offloads={}
            ),
        )
        self.worker.metadata = self.scheduler.build_connector_meta(output)
        self.worker.start_load_kv(None)
        yield
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        told = self.worker.build_connector_worker_meta()
        self.scheduler.update_connector_output(
            SimpleNamespace(
                kv_connector_worker_meta=told,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
            )
        )
        self.results = results

    def until(self, is_over):
        end = time.monotonic() + 30
        while not is_over():
            assert time.monotonic() < end
            list(self.step())

    def serve(self, name, value, before_compute=lambda: None):
        """Serve a prompt of two blocks; return how many tokens of it were found."""
        hashes = [bytes([block]) * 32 for block in (1, 2)]
        request = SimpleNamespace(
            request_id=name, num_tokens=2 * BLOCK + 1, block_hashes=hashes, num_computed_tokens=0,
            all_token_ids=list(range(2 * BLOCK + 1)), lora_request=None, session_id=name,
        )  # fmt: skip
        found, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert is_async == (found > 0)
        ids = ([3, 4, 5],)
        blocks = SimpleNamespace(get_block_ids=lambda: ids)
        self.scheduler.update_state_after_alloc(request, blocks, found)
        if found:
            self.results = Results()
            self.until(lambda: self.results.finished_recving)
            assert self.results.finished_recving == {name} and not self.results.failed_recving
        before_compute()
        new = SimpleNamespace(req_id=name, num_computed_tokens=found)
        running = self.step([new], {name: request.num_tokens - found}, ids)
        next(running)
        self.cache[[3, 4][found // BLOCK :]] = value
        list(running)
        assert self.scheduler.request_finished_all_groups(request, ids) == (False, None)
        self.until(lambda: not self.scheduler.has_pending_push_work())
        both_idle = threading.Barrier(2, timeout=30)  # threads, when all was put
        for one in [self.worker.worker._savers.submit(both_idle.wait) for _ in range(2)]:
            one.result()
        return found

    def close(self):
        self.scheduler.shutdown()
        self.worker.shutdown()


@pytest.fixture
def url(tmp_path):
    return f"shm:{tmp_path}/pool?size=1MiB"


def test_blocks_saved_before_a_reset_are_not_found(connector, url):
    engine, other = (EngineOfVllm(connector, url) for _ in range(2))
    assert engine.serve("a", 1.0) == 0
    assert engine.serve("b", 9.0) == 2 * BLOCK
    for value in (2.0, 3.0):
        assert engine.scheduler.reset_cache() is True
        assert engine.serve("c", value) == 0
        engine.cache.zero_()
        assert engine.serve("d", 9.0) == 2 * BLOCK
        assert (engine.cache[3:5] == value).all()
    assert other.serve("e", 9.0) == 2 * BLOCK, "those of engines that were not reset are left"
    assert (other.cache[3:5] == 1.0).all()
    engine.close()
    other.close()


def test_running_request_saves_nothing_after_a_reset(connector, url):
    """Its blocks were computed with the former weights."""
    engine = EngineOfVllm(connector, url)
    assert engine.serve("a", 1.0, before_compute=engine.scheduler.reset_cache) == 0
    assert engine.serve("b", 2.0) == 0
    engine.close()


def test_events_have_what_vllm_has_in_its_own(connector, url):
    engine = EngineOfVllm(connector, url, events=True)
    engine.serve("a", 1.0)
    event = Stored(
        block_hashes=[1, 2], parent_block_hash=None, token_ids=list(range(2 * BLOCK)),
        block_size=BLOCK, lora_id=None, medium="CPU", lora_name=None,
        extra_keys=[(0, BLOCK), (BLOCK, 2 * BLOCK)], group_idx=0,
        kv_cache_spec_kind="FullAttentionSpec", kv_cache_spec_sliding_window=None, session_id="a",
    )  # fmt: skip
    assert engine.scheduler.take_events() == [event]
    assert engine.scheduler.take_events() == []
    engine.serve("b", 2.0)
    event.session_id = "b"
    assert engine.scheduler.take_events() == [event], "b has loaded them"
    engine.scheduler._store.clear()
    engine.scheduler.scheduler._events._look_at = 0.0
    [removed] = engine.scheduler.take_events()
    assert sorted(removed.block_hashes) == [1, 2]
    assert (removed.medium, removed.group_idx) == ("CPU", 0)
    engine.close()


def test_engine_without_events_has_none(connector, url):
    engine = EngineOfVllm(connector, url)
    engine.serve("a", 1.0)
    assert engine.scheduler.take_events() == []
    assert engine.worker.take_events() == []
    engine.close()


def test_kinds_of_groups_are_recognized(connector, url):
    kinds, form = connector.kinds, connector.GroupForm
    state = kinds.MambaSpec()
    state.mamba_cache_mode, state.num_speculative_blocks = "align", 0
    _, caches = configs(url, [kinds.MLAAttentionSpec(), kinds.SlidingWindowSpec(), state])
    caches.transfer_groups = caches.kv_cache_groups
    forms = [form("full", BLOCK), form("window", BLOCK, 6), form("state", BLOCK)]
    assert connector._groups_of(caches) == connector._transferred(caches) == forms


def test_unsupported_caches_and_workers_are_rejected(connector, url):
    full, other = connector.kinds.FullAttentionSpec(), type("OtherSpec", (Spec,), {})()
    state, draft = connector.kinds.MambaSpec(), connector.kinds.MambaSpec()
    state.mamba_cache_mode, draft.mamba_cache_mode = "none", "align"
    draft.num_speculative_blocks = 2
    backwards = connector.kinds.FullAttentionSpec()
    backwards.non_causal = True
    for groups, parallel, message in (
        ([full, other], {}, "SlidingWindowSpec or MambaSpec, got OtherSpec"),
        ([full, state], {}, 'mamba_cache_mode must be "align", got "none"'),
        ([full, draft], {}, "must have no speculative decoding, got 2"),
        ([backwards], {}, "layers must be causal"),
        ([full], {"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1, got 2"),
        ([full], {"decode_context_parallel_size": 2}, "decode_context_parallel_size must be 1"),
    ):
        with pytest.raises(Unavailable, match=f"^StoreConnector: .*{message}"):
            connector.StoreConnector(*both(configs(url, groups, **parallel)))
    config, caches = configs("tiered:/x?memory=1MiB&disk=1MiB", [full],
                             distributed_executor_backend="mp")  # fmt: skip
    with pytest.raises(Unavailable, match="url must be shm: or redis: .*, got tiered:"):
        connector.StoreConnector(config, "scheduler", caches)
    config.kv_transfer_config.kv_connector_extra_config = {"pool": "p"}
    with pytest.raises(InvalidArgument, match="'pool' must be part of 'url'"):
        connector.StoreConnector(config, "scheduler", caches)


def both(pair):
    return pair[0], "scheduler", pair[1]


@pytest.mark.parametrize(
    "tensor, pipeline, replicas, shards",
    [
        (1, 1, 1, [(1, 0, True)]),
        (2, 1, 1, [(2, 0, True), (2, 1, True)]),
        (2, 1, 2, [(1, 0, True), (1, 0, False)]),
        (4, 1, 2, [(2, 0, True), (2, 0, False), (2, 1, True), (2, 1, False)]),
        (2, 2, 1, [(4, 0, True), (4, 1, True), (4, 2, True), (4, 3, True)]),
        (2, 2, 2, [(4, 0, True), (4, 1, True), (4, 2, True), (4, 3, True)]),  # stages may differ
    ],
)
def test_each_worker_has_its_part(connector, url, tensor, pipeline, replicas, shards):
    for rank, want in enumerate(shards):
        config, caches = configs(
            url, [], tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, rank=rank
        )
        caches.kv_tp_replicas = replicas
        assert connector._shards_of(config, caches) == connector.Shards(*want)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distributed_executor_backend": "external_launcher", "world_size": 2},
         "must not be external_launcher for an engine of several workers"),
    ],
)  # fmt: skip
def test_engines_whose_workers_do_not_all_save_are_refused(connector, url, changes, message):
    config, caches = configs(url, [connector.kinds.FullAttentionSpec()], **changes)
    with pytest.raises(connector.Unavailable, match=f"^StoreConnector: .*{message}"):
        connector.StoreConnector(config, "scheduler", caches)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 4, "tensor_parallel_size": 2},
         "must be tensor parallel alone for a hand-off, got 4 workers for 2 ranks"),
        ({"decode_context_parallel_size": 2}, "must be 1 for a hand-off, got 2"),
        ({}, "caches must need no zeroing for a hand-off with the V2 model runner"),
    ],
)  # fmt: skip
def test_engines_that_cannot_hand_over_are_refused(connector, url, changes, message):
    config, caches = configs(url, [connector.kinds.FullAttentionSpec()], **changes)
    config.kv_transfer_config.kv_connector_extra_config = {"handoff": {}}
    config.use_v2_model_runner = caches.needs_kv_cache_zeroing = True
    with pytest.raises(connector.Unavailable, match=message):
        connector.StoreConnector(config, "scheduler", caches)


class Handoff:
    """Both sides of a hand-off that serves one request."""

    def __init__(self):
        self.calls = []

    def matched(self, request, num_computed):
        return 8 if request.request_id == "mine" else 0

    def finished(self, request, *, is_loading):
        assert is_loading == (request.request_id == "b")
        return True, {"host": "there"}

    def results(self, finished):
        return SimpleNamespace(sent={"sent"}, received={"mine"}, failed={"mine"})

    def step(self, output):
        return "handed off"

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, arguments[1:]))


def test_handoff_is_asked_first(connector, url):
    engine = EngineOfVllm(connector, url)
    engine.serve("a", 1.0)
    scheduler, worker, handoff = engine.scheduler, engine.worker, Handoff()
    scheduler.handoff_scheduler = worker.handoff_worker = handoff
    assert scheduler.requires_kv_delivery
    hashes = [bytes([block]) * 32 for block in (1, 2)]
    blocks = SimpleNamespace(get_block_ids=lambda: ([3, 4, 5],))
    for name, loads in (("mine", 0), ("b", 1)):
        request = SimpleNamespace(
            request_id=name, num_tokens=9, block_hashes=hashes, num_computed_tokens=0
        )
        assert scheduler.get_num_new_matched_tokens(request, 0) == (8, True)
        scheduler.update_state_after_alloc(request, blocks, 8)
        assert len(scheduler.scheduler._to_load) == loads
        assert scheduler.request_finished_all_groups(request, ([],)) == (True, {"host": "there"})
    assert [c[1][1] for c in handoff.calls if c[0] == "allocated"] == [8, 0]
    results = worker.get_transfer_results(set())
    assert results.finished_sending == {"sent"} and results.finished_recving == {"mine"}
    assert results.failed_recving == {"mine"}
    running = engine.step()
    next(running)
    assert worker.metadata.handoff == "handed off"
    list(running)
    engine.close()


def test_counts_reach_the_log_and_prometheus(connector, url):
    engine = EngineOfVllm(connector, url)
    engine.serve("a", 1.0)
    engine.serve("b", 1.0)
    assert engine.scheduler.get_kv_connector_stats() is None
    stats = engine.worker.get_kv_connector_stats()
    [seconds] = stats.data.pop("load_times")
    assert 0 <= stats.data.pop("save_seconds") < 30 and 0 <= seconds < 30
    num_bytes = 2 * BLOCK * 2 * 4
    counts = {"loads": 1, "loaded_blocks": 2, "loaded_bytes": num_bytes}
    assert stats.data == counts | {"saved_blocks": 2, "saved_bytes": num_bytes}
    assert engine.worker.get_kv_connector_stats() is None
    more = connector.StoreConnector.build_kv_connector_stats({"loads": 1, "load_times": [0.5]})
    assert stats.aggregate(more) is stats and not stats.is_empty()
    assert stats.reduce()["loads"] == 2 and stats.reduce()["longest load ms"] == 500
    made = {}
    kinds = dict.fromkeys(("counter", "histogram"), partial(Metric, made))
    build = connector.StoreConnector.build_prom_metrics
    metrics = build(None, kinds, ["engine"], {0: ["0"]})
    metrics.observe(stats.data)
    assert made["vllm:mooncake_kernels_loads"] == [2]
    assert made["vllm:mooncake_kernels_load_seconds"] == [0.5]
    stats.reset()
    assert stats.is_empty()
    engine.close()
