"""Classes of tiles, their counts, ranges and lists, against the dense mask and torch's own."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

import mooncake_kernels as mk

from .batches import batches, rules

SETTINGS = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MIXED = (mk.mask.causal() & mk.mask.sliding_window(300)) | mk.mask.sink(4)


def classes(rows: mk.MaskRows, block_q: int, block_kv: int, whole: bool) -> list[list[str]]:
    """The class of each tile, by its definition."""
    result = []
    for mask in rows.dense():
        for block in mask.cpu().split(block_q) if len(mask) else ():
            tiles = block.split(block_kv, dim=1) if mask.shape[1] else ()
            result.append([])
            for tile in tiles:
                is_full = tile.all() and (not whole or tile.numel() == block_q * block_kv)
                result[-1].append("full" if is_full else "partial" if tile.any() else "empty")
    return result


def check(block_map: mk.mask.BlockMap, want: list[list[str]]) -> None:
    """Everything that a map tells."""
    assert block_map.num_q_blocks == len(want)
    assert block_map.cu_q_blocks.diff().tolist() == [
        -(-q_len // block_map.block_q) for q_len in block_map.rows.batch.q_lens_list
    ]
    for block, tiles in enumerate(want):
        check_range(block_map.ranges[block].tolist(), tiles)
    for kind in ("partial", "full", "any", "empty"):
        listed = [[t for t, what in enumerate(tiles) if what == kind or
                   (kind == "any" and what != "empty")] for tiles in want]  # fmt: skip
        assert block_map.count(kind).tolist() == [*map(len, listed)]
        padded = block_map.indices(kind).tolist()
        assert [row[: len(own)] for row, own in zip(padded, listed, strict=True)] == listed
        check_flat(block_map, kind, listed, want)
    assert block_map.total_tiles == sum(what != "empty" for tiles in want for what in tiles)


def check_range(found: list[int], tiles: list[str]) -> None:
    visited = [t for t, what in enumerate(tiles) if what != "empty"]
    begin, full_begin, full_end, end = found
    assert (begin, end) == ((visited[0], visited[-1] + 1) if visited else (0, 0))
    assert all(what == "full" for what in tiles[full_begin:full_end])
    runs = "".join(what[0] for what in tiles).replace("p", " ").replace("e", " ").split()
    longest = max(map(len, runs), default=0)
    assert full_end - full_begin == longest
    if longest:
        assert "".join(what[0] for what in tiles).index("f" * longest) == full_begin
    else:
        assert full_begin == begin


def check_flat(block_map, kind, listed, want) -> None:
    """FlashAttention-4's form for any lengths, and compressed rows."""
    indptr, indices = block_map.bsr(kind)
    assert indptr.diff().tolist() == [*map(len, listed)]
    assert indices.tolist() == [tile for own in listed for tile in own]
    flat, cu = block_map.varlen_indices(kind)
    starts = block_map.cu_q_blocks.tolist()
    for request, kv_len in enumerate(block_map.rows.batch.kv_lens_list):
        width = -(-kv_len // block_map.block_kv)
        blocks = range(starts[request], starts[request + 1])
        matrix = flat[cu[request] : cu[request + 1]].view(len(blocks), width).tolist()
        for own, block in zip(matrix, blocks, strict=True):
            assert own[: len(listed[block])] == listed[block]


@given(data=st.data(), block_q=st.integers(1, 12), block_kv=st.integers(1, 12), whole=st.booleans())
@SETTINGS
def test_tile_classes_match_the_dense_mask(engine, data, block_q, block_kv, whole):
    drawn = data.draw(batches())
    batch = mk.ChunkBatch(
        drawn.q_lens_list, drawn.kv_lens_list, drawn.positions, device=engine.device
    )
    try:
        rows = mk.mask.rows(data.draw(rules(batch, depth=2)), batch)
    except mk.InvalidArgument:
        assume(False)
    block_map = rows.block_map(block_q, block_kv, whole=whole, engine=engine.engine)
    check(block_map, classes(rows, block_q, block_kv, whole))


@pytest.mark.parametrize("block_kv", [1, 3, 16, 128])
def test_more_tiles_than_one_window(engine, block_kv):
    """9,000 keys: up to nine windows of 1,024 tiles, and runs of full tiles across them."""
    if engine.engine == "reference":
        pytest.skip("the reference looks at every pair")
    rule = mk.mask.per_request(
        [mk.mask.causal(), MIXED, mk.mask.items(1500, [4000, 8000]), mk.mask.tree([-1, 0, 0, 2])]
    )
    batch = mk.ChunkBatch([40, 70, 100, 6], [9000, 5003, 9000, 4096], device=engine.device)
    rows = mk.mask.rows(rule, batch)
    for whole in (False, True) if block_kv > 1 else (False,):
        block_map = rows.block_map(64, block_kv, whole=whole, engine=engine.engine)
        check(block_map, classes(rows, 64, block_kv, whole))


@pytest.mark.parametrize(("q_len", "kv_len"), [(256, 512), (200, 500), (1, 130)])
@pytest.mark.parametrize("rule", [mk.mask.causal(), MIXED, mk.mask.prefix_lm(300)], ids=str)
def test_whole_tiles_match_create_block_mask(engine, rule, q_len, kv_len):
    batch = mk.ChunkBatch([q_len], [kv_len], device=engine.device)
    rows = mk.mask.rows(rule, batch)
    dense = rows.dense()[0].cpu()
    flex = create_block_mask(
        lambda b, h, q, k: dense[q, k], None, None, q_len, kv_len, device="cpu"
    )
    ours = rows.block_map(128, 128, whole=True, engine=engine.engine)
    for counts, indices, kind in (
        (flex.kv_num_blocks, flex.kv_indices, "partial"),
        (flex.full_kv_num_blocks, flex.full_kv_indices, "full"),
    ):
        assert ours.count(kind).tolist() == counts[0, 0].tolist()
        for block, count in enumerate(counts[0, 0].tolist()):
            assert (
                ours.indices(kind)[block, :count].tolist() == indices[0, 0, block, :count].tolist()
            )


@pytest.mark.parametrize("lengths", [([], []), ([0, 0], [0, 5])])
def test_fixed_width_lists_without_queries(engine, lengths):
    rows = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch(*lengths, device=engine.device))
    block_map = rows.block_map(8, 8, width=4, engine=engine.engine)
    assert block_map.partial_indices.shape == block_map.full_indices.shape == (0, 4)


