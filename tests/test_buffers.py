"""as_buffer: the memory of any library's object, without a copy."""

import array
import weakref

import numpy as np
import pytest
import torch

from mooncake_kernels import InvalidArgument
from mooncake_kernels.buffers import as_buffer, copy_into


def test_tensor_buffer():
    tensor = torch.arange(10, dtype=torch.bfloat16)
    buffer = as_buffer(tensor)
    assert (buffer.address, buffer.num_bytes) == (tensor.data_ptr(), 20)
    assert (buffer.location, buffer.writable) == ("cpu:0", True)
    assert as_buffer(buffer) is buffer


def test_slice_buffer_starts_at_its_offset():
    tensor = torch.zeros(4, 8)
    assert as_buffer(tensor[1:3]).address == tensor.data_ptr() + 32
    assert as_buffer(tensor[1:3]).num_bytes == 64


def test_numpy_and_memoryview_buffers():
    values = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert as_buffer(values).address == values.ctypes.data
    assert as_buffer(memoryview(values)).num_bytes == 12
    values.flags.writeable = False
    assert not as_buffer(values).writable


def test_bytes_are_read_only_and_bytearrays_are_not():
    assert not as_buffer(b"abc").writable
    assert as_buffer(bytearray(b"abc")).writable
    assert as_buffer(array.array("d", [1.0, 2.0])).num_bytes == 16


def test_a_bytearray_cannot_be_resized_while_its_memory_is_held():
    memory = bytearray(b"abc")
    buffer = as_buffer(memory)
    with pytest.raises(BufferError):
        memory.extend(b"def")
    del buffer
    memory.extend(b"def")


@pytest.mark.parametrize("replace", ["data", "set_", "half"])
def test_buffer_keeps_the_original_memory_of_a_reassigned_tensor(replace):
    module = torch.nn.Linear(8, 8, bias=False)
    weight = module.weight
    freed = []
    weakref.finalize(weight.untyped_storage(), freed.append, True)
    buffer = as_buffer(weight)
    if replace == "data":
        weight.data = torch.zeros(2)
    elif replace == "set_":
        weight.detach_().set_(torch.zeros(2))
    else:
        module.half()
    assert weight.data_ptr() != buffer.address
    assert not freed
    del buffer
    assert freed


def test_empty_buffers():
    assert as_buffer(b"").num_bytes == 0
    assert as_buffer(torch.empty(0, 3)).num_bytes == 0


class DeviceArray:
    """What cupy arrays look like to others."""

    def __init__(self, shape, strides=None, readonly=False):
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (0x7F0000000000, readonly),
            "strides": strides,
            "version": 3,
        }


def test_cuda_array_interface_is_accepted():
    buffer = as_buffer(DeviceArray((2, 3), strides=(12, 4), readonly=True))
    assert (buffer.address, buffer.num_bytes) == (0x7F0000000000, 24)
    assert (buffer.location, buffer.writable) == ("cuda:0", False)
    with pytest.raises(InvalidArgument, match=r"pool must be packed, got strides \(24, 4\)"):
        as_buffer(DeviceArray((2, 3), strides=(24, 4)), argument="pool")


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (torch.zeros(4, 4).T, "buffer must be packed, got shape"),
        (np.zeros((4, 4))[:, ::2], "buffer must be packed, got strides"),
        ([1, 2, 3], "got list"),
        (None, "got NoneType"),
        (torch.empty(2, device="meta"), "must be on cpu or cuda, got meta"),
        (torch.ones(2, dtype=torch.cfloat).conj(), "got a tensor with the conj bit"),
        (torch._neg_view(torch.ones(2)), "got a tensor with the neg bit"),
        (torch.eye(3).to_sparse(), "must be a dense tensor, got a torch.sparse_coo one"),
        (np.array([None, [1]], object), "must hold no Python objects, got format 'O'"),
        (np.array(["2020"], "M8[Y]"), r"got ndarray \(cannot include dtype 'M'"),
        (np.zeros(2, "i4,O"), "must hold no Python objects"),
    ],
)
def test_unsupported_memory_is_rejected(memory, message):
    with pytest.raises(InvalidArgument, match=message):
        as_buffer(memory)


def test_buffers_are_copied_into_memory_of_the_caller():
    target = bytearray(8)
    copy_into(target, [b"ab", torch.arange(3, dtype=torch.uint8), np.zeros(0)])
    assert target == b"ab\0\1\2\0\0\0"
    for wrong, got in [(bytearray(1), "1 bytes on cpu:0"), (bytes(9), "9 read-only bytes on")]:
        with pytest.raises(InvalidArgument, match=f"target must be 2 writable bytes .* got {got}"):
            copy_into(wrong, [b"ab"])
