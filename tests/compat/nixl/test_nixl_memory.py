"""Registration: kinds of memory, overlaps, adjacent ranges, what is refused; the descriptors."""

import mmap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mooncake_serving.compat.nixl import _bindings as nixl_bind
from mooncake_serving.compat.nixl import nixl_agent, nixl_agent_config
from mooncake_serving.compat.nixl.descriptors import expand_strided
from mooncake_serving.compat.nixl.memory import Ranges

from ..support import SIZE, addressed
from .support import BLOCK, reg_list

Invalid = nixl_bind.nixlInvalidParamError


@pytest.fixture
def agent():
    agent = nixl_agent("agent", nixl_agent_config(backends=["UCX", "POSIX"]))
    yield agent
    agent.agent.close()


@pytest.fixture
def memory():
    return addressed(SIZE)


def regions(agent) -> int:
    return len(agent.agent.engine._regions)


def test_page_by_page_is_one_region(agent, memory):
    rows = [(memory.ctypes.data + i * BLOCK, BLOCK, 0, "") for i in range(SIZE // BLOCK)]
    descs = agent.register_memory(rows, "DRAM")
    assert descs.descCount() == SIZE // BLOCK and regions(agent) == 1
    agent.prep_xfer_dlist("", [(memory.ctypes.data + 5, SIZE - 5, 0)], "DRAM")
    agent.deregister_memory(descs)
    assert regions(agent) == 0
    with pytest.raises(nixl_bind.nixlNotFoundError):
        agent.prep_xfer_dlist("", [(memory.ctypes.data, 1, 0)], "DRAM")


def test_thousands_of_separate_ranges(agent, memory):
    rows = [(memory.ctypes.data + i * 256, 128, 0, "") for i in range(SIZE // 256)]
    descs = agent.register_memory(rows, "DRAM")
    again = agent.register_memory(rows[::2], "DRAM")
    assert regions(agent) == len(rows)
    agent.prep_xfer_dlist("", descs.trim())
    with pytest.raises(nixl_bind.nixlNotFoundError, match="descriptor 0"):
        agent.prep_xfer_dlist("", [(memory.ctypes.data, 129, 0)], "DRAM")
    agent.deregister_memory(descs)
    assert regions(agent) == len(rows) // 2
    agent.deregister_memory(again)
    assert regions(agent) == 0


def test_metadata_does_not_grow_with_pages(agent, memory):
    rows = [(memory.ctypes.data + i * BLOCK, BLOCK, 0, "") for i in range(SIZE // BLOCK)]
    agent.register_memory(rows, "DRAM")
    assert len(agent.get_agent_metadata()) < 400


def test_again_and_inside(agent, memory):
    inner = [(memory.ctypes.data + BLOCK, BLOCK, 0, "")]
    first = agent.register_memory(reg_list(memory), "DRAM")
    agent.register_memory(reg_list(memory), "DRAM")
    agent.register_memory(inner, "DRAM")
    assert regions(agent) == 1
    agent.deregister_memory(first)
    agent.deregister_memory(first)
    assert regions(agent) == 1
    agent.prep_xfer_dlist("", [inner[0][:3]], "DRAM")
    agent.deregister_memory(agent.get_reg_descs(inner, "DRAM"))
    assert regions(agent) == 0
    with pytest.raises(nixl_bind.nixlNotFoundError, match="must have been registered"):
        agent.deregister_memory(first)


def test_partly_overlapping_is_refused(agent, memory):
    address = memory.ctypes.data
    agent.register_memory([(address, 2 * BLOCK, 0, "")], "DRAM")
    with pytest.raises(Invalid, match="must lie inside registered memory, or not overlap"):
        agent.register_memory([(address + BLOCK, 2 * BLOCK, 0, "")], "DRAM")
    assert regions(agent) == 1


def test_all_or_none(agent, memory):
    free = mmap.mmap(-1, mmap.PAGESIZE)
    address = np.frombuffer(free, np.uint8).ctypes.data
    rows = [(memory.ctypes.data, BLOCK, 0, ""), (1 << 20, BLOCK, 0, "")]
    del free
    assert address
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="memory that this process can read"):
        agent.register_memory(rows, "DRAM")
    assert regions(agent) == 0
    good = agent.register_memory(rows[:1], "DRAM")
    with pytest.raises(nixl_bind.nixlNotFoundError):
        agent.deregister_memory(agent.get_reg_descs(rows, "DRAM"))
    assert regions(agent) == 1
    agent.deregister_memory(good)


def test_empty_ranges_and_lists(agent, memory):
    with pytest.raises(Invalid, match="must have bytes"):
        agent.register_memory([(memory.ctypes.data, 0, 0, "")], "DRAM")
    with pytest.raises(Invalid, match="must have bytes"):
        agent.register_memory([((1 << 64) - 4096, 4096, 0, "")], "DRAM")
    nothing = agent.register_memory(np.empty((0, 3), np.uint64), "DRAM")
    agent.deregister_memory(nothing)


def test_without_a_gpu(agent, memory):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(Invalid, match="on a GPU"):
        agent.register_memory(reg_list(memory), "VRAM")
    with pytest.raises(nixl_bind.nixlNotFoundError):
        agent.prep_xfer_dlist("", [(memory.ctypes.data, 8, 0)], "VRAM")


@pytest.mark.parametrize("kind", ["OBJ", "BLOCK"])
def test_kinds_that_are_refused_by_name(agent, kind):
    descs = agent.get_reg_descs([(0, 8, 1, "key")], kind)
    for call in (agent.register_memory, lambda d: agent.prep_xfer_dlist("agent", d.trim())):
        with pytest.raises(nixl_bind.nixlNotSupportedError, match=f"got {kind}"):
            call(descs)
    with pytest.raises(nixl_bind.nixlNotFoundError, match="got 'OBJ'"):
        agent.create_backend("OBJ", {"bucket": "x"})


def test_backends(memory):
    agent = nixl_agent("bare", nixl_agent_config(backends=[]))
    assert agent.get_plugin_list() == ["UCX", "POSIX", "GDS", "GDS_MT"]
    assert agent.get_plugin_mem_types("UCX") == ["DRAM_SEG", "VRAM_SEG"]
    assert agent.get_plugin_params("UCX") == {} == agent.get_backend_params("UCX")
    assert agent.get_backend_mem_types("UCX") == []
    with pytest.raises(nixl_bind.nixlNotFoundError, match="a backend that takes DRAM_SEG"):
        agent.register_memory(reg_list(memory), "DRAM")
    agent.create_backend("UCX", {"num_threads": "8"})
    assert agent.get_backend_mem_types("UCX") == ["DRAM_SEG", "VRAM_SEG"]
    with pytest.raises(Invalid, match="must be created once"):
        agent.create_backend("UCX")
    with pytest.raises(nixl_bind.nixlNotFoundError, match="must be created ones"):
        agent.register_memory(reg_list(memory), "DRAM", backends=["POSIX"])
    agent.register_memory(reg_list(memory), "DRAM", backends=["UCX"])
    every = nixl_agent("every", instantiate_all=True)
    assert [*every.backends] == every.plugin_list
    assert [*nixl_agent("odd", nixl_agent_config(backends=["MAGIC"])).backends] == []


def test_configuration():
    with pytest.raises(TypeError, match="sync_mode"):
        nixl_agent_config(sync_mode=1)
    config = nixl_agent_config(True, True, 1234, True, 8, ["UCX"])
    assert (config.enable_pthread, config.enable_listen, config.port) == (True, True, 1234)
    for name in ("", 5, "x" * 2000):
        with pytest.raises(Invalid, match="agent_name must be"):
            nixl_agent(name)


def test_what_sglang_builds_of_the_bindings(memory):
    config = nixl_agent_config(backends=[])
    agent = nixl_agent("hicache", config)
    made = nixl_bind.nixlAgentConfig()
    made.useProgThread = config.enable_pthread
    made.syncMode = nixl_bind.NIXL_THREAD_SYNC_RW
    made.captureTelemetry = True
    agent.agent = nixl_bind.nixlAgent("hicache", made)
    agent.plugin_list = agent.agent.getAvailPlugins()
    agent.create_backend("POSIX")
    agent.register_memory(reg_list(memory), "DRAM")
    assert agent.agent.captures_telemetry


def test_lists_of_descriptors(agent, memory):
    address = memory.ctypes.data
    tuples = [(address + i * BLOCK, BLOCK, 0) for i in range(4)]
    descs = agent.get_xfer_descs(tuples, "DRAM")
    assert agent.get_xfer_descs(descs) is descs
    assert descs.getType() == nixl_bind.DRAM_SEG and descs.descCount() == 4
    assert not descs.isEmpty() and descs[2] == tuples[2] and descs.index(tuples[3]) == 3
    assert descs == agent.get_xfer_descs(np.array(tuples, np.int64), "cpu")
    assert descs != agent.get_xfer_descs(tuples, "VRAM") and descs != 5
    descs.append((1, 2, 3))
    descs.addDesc((4, 5, 6))
    descs[0] = (7, 8, 9)
    descs.remDesc(1)
    assert [descs[i] for i in range(len(descs))] == [(7, 8, 9), *tuples[2:], (1, 2, 3), (4, 5, 6)]
    with pytest.raises(nixl_bind.nixlNotFoundError):
        descs.index((0, 0, 1))
    with pytest.raises(IndexError):
        descs[99]
    descs.clear()
    assert descs.isEmpty()
    regs = agent.get_reg_descs([(1, 2, 3, "text")], "FILE")
    regs.append((4, 5, 6, b"bytes"))
    assert regs[1] == (4, 5, 6, b"bytes") and regs.trim()[0] == (1, 2, 3)
    assert agent.get_reg_descs(regs) is regs
    assert nixl_bind.nixlXferDList(nixl_bind.DRAM_SEG).isEmpty()
    assert repr(regs) == "nixlRegDList(2 of FILE_SEG)"


@pytest.mark.parametrize(
    "descs, mem_type, message",
    [
        ([(1, 2, 3)], None, "mem_type must be one of"),
        ([(1, 2, 3)], "TAPE", "mem_type must be one of .* got 'TAPE'"),
        ([(1, 2)], "DRAM", "tuples of three integers"),
        ([(1, -2, 3)], "DRAM", "tuples of three integers"),
        ([(1, "2", 3)], "DRAM", "tuples of three integers"),
        (np.zeros((2, 4), np.uint64), "DRAM", r"\[n, 3\] integers"),
        (np.zeros((2, 3)), "DRAM", r"\[n, 3\] integers, got float64"),
        (torch.zeros(4, 4).t(), None, "packed tensors"),
        ("text", "DRAM", "tensors, a list of tuples or an array"),
        ([torch.zeros(2), torch.zeros(2, device="meta")], None, "of one device"),
    ],
)
def test_wrong_descriptors(agent, descs, mem_type, message):
    with pytest.raises(Invalid, match=message):
        agent.get_xfer_descs(descs, mem_type)


def test_lists_of_the_other_sort(agent):
    with pytest.raises(Invalid, match=r"use its trim\(\)"):
        agent.get_xfer_descs(agent.get_reg_descs([(1, 2, 3, "")], "DRAM"))
    with pytest.raises(Invalid, match="for registration"):
        agent.register_memory(agent.get_xfer_descs([(1, 2, 3)], "DRAM"))
    with pytest.raises(Invalid, match="address, bytes, device, text"):
        agent.register_memory([(1, 2, 3)], "DRAM")


def test_strided_runs_need_a_kind(agent):
    with pytest.raises(ValueError, match="mem_type must be given"):
        agent.prep_xfer_dlist("", np.zeros((1, 5), np.uint64))
    with pytest.raises(Invalid, match=r"2\*\*32"):
        agent.prep_xfer_dlist("", np.array([[0, 1, 0, 1, 1 << 40]], np.uint64), "DRAM")
    with pytest.raises(Invalid, match="integers, got float64"):
        agent.prep_xfer_dlist("", np.zeros((1, 5)), "DRAM")


small = st.integers(0, 50)


@given(runs=st.lists(st.tuples(small, small, small, small, st.integers(0, 6)), max_size=6))
def test_strided_runs_against_a_loop(runs):
    expected = [
        (address + i * stride, num_bytes, device)
        for address, num_bytes, device, stride, count in runs
        for i in range(count)
    ]
    rows = expand_strided(np.array(runs, np.uint64).reshape(-1, 5))
    assert [tuple(row) for row in rows.tolist()] == expected


ranges = st.lists(st.tuples(small, st.integers(1, 20), st.just(0)), max_size=8)


@given(held=ranges, asked=ranges)
def test_ranges_against_a_loop(held, asked):
    def is_inside(begin: int, num_bytes: int) -> bool:
        covered = {byte for at, size, _ in held for byte in range(at, at + size)}
        return all(byte in covered for byte in range(begin, begin + num_bytes))

    outside = [i for i, row in enumerate(asked) if not is_inside(*row[:2])]
    ranges = Ranges(np.array(held, np.uint64).reshape(-1, 3))
    found = ranges.first_outside(np.array(asked, np.uint64).reshape(-1, 3))
    assert found == (outside[0] if outside else None)
