"""GPU memory by address, through Mooncake's calls."""

import os

import numpy as np
import pytest
import torch

from mooncake_serving.compat.mooncake import MooncakeDistributedStore

from ...fake_cuda.driver import ILLEGAL_ADDRESS
from ...fake_cuda.gpus import IS_FAKE
from ...transfer.support import UNTOUCHED
from ..support import content
from .conftest import UNIT

WRONG, ABSENT, FAILED = -600, -704, -800


@pytest.fixture
def store(gpus):
    path = f"/dev/shm/mk-test-gpu-{os.getpid()}"
    made = MooncakeDistributedStore()
    assert made.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 20, 0, "tcp", "", path) == 0
    yield made
    made.close()
    os.unlink(path)


@pytest.mark.parametrize("registers", [True, False])
def test_values_from_and_to_gpus(store, gpus, registers):
    source, target = gpus.allocate(4 * UNIT), gpus.allocate(4 * UNIT, 1)
    whole = content((1, 1), 4 * UNIT)
    source.put(whole)
    if registers:
        for memory in (source, target):
            assert store.register_buffer(memory.address, memory.num_bytes) == 0
    assert store.put_from("a", source.address + 8, 100) == 0
    assert store.get("a") == whole[8:108].tobytes()
    assert store.get_into("a", target.address + 1, UNIT) == 100
    np.testing.assert_array_equal(target.get()[1:101], whole[8:108])

    starts = [source.address + i * UNIT for i in range(4)]
    assert store.batch_put_from(["b", "c"], starts[:2], [UNIT] * 2) == [0, 0]
    assert store.batch_put_from_multi_buffers(["d"], [starts], [[UNIT] * 4]) == [0]
    assert store.get("d") == whole.tobytes()
    ends = [target.address + i * UNIT for i in reversed(range(4))]
    sizes = store.batch_get_into_multi_buffers(["d", "z"], [ends, ends], [[UNIT] * 4] * 2)
    assert sizes == [4 * UNIT, ABSENT]
    np.testing.assert_array_equal(target.get().reshape(4, UNIT), whole.reshape(4, UNIT)[::-1])
    read = store.get_into_ranges([target.address], [["d"]], [[[5, 50]]], [[[0, 9]]], [[[10, 20]]])
    assert read == [[[10, 20]]]
    np.testing.assert_array_equal(target.get()[5:15], whole[:10])
    np.testing.assert_array_equal(target.get()[50:70], whole[9:29])
    if registers:
        for memory in (source, target):
            assert store.unregister_buffer(memory.address) == 0


class Tensor:
    """Memory of the fake GPU as torch would show it."""

    def __init__(self, memory, dtype, shape):
        self.dtype, self.shape = dtype, shape
        self.__cuda_array_interface__ = memory.buffer.__cuda_array_interface__


def tensor_in(memory, dtype, *shape):
    return Tensor(memory, dtype, shape) if IS_FAKE else memory.buffer.view(dtype).reshape(shape)


def test_tensors_into_tensors_on_gpus(store, gpus):
    memory = gpus.allocate(2 * UNIT)
    target = memory.part(UNIT // 2, UNIT // 2 + 1000)
    tensor = torch.from_numpy(content((1, 1), 1000)).view(torch.float16).reshape(5, 100)
    assert store.put_tensor("a", tensor) == 0
    assert store.get_tensor_into_cuda("a", tensor_in(target, torch.float16, 5, 100)) == 1000
    np.testing.assert_array_equal(target.get(), content((1, 1), 1000))
    for begin, end in ((0, UNIT // 2), (UNIT // 2 + 1000, 2 * UNIT)):
        assert (memory.part(begin, end).get() == UNTOUCHED).all()
    other = memory.part(UNIT, UNIT + 1000)
    wrong = tensor_in(other, torch.bfloat16, 5, 100), tensor_in(other, torch.float16, 100, 5)
    right = tensor_in(other, torch.float16, 5, 100)
    keys = ["a", "a", "none", "a"]
    found = store.batch_get_tensor_into_cuda(keys, [*wrong, right, right])
    assert found == [WRONG, WRONG, ABSENT, 1000]
    np.testing.assert_array_equal(other.get(), content((1, 1), 1000))


def test_failed_tensor_copy_returns_error_code(store, gpus, driver):
    memory = gpus.allocate(UNIT)
    assert store.put_tensor("a", torch.zeros(UNIT, dtype=torch.uint8)) == 0
    driver.fail("cuMemcpyAsync", ILLEGAL_ADDRESS)
    assert store.get_tensor_into_cuda("a", tensor_in(memory, torch.uint8, UNIT)) == FAILED
    assert store.get_tensor_into_cuda("a", tensor_in(memory, torch.uint8, UNIT)) == UNIT
    assert not memory.get().any()


def test_range_beyond_an_allocation_is_rejected(store, gpus):
    memory = gpus.allocate(UNIT)
    assert store.register_buffer(memory.address, UNIT + (1 << 30)) == WRONG
    assert store.put_from("a", memory.address + 10, UNIT + (1 << 30)) == WRONG
    assert store.is_exist("a") == 0


def test_driver_failures_return_error_codes(store, gpus, driver):
    memory = gpus.allocate(UNIT)
    driver.fail("cuMemcpyAsync", ILLEGAL_ADDRESS)
    assert store.put_from("a", memory.address, UNIT) == FAILED
    assert store.is_exist("a") == 0
    assert store.put_from("a", memory.address, UNIT) == 0
    driver.fail("cuStreamSynchronize", ILLEGAL_ADDRESS)
    assert store.get_into("a", memory.address, UNIT) == FAILED
    driver.fail("cuPointerGetAttributes", ILLEGAL_ADDRESS)
    assert store.get_into("a", memory.address, UNIT) == FAILED
    assert store.get_into("a", memory.address, UNIT) == UNIT
