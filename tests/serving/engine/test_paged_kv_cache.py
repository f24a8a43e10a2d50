"""Every layout shows the same cache: one view a layer, over memory in the order of the axes."""

import itertools

import pytest
import torch

from mooncake_serving.engine import PagedKVCache

LAYOUTS = [
    "kv block token head dim",
    "kv block head token dim",
    "layer kv block token head dim",
    "block layer kv head token dim",
]


@pytest.mark.parametrize("axes", LAYOUTS)
def test_layer_views_have_one_shape_and_share_no_memory(tiny, axes):
    cache = PagedKVCache(tiny.config, 5, block_size=4, axes=axes)
    views = list(itertools.chain(*(cache.layer(i) for i in range(2))))
    assert [tuple(view.shape) for view in views] == [(5, 4, 2, 16)] * 4
    for value, view in enumerate(views):
        assert not view.any(), "a new cache is zero"
        view.fill_(value)
    assert [view.unique().tolist() for view in views] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("axes", LAYOUTS)
def test_tensors_are_laid_out_in_axis_order(tiny, axes):
    cache = PagedKVCache(tiny.config, 5, block_size=4, axes=axes)
    size = {"layer": 2, "kv": 2, "block": 5, "token": 4, "head": 2, "dim": 16}
    first = cache.tensors if "layer" in axes else cache.tensors[0]
    assert list(first.shape) == [size[name] for name in axes.split()]
    assert first.is_contiguous()
    index = {"layer": 1, "kv": 1, "block": 3, "token": 2, "head": 1}
    cache.layer(1)[1][3, 2, 1] = 7.0
    tensor = cache.tensors if "layer" in axes else cache.tensors[1]
    assert (tensor[tuple(index[name] for name in axes.split()[:-1])] == 7.0).all()
    assert cache.num_bytes == 2 * 2 * 5 * 4 * 2 * 16 * 4


def test_cache_may_use_existing_memory(tiny):
    buffer = torch.full((100_000,), 0xEE, dtype=torch.uint8)
    cache = PagedKVCache(tiny.config, 5, block_size=4, dtype=torch.bfloat16, buffer=buffer)
    assert cache.tensors[0].data_ptr() == buffer.data_ptr()
    assert not buffer[: cache.num_bytes].any()
    assert (buffer[cache.num_bytes :] == 0xEE).all(), "written beyond the cache"


def test_block_count_is_rounded_up(tiny):
    cache = PagedKVCache(tiny.config, 5, block_size=4)
    assert [cache.num_blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize("axes", LAYOUTS)
def test_kv_view_sees_the_same_cache(tiny, axes):
    mk = pytest.importorskip("mooncake_kernels")
    if not hasattr(mk, "KVView"):
        pytest.skip("mooncake_kernels has no KVView here")
    cache = PagedKVCache(tiny.config, 5, block_size=4, axes=axes)
    view = cache.view()
    assert (view.num_layers, view.num_blocks, view.block_size) == (2, 5, 4)
    cache.layer(1)[0].fill_(7.0)
    last = cache.view(range(1, 2))
    assert last.num_layers == 1
    assert (last.plane(0, 0) == 7.0).all() and not last.plane(0, 1).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axes": "kv block token head"}, "axes must name kv, block, token, head and dim once"),
        ({"axes": "kv block page head dim"}, "axes must name .* got 'kv block page head dim'"),
        ({"axes": "kv block token head head dim"}, "axes must name"),
        ({"axes": ""}, "axes must name .* got ''"),
        ({"axes": "kv block dim head token"}, "axes must end with dim"),
        ({"axes": None}, "axes must be a string, got None"),
        ({"dtype": "float32"}, "dtype must be float32, bfloat16 or float16, got 'float32'"),
        ({"dtype": torch.int8}, "dtype must be float32, bfloat16 or float16, got torch.int8"),
        ({"device": "foo"}, "device must be a device of torch, got 'foo'"),
        ({"device": None}, "device must be a device of torch, got None"),
        ({"buffer": bytearray(9999)}, "buffer must be a 1-d uint8 tensor or None, got"),
        ({"num_blocks": 0}, "num_blocks must be positive, got 0"),
        ({"num_blocks": 1.5}, "num_blocks must be an integer, got 1.5"),
        ({"block_size": True}, "block_size must be an integer, got True"),
        ({"block_size": -1}, "block_size must be positive, got -1"),
        ({"buffer": torch.zeros(8, dtype=torch.uint8)}, "at least 8192 bytes, got 8"),
        ({"buffer": torch.zeros(9999, dtype=torch.uint8)[1:]}, "start at a multiple of 4 bytes"),
        ({"buffer": torch.zeros(9999)}, "buffer must be 1-d uint8 on cpu, got 1-d torch.float32"),
    ],
)
def test_bad_arguments_are_rejected(tiny, change, message):
    with pytest.raises(ValueError, match=message):
        PagedKVCache(**({"config": tiny.config, "num_blocks": 4, "block_size": 4} | change))
