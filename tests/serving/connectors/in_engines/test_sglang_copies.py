"""Our copies beside SGLang's, from its own file, on the CPU.

The file is loaded by its path: the package around it imports servers. Its functions for torch run
on a CPU once streams and devices are left out.
"""

import contextlib
import importlib.util
import types

import numpy as np
import pytest
import torch

from mooncake_serving.connectors.sglang import copies

package = importlib.util.find_spec("sglang")
if package is None:
    pytest.skip("no SGLang: see make_engines", allow_module_level=True)


LAYERS, PAGES, PAGE, DIM = 3, 8, 4, 16
STREAM = types.SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)


@pytest.fixture
def staging_buffer(monkeypatch):
    """SGLang's module, anew."""
    folder = package.submodule_search_locations[0]
    path = f"{folder}/srt/disaggregation/common/staging_buffer.py"
    spec = importlib.util.spec_from_file_location("staging_buffer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._USE_TRITON_STAGING = False
    module.device_stream_context = lambda stream: contextlib.nullcontext()
    return module


class Buffer:
    device = torch.device("cpu")
    device_module = types.SimpleNamespace(set_device=lambda index: None)

    def __init__(self, num_bytes):
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8)

    def get_gather_stream(self):
        return STREAM

    def producer_stream(self):
        return STREAM


def pool(num_heads, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(PAGES * PAGE, num_heads, DIM, generator=generator) for _ in range(LAYERS)]
        for _ in range(2)
    ]


@pytest.mark.parametrize("heads", [8, 2])  # 2: ranks share heads
@pytest.mark.parametrize("prefill", [1, 2, 4, 8])
@pytest.mark.parametrize("decode", [1, 2, 4, 8])
def test_staging_of_any_two_tensor_parallel_sizes(staging_buffer, prefill, decode, heads):
    theirs = types.SimpleNamespace(**vars(staging_buffer))
    copies.replace_staging_copies(staging_buffer)
    assert staging_buffer.gather_all_layers_to_staging is not theirs.gather_all_layers_to_staging
    pages, there = np.array([5, 1, 6], dtype=np.int32), torch.tensor([0, 7, 3])
    per_prefill, per_decode = max(1, heads // prefill), max(1, heads // decode)
    for rank in range(decode):
        expected, got = pool(per_decode, 100), pool(per_decode, 100)
        sent = []
        for writer in range(max(1, prefill // decode)):
            first, num_heads, _, _ = theirs.compute_head_slice_params(
                prefill, decode, writer, rank, heads
            )
            k, v = pool(per_prefill, writer)
            buffers = [Buffer(1 << 17) for _ in range(2)]
            for module, buffer in zip((theirs, staging_buffer), buffers, strict=True):
                sent_bytes = module.gather_all_layers_to_staging(
                    k, v, pages, buffer, first, num_heads, PAGE
                )
            assert torch.equal(buffers[0].buffer, buffers[1].buffer)
            sent.append(buffers[0].buffer[:sent_bytes])
        arrived = torch.cat(sent)
        sizes = (PAGE, prefill, decode, rank, heads)
        theirs.scatter_staging_to_kv(arrived, *expected, there, *sizes)
        staging_buffer.scatter_staging_to_kv(arrived, *got, there, *sizes)
        for side, other in zip(expected, got, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(side, other, strict=True))
