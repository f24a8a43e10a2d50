"""Registration of addresses, managed buffers, and access to both."""

import contextlib
import ctypes
import mmap
import sys

import numpy as np
import pytest
import torch

from mooncake_kernels import config
from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.compat.mapped_memory import MappedMemory
from mooncake_serving.compat.mooncake import TransferEngine, names

from .support import addressed, in_threads, refused, side, start, untouched

PAGE = mmap.PAGESIZE


@pytest.fixture
def engine():
    with contextlib.closing(start(TransferEngine())) as engine:
        yield engine


def address_of(memory) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


def test_register_and_unregister(engine, caplog):
    memory = untouched(4 * PAGE)
    address = memory.ctypes.data
    assert engine.register_memory(address, PAGE) == 0
    assert engine.register_memory(np.uint64(address + PAGE), np.int32(PAGE), "cpu:1") == 0
    assert engine.batch_register_memory([], []) == 0
    assert engine.get_first_buffer_address(f"127.0.0.1:{engine.get_rpc_port()}") == address
    assert engine.unregister_memory(address) == 0
    refused(caplog, -3, hex(address), engine.unregister_memory, address)
    refused(caplog, -3, hex(address + PAGE + 8), engine.unregister_memory, address + PAGE + 8)
    own_name = f"127.0.0.1:{engine.get_rpc_port()}"
    assert engine.get_first_buffer_address(own_name) == address + PAGE
    assert engine.unregister_memory(address + PAGE) == 0
    assert engine.get_first_buffer_address(own_name) == 0


@pytest.mark.parametrize("form", [list, tuple, np.array])
def test_batches_of_memory(engine, caplog, form):
    memory = untouched(1024 * PAGE)
    addresses = [memory.ctypes.data + 2 * PAGE * i for i in range(512)]
    assert engine.batch_register_memory(form(addresses), form([PAGE] * 512)) == 0
    refused(caplog, -7, "overlap", engine.register_memory, addresses[511] + 1, 1)
    assert engine.batch_unregister_memory(form(addresses)) == 0
    refused(caplog, -3, hex(addresses[0]), engine.batch_unregister_memory, form(addresses))
    assert engine.batch_register_memory(addresses, [PAGE] * 512) == 0


def test_batch_registration_is_all_or_nothing(engine, caplog):
    memory = untouched(8 * PAGE)
    first, second, third = (memory.ctypes.data + i * PAGE for i in range(3))
    batch = engine.batch_register_memory
    refused(caplog, -7, "overlap", batch, [first, first + 8], [PAGE, PAGE])
    refused(caplog, -1, "that this process can read, .* got 0x8 ", batch, [first, 8], [PAGE, PAGE])
    refused(caplog, -1, "capacities .* got 0", batch, [first, second], [PAGE, 0])
    refused(caplog, -1, "buffer_addresses .* got -1", batch, [first, -1], [PAGE, PAGE])
    refused(caplog, -1, "buffer_addresses must be memory", batch, [first, 8], [PAGE, PAGE])
    refused(caplog, -3, "buffer_addresses must be where", engine.batch_unregister_memory, [8])
    refused(caplog, -1, "equally long, got 2 and 1", batch, [first, second], [PAGE])
    assert batch([first, second], [PAGE, PAGE]) == 0
    unregister = engine.batch_unregister_memory
    refused(caplog, -3, hex(third), unregister, [first, third])
    refused(caplog, -3, "named once", unregister, [first, first])
    assert unregister([second, first]) == 0


def test_memory_that_cannot_be_registered(engine, caplog):
    memory = untouched(PAGE)
    address = memory.ctypes.data
    register = engine.register_memory
    refused(caplog, -1, "this process can read, .* got 0x0 ", register, 0, PAGE)
    refused(caplog, -1, "this process can read", register, 2**64 - PAGE, PAGE)
    refused(caplog, -1, "this process can read", register, address, 2**64 - 1)
    for wrong in (-1, 2**64, "x", None, 1.5, [address]):
        refused(caplog, -1, "buffer_addr must be an integer", register, wrong, PAGE)
        refused(caplog, -1, "capacity must be an integer", register, address, wrong)
    refused(caplog, -303, r"location .* got 'npu:0'", register, address, PAGE, "npu:0")
    refused(caplog, -1, "memory is, cpu:0, got 'cuda:0'", register, address, PAGE, "cuda:0")
    refused(caplog, -303, "location .* got None", register, address, PAGE, None)
    refused(caplog, -1, "list of integers", engine.batch_register_memory, address, PAGE)
    refused(caplog, -1, "list of integers", engine.batch_unregister_memory, None)
    refused(caplog, -1, "must be an integer", engine.batch_unregister_memory, ["x"])
    assert register(address, PAGE) == 0
    refused(caplog, -7, "overlap", register, address, PAGE)


