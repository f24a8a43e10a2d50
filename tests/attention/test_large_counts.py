"""Queries and parts whose number, or a product of it, needs 32 bits or more."""

import os

import pytest
import torch

from mooncake_kernels import _library

WRAP = 1 << 31  # elements: of an offset of 32 bits that leads back, into the file


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


def test_parts_of_more_rows_than_int32_counts(interpreted, sparse):
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
