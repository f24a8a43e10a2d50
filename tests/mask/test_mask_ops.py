"""The operators: opcheck, torch.compile, missing engines, and CUDA graphs."""

import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels import _library
from mooncake_kernels.mask.program import compile_rule

from ..conftest import HAS_CUDA, skip

RULE = (mk.mask.causal() & mk.mask.sliding_window([7, 3, 9])) | mk.mask.sink(2)
OTHER = mk.mask.tree([[-1, 0, 0], [], [-1, -1]]) | mk.mask.spans([(1, 4)])


def batch_on(device: str = "cpu") -> mk.ChunkBatch:
    return mk.ChunkBatch([5, 0, 3], [12, 4, 9], device=device)


def test_opcheck_rows():
    batch = batch_on()
    words = compile_rule(RULE, batch.kv_lens_list, batch.device).words
    outputs = (
        torch.zeros(8, 4, dtype=torch.int32),
        torch.zeros(8, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int32),
    )
    for positions in (None, batch.query_positions()):
        torch.library.opcheck(
            _library.mask_rows, (words, batch.cu_q, batch.kv_lens, positions, *outputs)
        )


def test_opcheck_block_map():
    rows = mk.mask.rows(RULE, batch_on())
    form = (rows.intervals, rows.tail_bits, rows.tail_base, rows.batch.cu_q, rows.batch.kv_lens)
    num_blocks = 3 + 2

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    begins = torch.arange(num_blocks) * 4
    lists = ([zeros(20), zeros(20)], [begins, begins], [1, 2])
    for outputs in (zeros(4), zeros(num_blocks, 4), zeros(num_blocks, 2)), (None, None, None):
        arguments = (*form, 2, 4, False, num_blocks, *outputs, *lists)
        torch.library.opcheck(_library.mask_block_map, arguments)


def test_opcheck_packed():
    batch = batch_on()
    rows = mk.mask.rows(RULE, batch)
    indptr, packed = rows.packed().indptr, torch.zeros(12, dtype=torch.uint8)
    form = (rows.intervals, rows.tail_bits, rows.tail_base, batch.cu_q, batch.kv_lens)
    torch.library.opcheck(_library.mask_pack_rows, (*form, indptr, packed))
    words = compile_rule(RULE, batch.kv_lens_list, batch.device).words
    lengths = (batch.cu_q, batch.kv_lens, None, batch.num_q)
    torch.library.opcheck(_library.mask_pack_rule, (words, *lengths, indptr, packed))


def test_rows_and_conversions_under_torch_compile():
    """A model's step: rows and what kernels take of them, in one graph."""
    batch = batch_on()
    builder = mk.mask.MaskBuilder(RULE, batch)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = builder.build()
        block_map = rows.block_map(2, 4, width=3)
        lists = (block_map.partial_indices, block_map.full_indices)
        return x + 1, rows.intervals, rows.tail_bits, block_map.ranges, block_map.work, *lists

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(torch.ones(2)), step(torch.ones(2)), strict=True):
        assert torch.equal(got, want)


