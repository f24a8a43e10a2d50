"""copy_batch on a GPU: what the copies of test_copy_batch.py do not cover."""

import pytest
import torch

import mooncake_kernels as mk

from .batches import GPU_ENGINES, memory, run

pytestmark = pytest.mark.parametrize("engine", GPU_ENGINES, indirect=True)


def test_auto_picks_cuda_on_the_current_stream(engine):
    src, dst = memory(64, engine, on_gpu=True, seed=1), memory(64, engine)
    run(src, dst, [(0, 0, 64)], "auto")
    torch.cuda.synchronize()
    assert torch.equal(src.cpu(), dst)


def test_host_engines_reject_gpu_memory(engine):
    src, dst = memory(64, engine, on_gpu=True, seed=1), memory(64, engine)
    message = r"src_ptrs\[0\] must be in host memory, got 0x.* on cuda:0"
    for host_engine in ("host", "reference"):
        with pytest.raises(mk.InvalidArgument, match=message):
            run(src, dst, [(0, 0, 64)], host_engine)


def test_range_must_stay_within_its_allocation(engine):
    src, dst = (memory(64, engine, on_gpu=True) for _ in range(2))
    size = 1 << 40  # more than there is
    first, second = sorted(x.data_ptr() for x in (src, dst))
    columns = [torch.tensor([x]) for x in (first, second + 2 * size, size)]
    with pytest.raises(mk.InvalidArgument, match=r"src_ptrs\[0\] must have sizes\[0\] = "):
        mk.copy_batch(*columns, engine=engine)


def test_copy_engine_rejects_the_default_stream(engine):
    src, dst = memory(64, engine, on_gpu=True, seed=1), memory(64, engine)
    columns = [torch.tensor([x]) for x in (src.data_ptr(), dst.data_ptr(), 64)]
    if engine == "copy_engine":
        with pytest.raises(mk.InvalidArgument, match="current stream must not be the default"):
            mk.copy_batch(*columns, engine=engine)
    else:
        mk.copy_batch(*columns, engine=engine)
        torch.cuda.synchronize()
        assert torch.equal(src.cpu(), dst)


def test_captured_kernel_keeps_its_list(engine):
    if engine == "copy_engine":
        pytest.skip("CUDA does not capture cuMemcpyBatchAsync")
    src, dst = memory(64, engine, on_gpu=True, seed=1), memory(64, engine, on_gpu=True)
    columns = [torch.tensor([x]) for x in (src.data_ptr(), dst.data_ptr(), 64)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mk.copy_batch(*columns, engine=engine)
    del columns
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(src, dst)
