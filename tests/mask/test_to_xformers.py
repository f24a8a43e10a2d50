"""xFormers' biases against a decoder of its documented classes; the classes where installed."""

import sys
import types
from typing import Any

import pytest
import torch

import mooncake_kernels as mk
from tests.mask.examples import EXAMPLES, MIXED, SELECTED

WINDOW = mk.mask.causal() & mk.mask.sliding_window(4)


def decoded(bias: mk.mask.XformersBias) -> list[torch.Tensor]:
    """Which keys each query sees, by the class's documentation, request by request.

    Bottom right: a query does not see a key that is nearer to the last key than the query is to
    the last query; local: nor one that is window_size or more farther from it.
    """
    masks = []
    for q_len, kv_len in zip(bias.arguments["q_seqlen"], bias.arguments["kv_seqlen"], strict=True):
        from_last_query = torch.arange(q_len).flip(0)[:, None]
        from_last_key = torch.arange(kv_len).flip(0)
        seen = torch.ones(q_len, kv_len, dtype=torch.bool)
        if "Causal" in bias.class_name:
            seen &= from_last_key >= from_last_query
        if "Local" in bias.class_name:
            seen &= from_last_key < from_last_query + bias.arguments["window_size"]
        masks.append(seen)
    return masks


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "Padded": {"kv_padding": 64},
    "Paged": {"block_tables": torch.zeros(5, 4, dtype=torch.int32), "page_size": 16},
}
CLASSES = {
    ("causal", ""): "BlockDiagonalCausalFromBottomRightMask",
    ("causal", "Padded"): "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    ("causal", "Paged"): "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
    ("full", ""): "BlockDiagonalMask",
    ("full", "Padded"): "BlockDiagonalPaddedKeysMask",
    ("full", "Paged"): "PagedBlockDiagonalPaddedKeysMask",
    ("window", ""): "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    ("window", "Padded"): "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
}


@pytest.mark.parametrize(("name", "where"), CLASSES)
def test_bias_class_decodes_to_the_mask(name: str, where: str) -> None:
    bias = EXAMPLES[name].to_xformers(**OPTIONS[where])
    assert bias.class_name == CLASSES[name, where]
    assert all(map(torch.equal, decoded(bias), EXAMPLES[name].dense()))
    assert ("kv_padding" in bias.arguments) == (where == "Padded")
    assert bias.arguments.get("page_size") == OPTIONS[where].get("page_size")


def test_window_that_masks_nothing_becomes_causal() -> None:
    rows = mk.mask.rows(mk.mask.causal() & mk.mask.sliding_window(40), MIXED)
    assert rows.to_xformers().class_name == "BlockDiagonalCausalFromBottomRightMask"


def test_full_decodes_become_causal() -> None:
    rows = mk.mask.rows(mk.mask.full(), mk.ChunkBatch([1, 1], [7, 9]))
    assert rows.to_xformers().class_name == "BlockDiagonalCausalFromBottomRightMask"


@pytest.mark.parametrize(
    ("rows", "row"),
    [
        (EXAMPLES["window_and_sink"], 0),
        (EXAMPLES["tree"], 1),
        (mk.mask.rows(mk.mask.causal(), SELECTED), 0),
        (mk.mask.rows(mk.mask.per_request([mk.mask.causal()] * 3 + [WINDOW] * 2), MIXED), 10),
    ],
)
def test_unsupported_mask_is_rejected(rows: mk.MaskRows, row: int) -> None:
    with pytest.raises(mk.InvalidArgument, match=r"to_xformers: rows must all be one of") as error:
        rows.to_xformers()
    assert f"got row {row}, of request {int(rows.batch.request_of()[row])}," in str(error.value)


def test_paged_bias_rejects_a_window() -> None:
    with pytest.raises(mk.InvalidArgument, match=r"must all be one of \('full', 'causal'\)"):
        EXAMPLES["window"].to_xformers(**OPTIONS["Paged"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_padding": 39}, "kv_padding must be an integer in 40 to"),
        ({"page_size": 16}, "block_tables must come with page_size"),
        ({"kv_padding": 64, **OPTIONS["Paged"]}, "and without kv_padding"),
        ({"block_tables": [[0]], "page_size": 16}, r"block_tables must be a tensor, got \[\[0\]\]"),
        ({**OPTIONS["Paged"], "page_size": 0}, "page_size must be an integer in 1 to"),
        ({**OPTIONS["Paged"], "page_size": 8}, r"int32 \[5, 5\] or wider, got .* \(5, 4\)"),
        ({"block_tables": torch.zeros(5, 4), "page_size": 16}, "got torch.float32 of shape"),
    ],
)
def test_bad_options_are_rejected(options: dict, words: str) -> None:
    with pytest.raises(mk.InvalidArgument, match=words):
        EXAMPLES["causal"].to_xformers(**options)


def test_build_requires_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mslk", "xformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(mk.Unavailable, match="BlockDiagonalMask needs mslk or xFormers: .*mslk"):
        EXAMPLES["full"].to_xformers().build()


@pytest.mark.parametrize(("name", "where"), CLASSES)
def test_bias_constructor_is_called_with_keywords(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    class Recorder:
        def __init__(self, called: str) -> None:
            self.called = called

        def __getattr__(self, method: str) -> Any:
            def record(**arguments: Any) -> "Recorder":
                calls.append((self.called, method, arguments))
                return self

            return record

    module = types.ModuleType("attn_bias")
    module.__getattr__ = Recorder
    monkeypatch.setitem(sys.modules, "mslk.attention.fmha.attn_bias", module)
    for parent in ("mslk", "mslk.attention", "mslk.attention.fmha"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    bias = EXAMPLES[name].to_xformers(**OPTIONS[where])
    bias.build()
    if (name, where) == ("window", ""):
        lengths = {key: bias.arguments[key] for key in ("q_seqlen", "kv_seqlen")}
        assert calls == [
            ("BlockDiagonalMask", "from_seqlens", lengths),
            ("BlockDiagonalMask", "make_local_attention_from_bottomright", {"window_size": 4}),
        ]
    else:
        method = "from_seqlens_local" if name == "window" else "from_seqlens"
        assert calls == [(bias.class_name, method, bias.arguments)]


@pytest.mark.parametrize(("name", "where"), [pair for pair in CLASSES if pair[1] != "Paged"])
def test_bias_materializes_to_the_dense_mask(name: str, where: str) -> None:
    pytest.importorskip("xformers.ops.fmha.attn_bias")
    rows = EXAMPLES[name]
    padded = [
        torch.nn.functional.pad(mask, (0, 64 - mask.shape[1] if where else 0))
        for mask in rows.dense()
    ]
    want = torch.block_diag(*padded).bool()
    bias = rows.to_xformers(**OPTIONS[where]).build()
    assert torch.equal(bias.materialize(tuple(want.shape)) == 0, want)