def test_unmapped_memory_is_refused(engine, caplog):
    pages = mmap.mmap(-1, 4 * PAGE)
    address = address_of(pages)
    assert MappedMemory().access(address, 4 * PAGE) == "rw"
    pages.close()  # the array above is gone
    mapped = MappedMemory()
    if mapped.access(address, 1):
        pytest.skip("the address is in use again")
    refused(caplog, -1, "that this process can read", engine.register_memory, address, PAGE)


def test_read_only_memory_may_be_read_only(engine, caplog):
    pages = mmap.mmap(-1, PAGE, prot=mmap.PROT_READ)
    address = address_of(pages)
    assert MappedMemory().access(address, PAGE) == "r"
    assert engine.register_memory(address, PAGE) == 0
    assert engine.read_bytes_from_buffer(address, 8) == bytes(8)
    refused(caplog, -1, "writable", engine.write_bytes_to_buffer, address, b"12345678", 8)
    with side(untouched(PAGE)) as other:
        name = f"127.0.0.1:{engine.get_rpc_port()}"
        assert other.engine.transfer_sync_read(name, other.address, address, PAGE) == 0
        other.sees(np.zeros(PAGE, np.uint8))
        write = other.engine.transfer_sync_write
        refused(caplog, -1, "may not write", write, name, other.address, address, PAGE)


def test_memory_across_mappings():
    pages = mmap.mmap(-1, 6 * PAGE)
    address = address_of(pages)
    libc = ctypes.CDLL(None)
    for page, protection in ((2, mmap.PROT_READ), (4, 0)):
        assert libc.mprotect(ctypes.c_void_p(address + page * PAGE), PAGE, protection) == 0
    mapped = MappedMemory()
    assert mapped.access(address, 2 * PAGE) == "rw"
    assert mapped.access(address + PAGE, PAGE + 1) == "r"
    assert mapped.access(address + 3 * PAGE, PAGE) == "rw"
    assert mapped.access(address + 3 * PAGE, PAGE + 1) == ""
    assert mapped.access(address + 4 * PAGE, 1) == ""
    assert mapped.access(sys.maxsize * 2, 8) == ""


def test_torch_tensor_is_registered_by_pointer(engine):
    tensor = torch.arange(4096, dtype=torch.float32)
    assert engine.register_memory(tensor.data_ptr(), tensor.nbytes) == 0
    back = engine.read_bytes_from_buffer(tensor.data_ptr() + 4, tensor.nbytes - 4)
    assert back == tensor[1:].numpy().tobytes()


def test_managed_buffers(engine, caplog):
    small, large = engine.allocate_managed_buffer(100), engine.allocate_managed_buffer(3 << 20)
    assert small % PAGE == large % PAGE == 0
    assert engine.get_first_buffer_address(f"127.0.0.1:{engine.get_rpc_port()}") == small
    data = addressed(3 << 20)
    assert engine.write_bytes_to_buffer(large, data.tobytes(), data.nbytes) == 0
    assert engine.read_bytes_from_buffer(large, data.nbytes) == data.tobytes()
    assert engine.read_bytes_from_buffer(small, 100) == bytes(100)
    refused(caplog, -7, "overlap", engine.register_memory, small, 8)
    refused(caplog, -3, hex(small), engine.unregister_memory, small)
    refused(caplog, -3, "100", engine.free_managed_buffer, large, 100)
    refused(caplog, -3, "0x8 ", engine.free_managed_buffer, 8, 100)
    assert engine.free_managed_buffer(small, 100) == 0
    refused(caplog, -3, hex(small), engine.free_managed_buffer, small, 100)
    assert engine.free_managed_buffer(large, 3 << 20) == 0
    for wrong in (0, -1, "x"):
        refused(caplog, 0, "length must be", engine.allocate_managed_buffer, wrong)
    refused(caplog, 0, "length must be at most", engine.allocate_managed_buffer, 2**63)
    refused(caplog, 0, "Cannot allocate memory", engine.allocate_managed_buffer, 2**62)