def test_spare_query_blocks_of_an_empty_batch_are_empty(engine):
    """As of a graph that is replayed: every form has them, and all are empty."""
    rows = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([], [], device=engine.device))
    block_map = rows.block_map(4, 4, num_q_blocks=3, engine=engine.engine)
    for kind in ("partial", "full", "any", "empty"):
        flat, cu = block_map.varlen_indices(kind)
        assert flat.numel() == 0 and cu.tolist() == [0]
        assert block_map.count(kind).tolist() == [0, 0, 0]
        indptr, indices = block_map.bsr(kind)
        assert indptr.tolist() == [0] * 4 and indices.numel() == 0
    blocks = block_map.to_flash_attn4()
    assert blocks.mask_block_cnt.tolist() == [[0, 0, 0]] and blocks.mask_block_idx.numel() == 0
    assert blocks.cu_total_m_blocks.tolist() == blocks.cu_block_idx_offsets.tolist() == [0]


@pytest.mark.parametrize("width", [1, 2, 5])
def test_fixed_width_lists_are_truncated(engine, width):
    """Made with the map; what has no room is left out, and nothing else is touched."""
    batch = mk.ChunkBatch([3, 0, 2], [40, 16, 33], device=engine.device)
    rows = mk.mask.rows(mk.mask.causal(), batch)
    wanted = rows.block_map(2, 8, engine=engine.engine)
    block_map = rows.block_map(2, 8, width=width, engine=engine.engine)
    for kind in ("partial", "full"):
        own = getattr(block_map, f"{kind}_indices")
        assert own.shape == (3, width)
        assert torch.equal(block_map.count(kind), wanted.count(kind))
        assert torch.equal(own, wanted.indices(kind, 5)[:, :width])


def test_block_lists_are_translated_by_a_block_table(engine):
    batch = mk.ChunkBatch([3, 0, 2], [40, 16, 33], device=engine.device)
    rows = mk.mask.rows(mk.mask.causal() & mk.mask.sliding_window(20), batch)
    block_map = rows.block_map(2, 16, engine=engine.engine)
    table = torch.tensor([[7, 5, 9], [4, -1, -1], [1, 0, 2]], device=engine.device)
    indptr, blocks = block_map.physical_bsr(table)
    assert indptr.tolist() == [0, 2, 4, 7]
    assert blocks.tolist() == [5, 9, 5, 9, 1, 0, 2]
    with pytest.raises(mk.InvalidArgument, match=r"at least \[3, 3\], got \(3, 2\)"):
        block_map.physical_bsr(table[:, :2])


@pytest.mark.parametrize(
    ("dtype", "entry"),
    [(torch.int32, -1), (torch.int64, 2**32 + 3), (torch.int64, 2**31), (torch.int64, -(2**40))],
)
def test_listed_physical_blocks_must_be_valid(engine, dtype, entry):
    batch = mk.ChunkBatch([3, 0, 2], [40, 16, 33], device=engine.device)
    rows = mk.mask.rows(mk.mask.causal() & mk.mask.sliding_window(20), batch)
    block_map = rows.block_map(2, 16, engine=engine.engine)
    table = torch.tensor([[7, 5, 9], [4, 0, 0], [1, 0, 2]], device=engine.device, dtype=dtype)
    expected = block_map.physical_bsr(table)
    table[0, 0] = table[1, 0] = entry  # of tiles that are in no list
    for ours, wanted in zip(block_map.physical_bsr(table), expected, strict=True):
        assert torch.equal(ours, wanted)
    table[2, 1] = entry
    with pytest.raises(
        mk.InvalidArgument, match=rf"block_table\[2, 1\] must be a block, 0 to 2147.*, got {entry}$"
    ):
        block_map.physical_bsr(table)


