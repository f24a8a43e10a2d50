"""Registered GPU memory: dma-bufs, nvidia_peermem, and the error where neither works."""

import contextlib
import errno
import gc
import os

import pytest

from mooncake_kernels import InvalidArgument, Unavailable, rdma

from .gpu import MIB, NOT_SUPPORTED, PCIE, SYNC_MEMOPS

PAGE = 4096
NAMES = ("fake0", "fake1", "fake2", "fake3")


def num_fds() -> int:
    gc.collect()  # what an earlier test has left goes now, and not between two counts
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def opened():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(rdma.open(name)) for name in NAMES]


def test_one_dmabuf_for_all_nics(world, gpu):
    memory = gpu.allocate(4 * MIB).part(5, 3 * MIB + 7)
    with opened() as devices:
        before = num_fds()
        regions = rdma.register(devices, memory, "remote_read_write")
        assert num_fds() == before  # the NICs hold the memory, not the file
        assert all(r.mapping == "dmabuf" and r.note == "" for r in regions)
        assert all(r.location == "cuda:0" and r.address == memory.address for r in regions)
    assert gpu.get("num_exports") == gpu.get("num_exports_tried") == 1
    calls = world.log("ibv_reg_dmabuf_mr")
    assert len(calls) == 4
    for call in calls:  # the file holds whole pages, of which the region begins within the first
        assert (call["offset"], call["length"], call["iova"]) == (
            *(5, memory.num_bytes, memory.address),
        )
    assert gpu.get("num_sync_memops") == 1


def test_written_data_is_in_gpu_memory(world, gpu, connection):
    memory = gpu.allocate(MIB).part(100, 60000)
    with connection.far.device.register(memory, "remote_read_write") as there:
        near = connection.near
        token = near.pair.write(
            near.region, there.remote, [(near.region.address, there.address + 9, 5000)]
        )
        near.queue.wait(token)
        assert bytes(memory.bytes[9:5009]) == bytes(near.memory[:5000])


@pytest.mark.parametrize("is_virtual", [False, True])
def test_adjacent_mappings_are_exported_as_one_dmabuf(world, gpu, device, is_virtual):
    memory = gpu.allocate(MIB, MIB, 2 * MIB, is_virtual=is_virtual)
    with device.register(memory) as region:
        assert len(region.pieces) == 1 and region.note == ""
    assert gpu.get("num_exports") == 1
    assert gpu.get("context_flags") == (SYNC_MEMOPS if is_virtual else 0)


def test_mappings_are_exported_separately_if_refused_as_one(world, gpu, connection):
    """Where the driver refuses to export all of them at once."""
    gpu.set(refuse_whole=1)
    memory = gpu.allocate(MIB, 2 * MIB, MIB, is_virtual=True).part(77, 4 * MIB - 5)
    with connection.far.device.register(memory, "remote_read_write") as there:
        base = memory.address - 77
        assert [(at - base, size) for at, size, _, _ in there.pieces] == [
            *((77, MIB - 77), (MIB, 2 * MIB), (3 * MIB, MIB - 5)),
        ]
        assert gpu.get("num_exports") == 3
        assert [call["offset"] for call in world.log("ibv_reg_dmabuf_mr")] == [77, 0, 0]
        near = connection.near
        rows = [(near.region.address, base + MIB - 100, 40000)]
        near.queue.wait(near.pair.write(near.region, there.remote, rows))
        written = memory.bytes[MIB - 100 - 77 :][:40000]
        assert bytes(written) == bytes(near.memory[:40000])


def test_pieces_of_a_dmabuf(world, gpu):
    world.set_device(max_mr_size=3 * PAGE)
    memory = gpu.allocate(MIB).part(PAGE + 50, 8 * PAGE)
    with rdma.open("fake0") as device, device.register(memory) as region:
        sizes = [size for _, size, _, _ in region.pieces]
        assert sizes == [3 * PAGE - 50, 3 * PAGE, PAGE]
    calls = world.log("ibv_reg_dmabuf_mr")
    assert [call["offset"] for call in calls] == [50, 3 * PAGE, 6 * PAGE]
    assert all(call["iova"] - call["offset"] == memory.address - 50 for call in calls)
    assert gpu.get("num_exports") == 1


@pytest.mark.parametrize("refused", [False, True])
def test_a_coherent_gpu_is_exported_over_pcie_first(gpu, device, refused):
    gpu.set(host_page_tables=1, refuse_flags=int(refused))
    with device.register(gpu.allocate(MIB)) as region:
        assert region.mapping == "dmabuf" and region.note == ""
    assert gpu.get("num_exports_tried") == (2 if refused else 1)
    assert gpu.get("last_flags") == (0 if refused else PCIE)


def test_non_coherent_gpu_is_exported_without_flags(gpu, device):
    gpu.set(refuse_all=NOT_SUPPORTED)
    with pytest.raises(Unavailable):
        device.register(gpu.allocate(MIB))
    assert gpu.get("num_exports_tried") == 1 and gpu.get("last_flags") == 0