def test_registered_memory_is_not_freed_as_a_managed_buffer(engine, caplog):
    memory = untouched(PAGE)
    assert engine.register_memory(memory.ctypes.data, PAGE) == 0
    refused(caplog, -3, "those of", engine.free_managed_buffer, memory.ctypes.data, PAGE)


def test_read_and_write_bytes_of_a_buffer(engine, caplog):
    memory = untouched(64)
    address = memory.ctypes.data
    assert engine.register_memory(address, 64) == 0
    write = engine.write_bytes_to_buffer
    for data in (b"abcdef", bytearray(b"abcdef"), memoryview(b"abcdef"), "abcdef"):
        memory[:] = 0
        assert write(address + 2, data, 4) == 0
        assert memory[:8].tobytes() == b"\0\0abcd\0\0"
    assert write(address, b"", 0) == 0
    assert write(address, np.arange(4, dtype=np.uint16), 8) == 0
    assert engine.read_bytes_from_buffer(address, 8) == np.arange(4, dtype=np.uint16).tobytes()
    assert engine.read_bytes_from_buffer(address + 64, 0) == b""
    refused(caplog, -1, "length must be at most 6, got 7", write, address, b"abcdef", 7)
    refused(caplog, -1, "inside writable registered memory", write, address + 60, b"abcdef", 6)
    refused(caplog, -1, "inside writable registered memory", write, 8, b"abcdef", 6)
    refused(caplog, -1, "src_ptr must be bytes", write, address, 5, 1)
    refused(caplog, -1, "dest_address must be", write, -1, b"1", 1)
    refused(caplog, -1, "length must be", write, address, b"1", -1)
    for wrong in ((address, 65), (address - 1, 2), (0, 8), (2**64 - 1, 1), (-1, 1), (address, "x")):
        with pytest.raises(InvalidArgument):
            engine.read_bytes_from_buffer(*wrong)


def test_first_buffer_address_of_a_peer(pair):
    assert pair.near.engine.get_first_buffer_address(pair.name) == pair.far.address


def test_a_peer_without_memory_and_an_absent_peer(engine, caplog):
    first = engine.get_first_buffer_address
    with contextlib.closing(TransferEngine()) as other:
        name = f"127.0.0.1:{start(other).get_rpc_port()}"
        assert first(name) == 0 and caplog.text == ""
    refused(caplog, 0, "the peer's engine was closed", first, name)
    refused(caplog, 0, "connection refused", first, name)
    refused(caplog, 0, "must be a string", first, None)


def test_first_buffer_address_over_tcp_needs_a_secret(monkeypatch, caplog):
    monkeypatch.setitem(names._TRANSPORTS, "tcp", ("tcp",))
    with side(untouched(PAGE)) as near, side(untouched(PAGE)) as far:
        first = near.engine.get_first_buffer_address
        refused(caplog, 0, "regions are listed only to peers", first, f"localhost:{far.port}")
    with config.override(secret="what all of us know"):
        with side(untouched(PAGE)) as near, side(untouched(PAGE)) as far:
            assert near.engine.get_first_buffer_address(f"localhost:{far.port}") == far.address


def test_threads_register_shared_and_own_memory(engine):
    memory = untouched(64 * PAGE)
    address = memory.ctypes.data
    shared, rounds = [], 50

    def run(index: int):
        own = address + (1 + index) * PAGE
        for _ in range(rounds):
            shared.append(engine.register_memory(address, PAGE))
            assert engine.register_memory(own, PAGE) == 0
            buffer = engine.allocate_managed_buffer(100)
            assert engine.write_bytes_to_buffer(buffer, bytes([index]) * 100, 100) == 0
            assert engine.read_bytes_from_buffer(buffer, 100) == bytes([index]) * 100
            assert engine.free_managed_buffer(buffer, 100) == 0
            assert engine.unregister_memory(own) == 0

    in_threads(8, run)
    assert shared.count(0) == 1 and set(shared) <= {0, -1, -7}
    assert engine.unregister_memory(address) == 0
