"""SGLang's own host pools of an indexer and of draft models behind HiCacheStore, on the CPU."""

from collections.abc import Mapping

import pytest
import torch

pytest.importorskip("sglang", reason="no SGLang: see make_engines")

import sglang_cpu  # noqa: F401  # before SGLang
from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.runtime_context import get_parallel
from test_sglang_hicache import LAYERS, NUM_PAGES, Engine, host_pool, indices

DSA_PAGE = 64


def mla_pool(page=DSA_PAGE, layout="page_first"):
    """SGLang's host pool of latents."""
    size = NUM_PAGES * page
    rows = tuple(torch.zeros(size, 1, 24, dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows, data_ptrs=torch.tensor([row.data_ptr() for row in rows]),
        layer_indices=tuple(range(LAYERS)), device_layer_num=LAYERS, page_size=page,
        kv_lora_rank=16, qk_rope_head_dim=8, kv_cache_dim=24, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    with host_memory_budget_scope(1 << 30):
        return MLATokenToKVPoolHost(
            info, 1.0, 0, page, layout, pin_memory=False, device_capacity_tokens=size,
            start_layer=0, end_layer=LAYERS - 1, target_layer_num=LAYERS, host_token_capacity=size,
        )  # fmt: skip


def indexer_pool(anchor):
    """SGLang's host pool of the keys by which sparse attention chooses tokens."""
    with get_parallel().override(attn_dcp_size=1):
        device = DSATokenToKVPool(
            NUM_PAGES * DSA_PAGE, DSA_PAGE, 16, torch.bfloat16, 8, LAYERS, "cpu", 128, False, 24
        )
    with host_memory_budget_scope(1 << 30):
        return DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), anchor, pin_memory=False)


def rows(numbers, page=DSA_PAGE):
    return torch.cat([torch.arange(n * page, (n + 1) * page) for n in numbers])


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_of_an_indexer_come_back_with_their_latents(tmp_path, layout):
    url = f"shm:{tmp_path}/kv?size=16MiB"
    keys, pools = list("abc"), []
    for seed in (1, 2):
        anchor = mla_pool(layout=layout)
        indexer = indexer_pool(anchor)
        generator = torch.Generator().manual_seed(seed)
        anchor.kv_buffer.normal_(generator=generator)
        indexer.index_k_with_scale_buffer.random_(0, 256, generator=generator)
        pools.append((anchor, indexer))
    (theirs, their_index), (ours, our_index) = pools
    with Engine(url, theirs, mla=True, size=2) as first:
        first.storage.register_mem_host_pool_v2(their_index, PoolName.INDEXER)
        both = [
            PoolTransfer(PoolName.KV, rows([0, 1, 2]), keys=keys),
            PoolTransfer(PoolName.INDEXER, rows([0, 1]), keys=keys[:2]),
        ]
        assert first.storage.batch_set_v2(both) == {
            PoolName.KV: [True] * 3, PoolName.INDEXER: [True] * 2,
        }  # fmt: skip
    with Engine(url, ours, mla=True, rank=1, size=2) as second:
        second.storage.register_mem_host_pool_v2(our_index, PoolName.INDEXER)
        found = second.storage.batch_exists_v2(keys, [PoolTransfer(PoolName.INDEXER)])
        assert found.kv_hit_pages == 2 and found.restorable_prefix_pages == [1, 2]
        both = [PoolTransfer(name, rows([5, 7]), keys=keys[:2]) for name in ("kv", "indexer")]
        before = our_index.get_data_page(6 * DSA_PAGE).clone()
        assert second.storage.batch_get_v2(both) == {"kv": [True] * 2, "indexer": [True] * 2}
        for pool, other in ((ours, theirs), (our_index, their_index)):
            for mine, page in ((5, 0), (7, 1)):
                got, want = (
                    p.get_data_page(n * DSA_PAGE) for p, n in ((pool, mine), (other, page))
                )
                assert torch.equal(got, want)
        assert torch.equal(our_index.get_data_page(6 * DSA_PAGE), before)


@pytest.mark.parametrize(
    "is_mla, name, pool, are_shared",
    [
        (True, PoolName.DRAFT, "mla", True),
        (True, PoolName.DRAFT, "mha", False),
        (True, PoolName.DRAFT_SWA, "mha", False),
        (True, PoolName.DRAFT_INDEXER, "indexer", True),
        (False, PoolName.DRAFT, "mla", False),
        (False, PoolName.DRAFT, "mha", False),
    ],
)
def test_ranks_share_a_drafts_pages_only_where_both_models_are_replicated(
    tmp_path, is_mla, name, pool, are_shared
):
    """SGLang names the pages of a draft by its own kind, and of a split target by rank."""
    url = f"shm:{tmp_path}/kv?size=16MiB"
    make: Mapping = {
        "mla": mla_pool, "mha": host_pool, "indexer": lambda: indexer_pool(mla_pool()),
    }  # fmt: skip
    ranks = [Engine(url, mla=is_mla, rank=rank, size=2) for rank in (0, 1)]
    for rank in ranks:
        rank.draft = make[pool]()
        rank.storage.register_mem_host_pool_v2(rank.draft, name)
    page = ranks[0].draft.page_size
    stored = [PoolTransfer(name, torch.arange(page), keys=["a"])]
    for rank in ranks:
        rank.storage.batch_set_v1(["a"], indices([0]))
    assert ranks[0].storage.batch_set_v2(stored) == {name: [True]}
    expected = [1, 1 if are_shared else 0]
    found = [rank.storage.batch_exists_v2(["a"], [PoolTransfer(name)]) for rank in ranks]
    assert [one.kv_hit_pages for one in found] == expected
    assert ranks[1].storage.batch_get_v2(stored) == {name: [are_shared]}
    for rank in ranks:
        rank.__exit__()


@pytest.mark.parametrize(
    "stored, covered",
    [("abcdef", 12), ("abcde", 8), ("abcdf", 8), ("acdef", 0), ("ab", 4), ("a", 0), ("", 0)],
)
def test_block_groups_report_the_pages_of_leading_groups_and_limit_no_prefix(
    tmp_path, stored, covered
):
    """Two keys stand for four pages."""
    pages = [f"page {i}" for i in range(3)]
    pool = host_pool()
    with Engine(f"shm:{tmp_path}/kv?size=4MiB") as engine:
        engine.storage.register_mem_host_pool_v2(pool, PoolName.DEEPSEEK_V4_C4)
        engine.storage.batch_set_v1(pages, indices(range(3)))
        given = PoolTransfer(
            PoolName.DEEPSEEK_V4_C4, indices(range(len(stored))), keys=list(stored)
        )
        engine.storage.batch_set_v2([given])
        asked = PoolTransfer(
            PoolName.DEEPSEEK_V4_C4, keys=list("abcdef"), hit_policy=PoolHitPolicy.BLOCK_GROUPS,
            block_pages=4, group_pages=2,
        )  # fmt: skip
        found = engine.storage.batch_exists_v2(pages, [asked])
        assert found.kv_hit_pages == 3 and found.restorable_prefix_pages == [1, 2, 3]
        hits = {PoolName.KV: 3} | ({PoolName.DEEPSEEK_V4_C4: covered} if covered else {})
        assert found.extra_pool_hit_pages == hits