def test_rows_are_made_in_a_graph():
    batch = batch_on()

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rule = (mk.mask.causal() & mk.mask.sliding_window(3)) | mk.mask.sink(1)
        return x + 1, mk.mask.rows(rule, batch).intervals

    _library._logged.clear()  # a choice that was not logged yet must not break the graph
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(torch.ones(2)), step(torch.ones(2)), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("rule", [RULE, OTHER], ids=str)
def test_a_builder_follows_its_batch(engine, rule):
    builder = mk.mask.MaskBuilder(rule, batch_on(engine.device), engine=engine.engine)
    for lengths in ([[5, 0, 3], [12, 4, 9]], [[1, 1, 4], [30, 4, 6]], [[0, 0, 2], [4, 1, 70]]):
        builder.set_lengths(*lengths)
        rows = builder.build()
        want = mk.mask.rows(rule, mk.ChunkBatch(*lengths))
        num_q = sum(lengths[0])
        assert torch.equal(rows.intervals[:num_q].cpu(), want.intervals)
        assert torch.equal(rows.tail_bits[:num_q].cpu(), want.tail_bits)
        assert torch.equal(rows.tail_base.cpu(), want.tail_base)
        assert not rows.intervals[num_q:].any()
        builder.raise_if_unfit()
        ours, theirs = rows.block_map(2, 4, num_q_blocks=8 // 2 + 3), want.block_map(2, 4)
        there = theirs.num_q_blocks
        assert torch.equal(ours.ranges[:there].cpu(), theirs.ranges)
        assert not ours.work[there:].any()


@pytest.mark.parametrize("positions", [None, [3, 1, 0, 2]])
def test_built_rows_keep_their_lengths(engine, positions):
    batch = mk.ChunkBatch([2, 2], [4, 4], positions, device=engine.device)
    builder = mk.mask.MaskBuilder(mk.mask.causal(), batch, engine=engine.engine)
    rows = builder.build()
    want = rows.dense(), rows.block_map(2, 2).ranges, rows.batch.query_positions().tolist()
    builder.set_lengths([1, 2], [4, 3], positions and [3, 1, 0])
    builder.build()
    for ours, theirs in zip(rows.dense(), want[0], strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(rows.block_map(2, 2).ranges, want[1])
    assert rows.batch.query_positions().tolist() == want[2]
    assert rows.batch.num_q == 4 and rows.batch.kv_lens_list == rows.batch.kv_lens.tolist()


def test_builder_takes_new_positions(engine):
    batch = mk.ChunkBatch([2, 1], [9, 9], positions=[8, 0, 4], device=engine.device)
    builder = mk.mask.MaskBuilder(mk.mask.causal(), batch, engine=engine.engine)
    builder.set_lengths([1, 1], [9, 7], positions=[3, 6])
    assert builder.build().intervals[:, 1].tolist() == [4, 7, 0]


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        (([1, 1], [5, 5]), r"q_lens must be of 3 requests, got 2"),
        (([9, 0, 0], [9, 5, 5]), r"q_lens must sum to at most 8, .* got 9"),
        (([1, 1, 1], [2, 5, 5]), r"parents must be at most the keys of request 0 \(2\), got 3"),
        (([1, 1, 1], [5, 5, 5], [0, 0, 0]), "positions must be None, as for the first batch"),
    ],
)
def test_builder_rejects_lengths_over_capacity(lengths, words):
    builder = mk.mask.MaskBuilder(OTHER, batch_on())
    with pytest.raises(mk.InvalidArgument, match=words):
        builder.set_lengths(*lengths)


def test_builder_reports_unfit_rows(engine):
    unfit = mk.mask.sink(1) | (mk.mask.items(3, [4]) & mk.mask.sliding_window(7))
    batch = mk.ChunkBatch([1], [5], device=engine.device)
    builder = mk.mask.MaskBuilder(unfit | mk.mask.sink(0), batch, engine=engine.engine)
    builder.build()
    builder.raise_if_unfit()
    builder.set_lengths([1], [9])
    builder.build()
    with pytest.raises(mk.InvalidArgument, match="row 0, query 0 of request 0"):
        builder.raise_if_unfit()


def test_batch_of_a_builder_may_have_spare_positions(engine):
    batch = mk.ChunkBatch([4], [8], [1, 2, 3, 4], device=engine.device)
    mk.mask.MaskBuilder(mk.mask.causal(), batch).set_lengths([2], [8], [5, 6])
    rows = mk.mask.rows(mk.mask.causal(), batch, engine=engine.engine)
    assert rows.intervals[:, 1].tolist() == [6, 7]


def test_unfit_rows_are_not_used():
    """On the CPU; on a GPU nothing is read back."""
    unfit = mk.mask.sink(1) | (mk.mask.items(3, [4]) & mk.mask.sliding_window(7))
    rows = mk.mask.MaskBuilder(unfit, mk.ChunkBatch([2, 1], [9, 9])).build()
    assert rows.intervals[1].tolist() == [-1] * 4
    q, cache = torch.ones(3, 1, 8), torch.ones(2, 16, 1, 8)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    for call in (
        rows.requests, rows.dense, rows.packed, rows.to_sdpa, rows.to_bias, rows.to_flashmask,
        lambda: rows.block_map(2, 4), lambda: rows.block_map(2, 4, engine="reference"),
        *(lambda engine=engine: mk.paged_attention(q, cache, cache, table, rows, engine=engine)
          for engine in ("host", "reference")),
    ):  # fmt: skip
        message = r": rows must be of a rule that fits them, got intervals of \[-1, .* in row 1:"
        with pytest.raises(mk.InvalidArgument, match=message):
            call()


