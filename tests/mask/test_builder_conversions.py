"""A MaskBuilder's rows, of which there are more than its batch's, convert like the batch's own."""

import pytest
import torch

import mooncake_kernels as mk
from tests.mask.examples import RULES, equal
from tests.mask.test_to_flash_attn4 import check as check_flash_attn4
from tests.mask.test_to_flashmask import decoded
from tests.mask.test_to_flex import check_blocks

LATER = ([3, 9, 0], [20, 9, 4])


@pytest.fixture(params=["causal", "window_and_sink"])
def rows(request: pytest.FixtureRequest) -> mk.MaskRows:
    builder = mk.mask.MaskBuilder(RULES[request.param], mk.ChunkBatch([12, 12, 6], [30, 12, 9]))
    builder.set_lengths(*LATER)
    rows = builder.build()
    assert len(rows.intervals) == 30 and rows.batch.num_q == 12
    want = mk.mask.rows(RULES[request.param], mk.ChunkBatch(*LATER))
    assert equal(rows.dense(), want.dense())
    return rows


def test_builder_rows_convert_to_flex(rows: mk.MaskRows) -> None:
    check_blocks(rows, (4, 8))


def test_builder_rows_convert_to_flash_attn4(rows: mk.MaskRows) -> None:
    check_flash_attn4(rows.block_map(4, 8, num_q_blocks=10).to_flash_attn4(), rows)


def test_builder_rows_convert_to_flashmask_and_sdpa(rows: mk.MaskRows) -> None:
    for columns, seen in zip(rows.to_flashmask(), rows.dense(), strict=True):
        assert torch.equal(decoded(columns, len(seen)), seen)
    assert [bias.shape for bias in rows.to_bias()] == [(3, 20), (9, 9), (0, 4)]
    assert len(rows.to_sdpa()) == 3


def test_builder_rows_convert_to_xformers() -> None:
    builder = mk.mask.MaskBuilder(RULES["causal"], mk.ChunkBatch([12, 12, 6], [30, 12, 9]))
    builder.set_lengths(*LATER)
    bias = builder.build().to_xformers()
    assert bias.class_name == "BlockDiagonalCausalFromBottomRightMask"
    assert bias.arguments == {"q_seqlen": LATER[0], "kv_seqlen": LATER[1]}
