"""Our copies in vLLM's own module, put there by our plugin as vLLM loads it."""

import pytest
import torch

from mooncake_kernels import config
from mooncake_serving.connectors import vllm_plugin
from mooncake_serving.connectors.vllm.copies import VERSIONS

vllm = pytest.importorskip("vllm", reason="no vLLM: see `make test-vllm`")
gpu_worker = pytest.importorskip(
    "vllm.v1.kv_offload.cpu.gpu_worker", reason="no vLLM: see `make test-vllm`"
)


def test_the_plugin_replaces_vllms_function(monkeypatch):
    if not vllm.__version__.startswith(VERSIONS):
        pytest.skip(f"our copies are for vLLM {' and '.join(VERSIONS)}")
    theirs = gpu_worker._select_swap_blocks_fn
    monkeypatch.setattr(gpu_worker, "_select_swap_blocks_fn", theirs)  # back at the end
    monkeypatch.setenv(vllm_plugin.SETTING, "1")
    monkeypatch.setattr(config, "_current", None)
    vllm_plugin.register()
    ours = gpu_worker._select_swap_blocks_fn
    assert ours is not theirs
    copy = ours([[]], True, host_memory_is_pinned=True)
    src, dst = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    copy(*(torch.tensor([n]) for n in (src.data_ptr(), dst.data_ptr() + 8, 16)))
    assert torch.equal(dst[8:24], src[:16]) and not dst[:8].any() and not dst[24:].any()