def test_a_captured_graph_replays_with_other_lengths():
    if not HAS_CUDA:
        skip("cuda", "torch finds no CUDA device")
    builder = mk.mask.MaskBuilder(RULE, batch_on("cuda"))
    builder.build().block_map(2, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = builder.build()
        block_map = rows.block_map(2, 4, width=18, num_q_blocks=7)
    for lengths in ([[1, 1, 4], [30, 4, 6]], [[0, 0, 2], [4, 1, 70]]):
        builder.set_lengths(*lengths)
        graph.replay()
        want = mk.mask.rows(RULE, mk.ChunkBatch(*lengths))
        assert torch.equal(rows.intervals[: sum(lengths[0])].cpu(), want.intervals)
        theirs = want.block_map(2, 4)
        there = theirs.num_q_blocks
        assert torch.equal(block_map.ranges[:there].cpu(), theirs.ranges)
        assert torch.equal(block_map.full_indices[:there].cpu(), theirs.indices("full", 18))


@pytest.mark.parametrize("cu_q", [[-(10**8), 10, 3001], [0, 3001, 3000], [0, 10, 10**8]])
def test_overwritten_query_lengths_are_rejected(cu_q):
    """On the CPU; on a GPU nothing is read back."""
    batch = mk.ChunkBatch([10, 2990], [3000, 3000])
    rows = mk.mask.rows(mk.mask.causal(), batch)
    lists = rows.block_map(16, 16)
    batch.cu_q.copy_(torch.tensor(cu_q))
    for call in (
        rows.packed,
        lambda: mk.mask.packed(mk.mask.causal(), batch),
        lambda: mk.mask.rows(mk.mask.causal(), batch),
        lambda: rows.block_map(16, 16, width=4).partial_indices,
        lambda: lists.varlen_indices("any"),
    ):
        with pytest.raises(mk.InvalidArgument, match="^mask: batch.cu_q must"):
            call()


TABLES = [mk.mask.tree([-1, 0]), mk.mask.documents([0, 3])]


@pytest.mark.parametrize("kv_len", [0, -5, 3, 9, 2_000_000_000])
@pytest.mark.parametrize("rule", TABLES, ids=str)
def test_overwritten_kv_lengths_are_rejected(rule, kv_len):
    """On the CPU, where tables would be read past their ends."""
    batch = mk.ChunkBatch([4, 4], [8, 8])
    rows = mk.mask.rows(rule, batch)
    batch.kv_lens.fill_(kv_len)
    message = f"^packed: indptr must have room .* request 0, 4 queries by {kv_len} keys .* 4 bytes"
    if kv_len < 4:
        message = rf"^mask: batch.kv_lens must be .* queries of request 0 \(4\), got {kv_len}"
        for call in (lambda: mk.mask.rows(rule, batch), lambda: rows.block_map(2, 4)):
            with pytest.raises(mk.InvalidArgument, match=message):
                call()
    for call in (lambda: mk.mask.packed(rule, batch), rows.packed):
        with pytest.raises(mk.InvalidArgument, match=message):
            call()


@pytest.mark.parametrize("position", [-1, 8, 2_000_000_000, -2_000_000_000])
@pytest.mark.parametrize("rule", [*TABLES, mk.mask.causal()], ids=str)
def test_overwritten_positions_are_rejected(rule, position):
    """On the CPU, where tables would be read past their ends, or rows would not fit."""
    batch = mk.ChunkBatch([4, 4], [8, 8], [0, 1, 2, 3] * 2)
    batch.positions[4:] = position
    message = rf"^mask: batch.positions\[4\] must be in \[0, 8\), .*, got {position}"
    for call in (mk.mask.packed, mk.mask.rows):
        with pytest.raises(mk.InvalidArgument, match=message):
            call(rule, batch)


def test_unavailable_engines_are_reported():
    batch = batch_on()
    if not _library.has_cuda:
        with pytest.raises(mk.Unavailable, match="built without nvcc"):
            mk.mask.rows(RULE, batch, engine="cuda")
    else:
        with pytest.raises(mk.InvalidArgument, match="must be given cuda tensors, got cpu"):
            mk.mask.rows(RULE, batch, engine="cuda")
    with pytest.raises(mk.InvalidArgument, match=r"mask.packed: engine must be one of"):
        mk.mask.packed(RULE, batch, engine="triton")
