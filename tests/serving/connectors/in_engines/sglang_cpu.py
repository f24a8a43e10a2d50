"""Lets SGLang's memory pools and prefix tree run on a CPU, for tests.

SGLang copies between a GPU and its host pools by kernels. ``copy_on_the_cpu`` puts torch's copies
in their place, of keys and values and of Mamba's states, and the host memory is not pinned.
"""

import contextlib
import sys
import types
from collections.abc import Iterator
from unittest import TestCase, mock

import transformers.utils


class _Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


def _stub(name: str, **names: object) -> None:
    stub = types.ModuleType(name)
    stub.__path__ = []
    stub.__getattr__ = lambda other: getattr(_Anything("anything", (), {}), other)
    vars(stub).update(names)
    sys.modules[stub.__name__] = stub


# SGLang imports torchvision for models with images; the one for CPUs is not on PyPI.
if not transformers.utils.is_torchvision_available():
    for module in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2"):
        _stub(f"torchvision{module}")
    sys.modules["torchvision.transforms.v2.functional"] = sys.modules["torchvision.transforms.v2"]
# The modules of requests, and the kit for tests, ask for packages of HTTP servers and data sets.
_stub("sglang.srt.parser.reasoning_parser", ReasoningParser=object)
_stub("sglang.test.test_utils", CustomTestCase=TestCase)


@contextlib.contextmanager
def copy_on_the_cpu() -> Iterator[None]:
    """Have SGLang's host pools copy from and to "devices" that are host memory."""
    from sglang.srt.mem_cache.pool_host.base import HostKVCache
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    def pairs(pool, layer):
        yield pool.device_k_buffers[layer], pool.k_data_refs[layer]
        yield pool.device_v_buffers[layer], pool.v_data_refs[layer]

    def load(pool, _pool, host, device, layer, _backend, *, is_draft=False):
        if layer < pool.target_layer_num:
            for ours, theirs in pairs(pool, layer):
                ours[device] = theirs[host]

    def save(pool, _pool, host, device, _backend):
        for layer in range(pool.target_layer_num):
            for ours, theirs in pairs(pool, layer):
                theirs[host] = ours[device]

    def load_state(src, dst, src_indices, dst_indices, layer_id, **_):
        dst[dst_indices] = src[src_indices, layer_id, 0]

    def save_states(src_layers, dst, src_indices, dst_indices, num_layers, **_):
        for layer in range(num_layers):
            dst[dst_indices, layer, 0] = src_layers[layer][src_indices]

    mha = {"load_to_device_per_layer": load, "backup_from_device_all_layer": save}
    states = {
        "_copy_tensor_pf_lf": staticmethod(load_state),
        "_copy_tensor_all_layers_lf_pf": staticmethod(save_states),
    }
    unpinned = property(lambda _pool: False, lambda _pool, _value: None)
    with (
        mock.patch.multiple(MHATokenToKVPoolHost, **mha),
        mock.patch.multiple(MambaPoolHost, **states),
        mock.patch.object(HostKVCache, "pin_memory", unpinned, create=True),
    ):
        yield
