"""``StoreConnector.reset_cache``, with stand-ins for what it imports of vLLM.

What vLLM itself does with it, these tests do not show.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

BLOCK, NUM_BLOCKS = 4, 8
NAME = "mooncake_serving.connectors.vllm.connector"


class Base:
    """``KVConnectorBase_V1``, as far as it is used."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self._kv_cache_config, self.metadata = kv_cache_config, None

    def _get_connector_metadata(self):
        return self.metadata


class Spec:
    """A layer's form: the same string in all processes."""

    block_size, non_causal = BLOCK, False

    def __str__(self):
        return "spec"


@pytest.fixture
def connector(monkeypatch):
    """The module, imported with the stand-ins, and forgotten afterwards."""
    roles = SimpleNamespace(SCHEDULER="scheduler", WORKER="worker")
    base = {"KVConnectorBase_V1": Base, "KVConnectorMetadata": object, "KVConnectorRole": roles}
    specs = {
        name: Spec if name == "FullAttentionSpec" else type(name, (), {})
        for name in ("FullAttentionSpec", "MLAAttentionSpec", "UniformTypeKVCacheSpecs")
    }
    modules = {
        "vllm": {"__version__": "0"},
        "vllm.distributed.kv_transfer.kv_connector.v1.base": base,
        "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cpu")},
        "vllm.v1.kv_cache_interface": specs,
    }
    for name, contents in modules.items():
        parents = [name.rsplit(".", n)[0] for n in range(name.count("."), -1, -1)]
        for parent in parents:
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        vars(sys.modules[name]).update(contents)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


class EngineOfVllm:
    """A scheduler's connector and a worker's, and caches whose blocks are full of one number."""

    def __init__(self, module, pool):
        class Anything(SimpleNamespace):
            def __getattr__(self, name):
                return None

        extra = {"pool": str(pool), "capacity_bytes": 1 << 20}
        transfers = Anything(kv_connector_extra_config=extra, kv_load_failure_policy="fail")
        transfers.is_kv_consumer = transfers.is_kv_producer = True
        parts = ("model_config", "cache_config", "load_config", "attention_config")
        config = Anything(**{part: Anything() for part in parts}, kv_transfer_config=transfers)
        config.parallel_config = Anything(world_size=1)
        group = SimpleNamespace(kv_cache_spec=Spec())
        caches = SimpleNamespace(kv_cache_groups=[group], num_blocks=NUM_BLOCKS)
        self.scheduler = module.StoreConnector(config, "scheduler", caches)
        self.worker = module.StoreConnector(config, "worker", caches)
        self.cache = torch.zeros(NUM_BLOCKS, BLOCK, 2)
        self.worker.register_kv_caches({"layer": self.cache})

    def serve(self, name, value):
        """Serve a prompt of two blocks; return how many tokens of it were found."""
        hashes = [bytes([block]) * 32 for block in (1, 2)]
        request = SimpleNamespace(request_id=name, num_tokens=2 * BLOCK + 1, block_hashes=hashes)
        found, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        blocks = SimpleNamespace(get_block_ids=lambda: ([3, 4, 5],))
        self.scheduler.update_state_after_alloc(request, blocks, found)
        new = SimpleNamespace(req_id=name, block_ids=([3, 4, 5],), num_computed_tokens=found)
        told = self.scheduler.build_connector_meta(
            SimpleNamespace(
                num_scheduled_tokens={name: request.num_tokens - found},
                scheduled_new_reqs=[new],
                scheduled_cached_reqs=SimpleNamespace(req_ids=[]),
            )
        )
        self.worker.metadata = told
        self.worker.start_load_kv(None)
        self.cache[[3, 4][found // BLOCK :]] = value
        self.worker.wait_for_save()
        assert not self.worker.get_block_ids_with_load_errors()
        self.scheduler.request_finished(request, [3, 4, 5])
        return found

    def close(self):
        self.scheduler.shutdown()
        self.worker.shutdown()


def test_blocks_saved_before_a_reset_are_not_found(connector, tmp_path):
    engine, other = (EngineOfVllm(connector, tmp_path / "pool") for _ in range(2))
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


def test_step_in_progress_saves_nothing_after_a_reset(connector, tmp_path):
    engine = EngineOfVllm(connector, tmp_path / "pool")
    build = engine.scheduler.build_connector_meta

    def build_then_reset(output):
        told = build(output)
        engine.scheduler.build_connector_meta = build
        engine.scheduler.reset_cache()
        return told

    engine.scheduler.build_connector_meta = build_then_reset
    assert engine.serve("a", 1.0) == 0
    assert engine.serve("b", 2.0) == 0
    assert len(engine.scheduler._namespace) < 1000
    engine.close()


def test_running_request_saves_nothing_after_a_reset(connector, tmp_path):
    """Its blocks were computed with the former weights."""
    engine = EngineOfVllm(connector, tmp_path / "pool")
    start = engine.scheduler.update_state_after_alloc

    def start_then_reset(*arguments):
        start(*arguments)
        engine.scheduler.update_state_after_alloc = start
        engine.scheduler.reset_cache()

    engine.scheduler.update_state_after_alloc = start_then_reset
    assert engine.serve("a", 1.0) == 0
    assert engine.serve("b", 2.0) == 0
    engine.close()
