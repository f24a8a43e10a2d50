"""Keys, queries, parts and programs whose number, or a product of it, needs 32 bits or more."""

import os

import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels import _library
from mooncake_kernels.attention.paged import MOST_KEYS

BLOCK = 1 << 20  # tokens: one block of a few MiB stands for every block of a table
WRAP = 1 << 31  # elements: of an offset of 32 bits that leads back, into the file


def attend(kv_len, num_blocks, engine):
    """The last 16 keys of a long request, by a table of one block, over and over."""
    random = torch.Generator().manual_seed(3)
    q, near = torch.randn(1, 2, 16, generator=random), torch.randn(2, 64, 16, generator=random)
    caches = torch.zeros(2, 1, BLOCK, 1, 16, dtype=torch.float16)
    first = (kv_len - 64) % BLOCK
    caches[:, 0, first : first + 64, 0] = near
    tensors = (q.half(), *caches, torch.zeros(1, num_blocks, dtype=torch.int32))
    batch = mk.ChunkBatch([1], [kv_len], device=engine.device)
    rows = mk.mask.rows(mk.mask.causal() & mk.mask.sliding_window(16), batch)
    on_device = [tensor.to(engine.device) for tensor in tensors]
    out, lse = mk.paged_attention(*on_device, rows, engine=engine.engine)
    scores = (q[0].half().float() @ near[0, -16:].half().float().T) / 4
    torch.testing.assert_close(lse[0].cpu(), scores.logsumexp(1), rtol=1e-4, atol=1e-4)
    want = scores.softmax(1) @ near[1, -16:].half().float()
    torch.testing.assert_close(out[0].float().cpu(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("kv_len", "num_blocks"), [(64, 4096), (MOST_KEYS, 2048)])
def test_block_table_for_more_keys_than_int32_counts(engine, kv_len, num_blocks):
    if engine.engine == "reference" and kv_len > BLOCK:
        pytest.skip("the reference reads all keys")
    attend(kv_len, num_blocks, engine)


def test_request_of_maximum_length(engine):
    if engine.engine == "reference":
        pytest.skip("the reference reads all keys")
    if engine.engine == "triton":
        with pytest.raises(mk.InvalidArgument, match="keys for engine triton, got 2147483647 of"):
            attend((1 << 31) - 1, 2048, engine)
    else:
        attend((1 << 31) - 1, 2048, engine)


@pytest.fixture
def interpreted(engine):
    """A function that returns a module of Triton's, where it runs on the CPU."""
    if engine.engine != "triton" or engine.device == "cuda":
        pytest.skip("each tensor would take gigabytes")
    return lambda name: _library.triton_module("attention", name, torch.device("cpu"))


@pytest.fixture
def sparse(tmp_path):
    """A function that returns zeros in a sparse file, in which offsets wrap."""

    def make(dtype, *shape):
        path, size = tmp_path / str(len(list(tmp_path.iterdir()))), torch.Size(shape).numel()
        path.touch()
        os.truncate(path, (WRAP + size) * dtype.itemsize)
        flat = torch.from_file(str(path), shared=True, size=WRAP + size, dtype=dtype)
        return flat[WRAP:].view(shape)

    return make


def test_parts_with_more_rows_than_int32_counts(interpreted, sparse):
    module, num_rows = interpreted("attention_merge"), 1 << 30
    outs, lses = sparse(torch.float16, 3, num_rows, 1), sparse(torch.float32, 3, num_rows)
    outs[:, 0, 0], lses[:, 0] = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 1.0, 2.0])
    out, lse = torch.zeros(1, 1), torch.zeros(1)
    sizes = (3, num_rows)
    module.merge_attention_kernel[(1,)](
        outs, lses, out, lse, *sizes, DIM=1, PADDED=1, IS_LOG2=False
    )
    torch.testing.assert_close(lse[0], lses[:, 0].logsumexp(0))
    torch.testing.assert_close(out[0, 0], lses[:, 0].softmax(0) @ outs[:, 0, 0].float())


def test_the_intervals_of_a_late_query(interpreted, sparse, monkeypatch):
    """Only the program of the last query: those before it would take hours."""
    module, num_q = interpreted("attention"), (1 << 29) + 1
    shape = module.Shape.of(num_q, 1, (1, 1), 16, (torch.float16,) * 3)
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    late = (num_q - 1) // shape.num_queries
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda x, y, z: setattr(builder, "grid_idx", (late, y, z))
    )
    monkeypatch.setattr(module, "_num_splits", lambda *arguments: 1)
    launch = module.paged_attention_kernel
    monkeypatch.setattr(module, "paged_attention_kernel", {(late + 1, 1, 1): launch[(1, 1, 1)]})
    intervals = sparse(torch.int32, num_q, 4)
    intervals[-1] = torch.tensor([2, 5, 0, 0])
    cache = torch.ones(1, 16, 1, 1, dtype=torch.float16)
    _, lse = module.paged_attention(
        torch.zeros(1, 1, 1, dtype=torch.float16).expand(num_q, 1, 1), cache, cache,
        torch.zeros(1, 1, dtype=torch.int32), intervals, sparse(torch.int64, num_q),
        *(torch.tensor(each, dtype=torch.int32) for each in ([16], [0, num_q], [16])),
        1.0, None, None,
    )  # fmt: skip
    torch.testing.assert_close(lse[-1, 0], torch.tensor(3.0).log())


def test_grid_overflow_is_rejected(engine):
    """CUDA refuses that many heads; where programs are 2**31 in all, Triton launches nothing."""
    if engine.engine != "triton":
        pytest.skip("other engines have no grid")
    many, most = 1 << 16, 1 << 15
    k = torch.zeros(1, 1, 1, device=engine.device)
    cache = torch.zeros(1, 1, many, 1, device=engine.device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=engine.device)
    rows = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([1], [1], device=engine.device))
    with pytest.raises(mk.InvalidArgument, match="q must have queries and heads for at most"):
        mk.paged_attention(k.expand(1, many, 1), cache, cache, table, rows, engine="triton")
    for shape in ((1, many), (many, most)):
        slots = torch.full(shape[:1], -1, device=engine.device)
        with pytest.raises(mk.InvalidArgument, match="k must have tokens and heads for at most"):
            mk.append_kv(
                k.expand(*shape, 1), None, cache[:, :, : shape[1]], None, slots, engine="triton"
            )
    merge = _library.triton_module("merge_attention", "attention_merge", k.device).merge_attention
    with pytest.raises(mk.InvalidArgument, match="outs must have queries and heads for at most"):
        merge(k.expand(1, many, most, 1), k.expand(1, many, most), False)
