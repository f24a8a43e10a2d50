"""FlashAttention-4's block lists, read as its kernels index them, against the dense mask."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mooncake_kernels as mk
from tests.mask.examples import EXAMPLES

UNIFORM = mk.mask.rows(
    (mk.mask.causal() & mk.mask.sliding_window([5, 9, 2])) | mk.mask.sink(1),
    mk.ChunkBatch([11] * 3, [30] * 3),
)


def lists_of(
    blocks: mk.mask.FlashAttn4Blocks, request: int, m_block: int, kv_len: int
) -> tuple[list[int], list[int]]:
    """A q-block's partial and full blocks, by the index arithmetic of block_sparse_utils.py."""
    found = []
    for kind in ("mask", "full"):
        count, index = getattr(blocks, f"{kind}_block_cnt"), getattr(blocks, f"{kind}_block_idx")
        assert count.dtype == index.dtype == torch.int32
        if blocks.cu_total_m_blocks is None:
            row = index[request, 0, m_block, : int(count[request, 0, m_block])]
        else:
            num_n_blocks = -(-kv_len // blocks.block_size[1])
            begin = int(blocks.cu_block_idx_offsets[request]) + m_block * num_n_blocks
            size = int(count[0, int(blocks.cu_total_m_blocks[request]) + m_block])
            assert size <= num_n_blocks
            row = index[0, begin : begin + size]
        found.append(row.tolist())
    return found[0], found[1]


def classes(seen: torch.Tensor, block_q: int, block_kv: int) -> Iterator[tuple[list, list]]:
    """The partial and full blocks of each q-block, of the pairs that exist."""
    for row in range(0, len(seen), block_q):
        tiles = seen[row : row + block_q].split(block_kv, dim=1)
        yield (
            [n for n, tile in enumerate(tiles) if tile.any() and not tile.all()],
            [n for n, tile in enumerate(tiles) if tile.all()],
        )


def check(blocks: mk.mask.FlashAttn4Blocks, rows: mk.MaskRows) -> None:
    for request, seen in enumerate(rows.dense()):
        for m_block, want in enumerate(classes(seen, *blocks.block_size)):
            assert lists_of(blocks, request, m_block, seen.shape[1]) == want


@pytest.mark.parametrize("block_size", [(1, 1), (4, 8), (16, 3), (128, 128)])
@pytest.mark.parametrize("name", EXAMPLES)
def test_varlen_lists_match_the_dense_mask(name: str, block_size: tuple[int, int]) -> None:
    blocks = EXAMPLES[name].block_map(*block_size).to_flash_attn4(varlen=True)
    assert blocks.mask_block_cnt.shape[0] == blocks.mask_block_idx.shape[0] == 1
    assert blocks.cu_total_m_blocks.dtype == blocks.cu_block_idx_offsets.dtype == torch.int32
    check(blocks, EXAMPLES[name])


@pytest.mark.parametrize("block_size", [(4, 8), (16, 3), (128, 128)])
def test_lists_of_equal_length_requests(block_size: tuple[int, int]) -> None:
    blocks = UNIFORM.block_map(*block_size).to_flash_attn4()
    assert blocks.cu_total_m_blocks is None and blocks.mask_block_cnt.shape[:2] == (3, 1)
    check(blocks, UNIFORM)
    check(UNIFORM.block_map(*block_size).to_flash_attn4(varlen=True), UNIFORM)
    check(UNIFORM.block_map(*block_size, width=1).to_flash_attn4(), UNIFORM)


def test_lists_follow_from_the_lengths() -> None:
    map_ = EXAMPLES["causal"].block_map(4, 8)
    assert map_.to_flash_attn4().cu_total_m_blocks is not None
    with pytest.raises(mk.InvalidArgument, match="varlen must be True for requests of several"):
        map_.to_flash_attn4(varlen=False)


FIELDS = (
    "mask_block_cnt",
    "mask_block_idx",
    "full_block_cnt",
    "full_block_idx",
    "cu_total_m_blocks",
    "cu_block_idx_offsets",
    "block_size",
)
OF_A_BACKWARD = {"dq_write_order", "dq_write_order_full", "spt"}


def fields_of_the_library() -> list[str] | None:
    """Return those of BlockSparseTensorsTorch by its source, whose import needs a GPU's tools."""
    package = importlib.util.find_spec("flash_attn")
    for folder in (package and package.submodule_search_locations) or ():
        source = Path(folder) / "cute/block_sparsity.py"
        for node in ast.walk(ast.parse(source.read_text())) if source.exists() else ():
            if isinstance(node, ast.ClassDef) and node.name == "BlockSparseTensorsTorch":
                return [ast.unparse(f.target) for f in node.body if isinstance(f, ast.AnnAssign)]
    return None


def test_fields_match_the_library() -> None:
    """Of flash-attn-4 where it is installed; and of its 4.0.0b36."""
    assert mk.mask.FlashAttn4Blocks._fields == FIELDS
    theirs = fields_of_the_library()
    if theirs is not None:
        assert [name for name in theirs if name not in OF_A_BACKWARD] == list(FIELDS)