def test_physical_blocks_are_checked_against_the_cache_size(engine):
    rows = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([3], [40], device=engine.device))
    block_map = rows.block_map(2, 16, engine=engine.engine)
    table = torch.tensor([[7, 5, 9]], device=engine.device)
    assert block_map.physical_bsr(table, num_blocks=10)[1].tolist() == [7, 5, 9, 7, 5, 9]
    with pytest.raises(mk.InvalidArgument, match=r"block_table\[0, 2\] .* 0 to 8, .* got 9"):
        block_map.physical_bsr(table, num_blocks=9)
    with pytest.raises(mk.InvalidArgument, match="num_blocks must be an integer in 0 to .* '9'"):
        block_map.physical_bsr(table, num_blocks="9")
    for wrong in (table.bool(), table.float()):
        with pytest.raises(mk.InvalidArgument, match="block_table must be of integers on .*got"):
            block_map.physical_bsr(wrong)


def test_row_count_overflow_of_a_tile_is_rejected():
    many = 1 << 26
    intervals, tail_bits = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    rows = mk.MaskRows(
        mk.ChunkBatch([many], [many]), intervals.expand(many, 4), tail_bits.expand(many),
        torch.tensor([many], dtype=torch.int32),
    )  # fmt: skip
    with pytest.raises(mk.InvalidArgument, match="block_q must be at most 63161283 where there"):
        rows.block_map(many, many)


def test_tile_count_overflow_of_indptr_is_rejected():
    rows = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([2], [2]))
    block_map = rows.block_map(1, 1)
    many = torch.full((2,), 1 << 30, dtype=torch.int32)  # as queries of 2**30 keys have
    block_map = replace(block_map, num_partial=many, num_full=torch.zeros_like(many))
    for kind in ("partial", "any"):
        with pytest.raises(mk.InvalidArgument, match="must have less than .*, got 2147483648"):
            block_map.bsr(kind)


def test_empty_tiles_in_fixed_width_lists(engine):
    batch = mk.ChunkBatch([3, 0, 2], [40, 16, 33], device=engine.device)
    rows = mk.mask.rows(mk.mask.causal() & mk.mask.sliding_window(4), batch)
    block_map = rows.block_map(2, 8, engine=engine.engine, num_q_blocks=5)
    assert block_map.count("empty").tolist() == [4, 4, 3, 0, 0]
    wanted = [[0, 1, 2, 3, 0], [0, 1, 2, 3, 0], [0, 1, 2, 0, 0], [0] * 5, [0] * 5]
    assert block_map.indices("empty", 5).tolist() == wanted
    with pytest.raises(mk.InvalidArgument, match="width must be at least 4, got 3"):
        block_map.indices("empty", 3)
    nothing = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([], [], device=engine.device))
    for num_q_blocks in (0, 2):
        block_map = nothing.block_map(2, 8, engine=engine.engine, num_q_blocks=num_q_blocks)
        assert block_map.count("empty").tolist() == [0] * num_q_blocks
        assert block_map.indices("empty").shape == (num_q_blocks, 0)


def test_spare_query_blocks_are_empty(engine):
    """As a CUDA graph has that is replayed with other lengths."""
    batch = mk.ChunkBatch([3, 5], [8, 8], device=engine.device)
    rows = mk.mask.rows(mk.mask.causal(), batch)
    exact = rows.block_map(4, 4, engine=engine.engine)
    roomy = rows.block_map(4, 4, num_q_blocks=8 // 4 + 2, engine=engine.engine)
    assert roomy.ranges.tolist() == [*exact.ranges.tolist(), [0, 0, 0, 0]]
    assert roomy.work.tolist() == [*exact.work.tolist(), 0]
    assert roomy.indices("any").tolist() == [*exact.indices("any").tolist(), [0, 0]]
    assert roomy.varlen_indices("any")[0].tolist() == exact.varlen_indices("any")[0].tolist()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"block_q": 0, "block_kv": 4}, "block_map: block_q must be an integer in 1 to"),
        ({"block_q": 4, "block_kv": -1}, "block_map: block_kv must be an integer in 1 to"),
        ({"block_q": 4, "block_kv": 4, "num_q_blocks": 1}, "num_q_blocks must be an integer in 2"),
        ({"block_q": 4, "block_kv": 4, "whole": "x"}, "block_map: whole must be True or False"),
        ({"block_q": 4, "block_kv": 4, "engine": "triton"}, "block_map: engine must be one of"),
    ],
)
def test_bad_sizes_are_rejected(arguments, words):
    rows = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([5], [9]))
    with pytest.raises(mk.InvalidArgument, match=words):
        rows.block_map(**arguments)
    with pytest.raises(mk.InvalidArgument, match="width must be at least 3, got 1"):
        rows.block_map(4, 4).indices("any", width=1)
    with pytest.raises(mk.InvalidArgument, match="kind must be one of .*'empty'.*, got 'none'"):
        rows.block_map(4, 4).indices("none")
