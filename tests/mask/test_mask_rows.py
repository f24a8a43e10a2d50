"""Rows and packed bits of random rules, against their predicate, pair by pair."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk
from mooncake_kernels.mask.program import compile_rule
from mooncake_kernels.reference import mask as reference

from .batches import batches, rules

SETTINGS = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def moved(batch: mk.ChunkBatch, device: str) -> mk.ChunkBatch:
    return mk.ChunkBatch(batch.q_lens_list, batch.kv_lens_list, batch.positions, device=device)


def rows_or_none(rule: mk.mask.Rule, batch: mk.ChunkBatch, engine: str) -> mk.MaskRows | None:
    """The rows of a rule; None if one does not fit."""
    try:
        return mk.mask.rows(rule, batch, engine=engine)
    except mk.InvalidArgument as refused:
        if "must see at most two runs" not in str(refused):
            raise
        return None


def most_runs(mask: torch.Tensor) -> int:
    """How many runs of keys the row with most of them sees."""
    edges = mask.to(torch.int8).diff(dim=1, prepend=torch.zeros(len(mask), 1, dtype=torch.int8))
    return int((edges > 0).sum(1).max()) if edges.numel() else 0


@given(data=st.data())
@SETTINGS
def test_rows_match_the_predicate_or_are_rejected(engine, data):
    batch = moved(data.draw(batches()), engine.device)
    rule = data.draw(rules(batch))
    dense = reference.dense(rule, batch)
    rows = rows_or_none(rule, batch, engine.engine)
    if rows is None:
        # Refused only if the bound says that it may be, and a row does see three runs.
        assert not compile_rule(rule, batch.kv_lens_list, batch.device).always_fits
        assert max(map(most_runs, dense)) > 2
        return
    for got, want in zip(rows.dense(), dense, strict=True):
        assert torch.equal(got.cpu(), want)
    intervals, tails = reference.rows(rule, batch, rows.tail_base)
    assert torch.equal(rows.intervals, intervals)
    assert torch.equal(rows.tail_bits, tails)


@given(data=st.data())
@SETTINGS
def test_packed_bits_match_numpy(engine, data):
    batch = moved(data.draw(batches(max_kv=70)), engine.device)
    rule = data.draw(rules(batch))
    dense = [mask.numpy() for mask in reference.dense(rule, batch)]
    segments = [np.packbits(mask.flatten(), bitorder="little") for mask in dense]
    want = np.concatenate([np.zeros(0, np.uint8), *segments])
    packed = [mk.mask.packed(rule, batch, engine=engine.engine)]
    rows = rows_or_none(rule, batch, engine.engine)
    packed += [] if rows is None else [rows.packed(engine=engine.engine)]
    for got in packed:
        assert np.array_equal(got.packed.cpu().numpy(), want)
        assert got.indptr.tolist() == [0, *np.cumsum([len(bits) for bits in segments])]


@given(data=st.data())
@settings(SETTINGS, max_examples=40)
def test_combining_rules_combines_their_predicates(data):
    batch = data.draw(batches())
    a, b = data.draw(rules(batch, depth=1)), data.draw(rules(batch, depth=1))
    made = {"a": a, "b": b, "both": a & b, "either": a | b, "swapped": b | a}
    rows = {name: rows_or_none(rule, batch, "host") for name, rule in made.items()}
    assume(None not in rows.values())
    dense = {name: made.dense() for name, made in rows.items()}
    for r in range(batch.num_requests):
        assert torch.equal(dense["both"][r], dense["a"][r] & dense["b"][r])
        assert torch.equal(dense["either"][r], dense["a"][r] | dense["b"][r])
    assert torch.equal(rows["either"].intervals, rows["swapped"].intervals)


@pytest.mark.parametrize(
    "rule",
    [
        (mk.mask.causal() & mk.mask.sliding_window(4096)) | mk.mask.sink(4),
        mk.mask.causal() | mk.mask.spans([(1000, 3000), (2**31 - 70000, 2**31 - 1)]),
        mk.mask.items(2**30, [2**30, 2**30 + 5000, 2**31 - 5000]),
        mk.mask.causal() & mk.mask.chunked_local(8192),
        mk.mask.tree([-1, *[0] * 63]),
    ],
    ids=str,
)
def test_more_than_2_to_31_pairs_by_sampling(engine, rule):
    """Keys up to the last that an int32 counts, and 2**53 pairs."""
    if engine.engine == "reference":
        pytest.skip("the reference would make the dense mask")
    kv_len, q_len = 2**31 - 1, 30_000
    batch = mk.ChunkBatch([3, q_len], [17 + 64, kv_len], device=engine.device)
    rows = mk.mask.rows(rule, batch, engine=engine.engine)
    chosen = torch.randint(0, q_len, (200,), generator=torch.manual_seed(0))
    position = kv_len - q_len + chosen
    edges = rows.intervals[3 + chosen].to(torch.int64).cpu()
    around = torch.cat([edges + step for step in (-1, 0, 1)], 1)
    anywhere, last = torch.randint(0, kv_len, (200, 50)), kv_len - torch.arange(70).expand(200, 70)
    keys = torch.cat([around, anywhere, last], 1).clamp(0, kv_len - 1)
    want = reference.sees(rule, 1, kv_len, position[:, None], keys)
    assert torch.equal(seen(rows, 1, 3 + chosen, keys), want)


def seen(rows: mk.MaskRows, request: int, row: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The formula of MaskRows, at some pairs."""
    lo0, hi0, lo1, hi1 = rows.intervals.cpu()[row].unsqueeze(-1).unbind(1)
    bit = keys - int(rows.tail_base[request])
    tail = rows.tail_bits.cpu()[row, None] >> bit.clamp(0, 63) & 1
    inside = (keys >= lo0) & (keys < hi0) | (keys >= lo1) & (keys < hi1)
    return inside | (bit >= 0) & (bit < 64) & tail.bool()


