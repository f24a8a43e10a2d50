"""Lists for copy_batch, of ranges within two pieces of memory."""

import torch

import mooncake_kernels as mk

from .layouts import addressed

GPU_ENGINES = ("cuda", "copy_engine")


def memory(num_bytes, engine, *, on_gpu=False, seed=None):
    """Host memory that the engine can reach, or a GPU's; filled, or position-hashed by a seed."""
    is_gpu_engine = engine in GPU_ENGINES
    made = torch.full((num_bytes,), 0x77, dtype=torch.uint8, pin_memory=is_gpu_engine)
    if seed is not None:
        made.copy_(addressed((num_bytes,), torch.uint8, "cpu", seed))
    return made.cuda() if on_gpu and is_gpu_engine else made


def run(src, dst, ranges, engine, **options):
    """Copy ranges (src offset, dst offset, bytes), on a stream that a copy engine takes."""
    columns = torch.tensor(ranges, dtype=torch.int64).reshape(-1, 3).unbind(1)
    arguments = (src.data_ptr() + columns[0], dst.data_ptr() + columns[1], columns[2])
    if engine not in GPU_ENGINES:
        return mk.copy_batch(*arguments, engine=engine, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        mk.copy_batch(*arguments, engine=engine, **options)
    stream.synchronize()
    return None


def check(ranges, num_bytes, engine, src_on_gpu=False, dst_on_gpu=False, **options):
    src = memory(num_bytes, engine, on_gpu=src_on_gpu, seed=1)
    dst = memory(num_bytes, engine, on_gpu=dst_on_gpu)
    source, expected = src.cpu(), dst.cpu().clone()
    for src_offset, dst_offset, size in ranges:
        expected[dst_offset : dst_offset + size] = source[src_offset : src_offset + size]
    run(src, dst, ranges, engine, **options)
    assert torch.equal(dst.cpu(), expected)