def test_peermem_is_used_without_dmabuf_support(world, gpu, device):
    gpu.set(dmabuf_supported=0)
    world.set_option("peermem", 1)
    memory = gpu.allocate(MIB)
    with device.register(memory) as region:
        assert region.mapping == "peermem"
        assert region.note.startswith("not by dma-buf: cuda:0 does not export dma-bufs (the open")
    assert gpu.get("num_exports_tried") == 0


def test_each_nic_falls_back_independently(world, gpu):
    """A NIC whose driver cannot import a dma-buf, beside others that can."""
    world.set_option("peermem", 1)
    world.fail("ibv_reg_dmabuf_mr", errno.EOPNOTSUPP, device="fake2")
    with opened() as devices:
        regions = rdma.register(devices, gpu.allocate(MIB))
        assert [r.mapping for r in regions] == ["dmabuf", "dmabuf", "peermem", "dmabuf"]
        assert "ibv_reg_dmabuf_mr: fake2: Operation not supported" in regions[2].note


def test_error_gives_both_reasons_when_neither_works(world, gpu):
    gpu.set(refuse_all=NOT_SUPPORTED)
    with opened() as devices:
        with pytest.raises(Unavailable) as caught:
            rdma.register(devices, gpu.allocate(MIB))
        assert str(caught.value) == (
            "register: 1048576 bytes of cuda:0 cannot be registered on fake0. By dma-buf: "
            "cuMemGetHandleForAddressRange: CUDA_ERROR_NOT_SUPPORTED. By nvidia_peermem: "
            "Bad address (is nvidia_peermem loaded?)"
        )
        assert "region" not in world.live()


def test_unexportable_mapping_fails_without_leaking_descriptors(world, gpu, device):
    gpu.set(refuse_whole=1, refuse_all=NOT_SUPPORTED)
    before = num_fds()
    with pytest.raises(Unavailable, match="CUDA_ERROR_NOT_SUPPORTED. By nvidia_peermem: Bad addr"):
        device.register(gpu.allocate(MIB, MIB))
    assert num_fds() == before


def test_a_named_mapping_never_falls_back(world, gpu, device):
    memory = gpu.allocate(MIB)
    with pytest.raises(Unavailable, match="By dma-buf: not tried. By nvidia_peermem: Bad address"):
        device.register(memory, mapping="peermem")
    world.set_option("peermem", 1)
    gpu.set(dmabuf_supported=0)
    with pytest.raises(Unavailable, match="does not export.*By nvidia_peermem: not tried"):
        device.register(memory, mapping="dmabuf")
    with device.register(memory, mapping="peermem") as region:
        assert region.mapping == "peermem"
    assert gpu.get("num_exports_tried") == 0


@pytest.mark.parametrize("sizes", [(MIB, -MIB), (MIB, MIB, -MIB)])
def test_mixed_memory_is_rejected(gpu, device, sizes):
    where = sum(size for size in sizes if size > 0)
    message = f"must be memory of one GPU, got cuda:0 up to byte {where} of"
    with pytest.raises(InvalidArgument, match=message):
        device.register(gpu.allocate(*sizes))


def test_memory_starting_on_the_host_fails_to_pin(gpu, device):
    """The driver tells nothing of where host memory ends: the kernel finds out."""
    memory = gpu.allocate(-MIB, MIB)
    with pytest.raises(OSError, match="cannot be pinned"):
        device.register(memory.bytes)


def test_failed_sync_memops_is_noted(world, gpu, device):
    gpu.set(set_flags_fails=NOT_SUPPORTED)
    with device.register(gpu.allocate(MIB, is_virtual=True)) as region:
        assert region.mapping == "dmabuf"
        assert region.note == "cuPointerSetAttribute(SYNC_MEMOPS): CUDA_ERROR_NOT_SUPPORTED"
    gpu.set(dmabuf_supported=0)
    world.set_option("peermem", 1)
    with device.register(gpu.allocate(MIB, is_virtual=True)) as region:
        assert "CUDA_ERROR_NOT_SUPPORTED; not by dma-buf: cuda:0 does not" in region.note


def test_context_flags_are_preserved(gpu, device):
    gpu.set(context_flags=8)
    with device.register(gpu.allocate(MIB, is_virtual=True)):
        assert gpu.get("context_flags") == 8 | SYNC_MEMOPS


def test_failed_piece_deregisters_earlier_ones(world, gpu, device):
    world.fail("ibv_reg_dmabuf_mr", errno.ENOMEM, skip=2)
    with pytest.raises(Unavailable, match="ibv_reg_dmabuf_mr: fake0: Cannot allocate memory"):
        device.register(gpu.allocate(MIB), max_piece_bytes=MIB // 4)
    assert "region" not in world.live() and world.calls("ibv_dereg_mr") == 2


def test_host_memory_with_a_gpu_present(gpu, device):
    with device.register(bytearray(100)) as region:
        assert region.mapping == "host" and region.location == "cpu:0"
    assert gpu.get("num_sync_memops") == 0