def test_packed_bits_past_2_to_31_pairs():
    """2,148,548,616 pairs, 256 MiB: the last rows against numpy, and where the next one begins."""
    q_len, kv_len = 16_392, 131_073
    batch = mk.ChunkBatch([q_len, 3], [kv_len, 5])
    packed = mk.mask.rows(mk.mask.causal(), batch).packed()
    assert packed.indptr.tolist() == [0, -(-q_len * kv_len // 8), -(-q_len * kv_len // 8) + 2]
    first = (q_len - 8) * kv_len // 8  # 8 rows begin with a byte
    keys = np.arange(kv_len)
    want = np.packbits(
        np.concatenate([keys <= kv_len - 8 + i for i in range(8)]), bitorder="little"
    )
    assert np.array_equal(packed.packed[first : packed.indptr[1]].numpy(), want)
    assert packed.packed[packed.indptr[1] :].tolist() == [0b11100111, 0b01111101]


def test_rule_with_more_intermediate_runs_than_rows_hold(engine):
    """Ten runs, of which the last operation leaves one: only the reference has room for them."""
    parts = [mk.mask.sink(10 + 20 * i) & mk.mask.sliding_window(400 - 20 * i) for i in range(10)]
    rule = functools.reduce(lambda a, b: a | b, parts) & mk.mask.sink(25)
    batch = mk.ChunkBatch([1], [401], device=engine.device)
    if engine.engine == "reference":
        assert mk.mask.rows(rule, batch, engine="reference").intervals.tolist() == [[1, 10, 21, 25]]
        return
    message = "row 0, .* sees more, or needs more than 8 runs while it is evaluated; mask.packed"
    with pytest.raises(mk.InvalidArgument, match=message):
        mk.mask.rows(rule, batch, engine=engine.engine)


def test_batch_without_queries_gives_empty_rows(engine):
    for lengths in ([], []), ([0, 0], [0, 7]):
        batch = mk.ChunkBatch(*lengths, device=engine.device)
        rows = mk.mask.rows(mk.mask.causal(), batch, engine=engine.engine)
        assert rows.intervals.shape == (0, 4)
        assert rows.tail_base.tolist() == lengths[1]
        assert rows.packed(engine=engine.engine).packed.numel() == 0
