"""SGLang's prefix tree, its pools and the threads of its controller on the store, on the CPU.

The trees and the steps of a test are those of a kit for tests that SGLang's wheel has, which stores
pages in files; here its backend is ``dynamic``. docs/serving/engines.md says what stands in for a
GPU.
"""

import json
from unittest import TestCase, mock

import pytest
import torch

pytest.importorskip("sglang", reason="no SGLang: see make_engines")

import sglang_cpu  # before SGLang
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.test.kits.unified_radix_cache import fixtures, mixins
from sglang.test.kits.unified_radix_cache.config import CONFIGS
from sglang.test.kits.unified_radix_cache.fixtures import match_prefix, node_host_value
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

NUM_PAGES = 8
CONFIGS = {config.label: config for config in CONFIGS if config.kv_size <= 512}


class Trees(UnifiedRadixCacheStorageFixtures, TestCase):
    """Two engines' trees by the kit: one stores, one loads."""

    def runTest(self):  # noqa: N802
        """Not a test by itself: the functions below use its steps."""


@pytest.fixture(params=CONFIGS)
def trees(request, tmp_path):
    trees = Trees()
    trees.cfg = CONFIGS[request.param]
    arguments = mixins.ServerArgs

    def with_the_store(**given):
        if given.get("hicache_storage_backend") == "file":
            folder = envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get()
            options = json.loads(given["hicache_storage_backend_extra_config"])
            options |= {
                "backend_name": "mooncake-kernels",
                "module_path": "mooncake_serving.connectors.sglang.hicache",
                "class_name": "HiCacheStore",
                "interface_v1": 1,
                "url": f"shm:{folder}/kv?size=64MiB",
            }
            given["hicache_storage_backend"] = "dynamic"
            given["hicache_storage_backend_extra_config"] = json.dumps(options)
        return arguments(**given)

    with (
        sglang_cpu.copy_on_the_cpu(),
        mock.patch.object(fixtures, "get_device", return_value="cpu"),
        mock.patch.object(mixins, "ServerArgs", with_the_store),
    ):
        yield trees
        trees.doCleanups()


def test_prefix_that_one_engine_stored_is_loaded_by_another(trees, tmp_path):
    tokens = trees._make_seq(1, NUM_PAGES)
    k, v = trees._l3_produce(str(tmp_path), tokens, marker=5)
    tree, allocator, requests = trees._l3_consumer(str(tmp_path))
    assert match_prefix(tree, tokens).host_hit_length == 0
    trees._consume_prefetch(tree, tokens, CacheRequestHandle("request", 0))

    found = match_prefix(tree, tokens)
    assert (found.device_prefix_len, found.host_hit_length) == (0, len(tokens))
    for kind in trees.cfg.components:
        assert node_host_value(tree, found.last_host_node, kind) is not None
    trees._load_back_through_admission(tree, requests, tokens)
    trees._finish_pending_loads(tree)
    found = match_prefix(tree, tokens)
    assert found.device_prefix_len == len(tokens)
    loaded = trees._snapshot_full_kv(allocator, tree.path_device_indices(found.last_device_node))
    assert torch.equal(loaded[0], k) and torch.equal(loaded[1], v) and (k == 5).all()


def test_another_prefix_is_a_miss_and_a_longer_one_a_part(trees, tmp_path):
    tokens = trees._make_seq(1, NUM_PAGES)
    trees._l3_produce(str(tmp_path), tokens)
    tree, _, _ = trees._l3_consumer(str(tmp_path))
    other = trees._make_seq(1000, NUM_PAGES)
    trees._consume_prefetch(tree, other, CacheRequestHandle("other", 0))
    assert match_prefix(tree, other).host_hit_length == 0
    longer = tokens + trees._make_seq(1000, 1)
    trees._consume_prefetch(tree, longer, CacheRequestHandle("longer", 0))
    assert match_prefix(tree, longer).host_hit_length == len(tokens)
