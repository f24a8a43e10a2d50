"""Files by GPUDirect Storage, over a fake libcufile."""

import errno
import os
import threading

import numpy as np
import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from ...fake_cuda.gpus import GPUS, IS_FAKE
from ...fake_cufile.library import IO_NOT_SUPPORTED, NVIDIA_FS, P2PDMA
from ..support import UNTOUCHED, WAIT_S, addressed, untouched

MIB = 1 << 20
PAGE = 4096


pytestmark = pytest.mark.skipif(not IS_FAKE, reason="the driver is a real one")


@pytest.fixture
def found(library, gpus):
    if not library.is_found:
        pytest.skip("torch has loaded NVIDIA's libcufile")
    return library


@pytest.fixture(params=[NVIDIA_FS, P2PDMA], ids=["nvidia-fs", "p2pdma"])
def cufile(request, found):
    found.set(request.param)
    yield found
    found.set(0)
    assert found.num_handles() == 0


def file_of(tmp_path, num_bytes: int):
    path = tmp_path / "pool"
    path.write_bytes(bytes(num_bytes))
    return path


def on_gpu(num_bytes: int, device: int = 0):
    memory = GPUS.allocate(num_bytes, device)
    memory.put(addressed(num_bytes))
    return memory


@pytest.mark.parametrize("at", [0, PAGE, PAGE + 3])
@pytest.mark.parametrize("size", [PAGE, 9 * MIB + 77])
@pytest.mark.parametrize("offset", [0, 7])
def test_write_and_read_back_at_any_offset(cufile, tmp_path, at, size, offset):
    """Wherever it is in the file and in memory; pages past the host, ends of pages through it."""
    path = file_of(tmp_path, size + 3 * PAGE)
    near = on_gpu(size + 16, 1)
    with TransferEngine() as engine, engine.open(f"file:{path}") as peer:
        engine.register(near.buffer)
        row = [(near.address + offset, at, size)]
        engine.write(peer, row).wait(WAIT_S)
        whole = addressed(size + 16)[offset : offset + size]
        assert np.array_equal(np.fromfile(path, np.uint8)[at : at + size], whole)
        near.put(untouched(size + 16))
        engine.read(peer, row).wait(WAIT_S)
        assert np.array_equal(near.get()[offset : offset + size], whole)
        assert (near.get()[:offset] == UNTOUCHED).all()
        assert (near.get()[offset + size :] == UNTOUCHED).all()
        if size > PAGE or at % PAGE == 0:
            assert cufile.num_writes() > 0 and cufile.num_reads() > 0


def test_blocks_of_two_gpus_and_of_the_host(cufile, tmp_path):
    """What follows each other in the file goes together only if it is on one GPU."""
    path = file_of(tmp_path, 48 * PAGE)
    memories = [on_gpu(16 * PAGE, 0), on_gpu(16 * PAGE, 1)]
    host = addressed(16 * PAGE)
    order = np.random.default_rng(0).permutation(48)
    rows, expected = [], np.empty((48, PAGE), np.uint8)
    with TransferEngine() as engine, engine.open(f"file:{path}") as peer:
        places = [memory.address for memory in memories] + [engine.register(host).address]
        for memory in memories:
            engine.register(memory.buffer)
        for i, block in enumerate(order.tolist()):
            kind, inside = i % 3, i // 3
            rows.append((places[kind] + inside * PAGE, block * PAGE, PAGE))
            expected[block] = addressed(16 * PAGE)[inside * PAGE :][:PAGE]
        engine.write(peer, rows).wait(WAIT_S)
        peer.sync().wait(WAIT_S)
        assert np.array_equal(np.fromfile(path, np.uint8).reshape(48, PAGE), expected)
        for memory in memories:
            memory.put(untouched(16 * PAGE))
        host[:] = UNTOUCHED
        engine.read(peer, rows).wait(WAIT_S)
        for memory in memories:
            assert np.array_equal(memory.get(), addressed(16 * PAGE))
        assert np.array_equal(host, addressed(16 * PAGE))
        assert cufile.num_writes() > 0 and cufile.num_reads() > 0


def test_short_cufile_calls_are_continued(cufile, tmp_path):
    path = file_of(tmp_path, MIB)
    near = on_gpu(MIB)
    cufile.set(NVIDIA_FS, most_bytes=8 * PAGE)
    with TransferEngine() as engine, engine.open(f"file:{path}") as peer:
        engine.register(near.buffer)
        engine.write(peer, [(near.address, 0, MIB)]).wait(WAIT_S)
        assert np.array_equal(np.fromfile(path, np.uint8), addressed(MIB))
        near.put(untouched(MIB))
        engine.read(peer, [(near.address, 0, MIB)]).wait(WAIT_S)
        assert np.array_equal(near.get(), addressed(MIB))
        assert cufile.num_reads() == MIB // (8 * PAGE)


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("result", [IO_NOT_SUPPORTED, -errno.EINVAL])
def test_cufile_refusal_falls_back_to_host_staging(cufile, tmp_path, result, after):
    """From the call on that it refuses: nothing is lost, and nothing asked again."""
    path = file_of(tmp_path, 8 * MIB)
    near = on_gpu(8 * MIB)
    with TransferEngine() as engine, engine.open(f"file:{path}") as peer:
        engine.register(near.buffer)
        cufile.fail(result, after=after)
        for verb in (engine.write, engine.read):
            verb(peer, [(near.address, 0, 8 * MIB)]).wait(WAIT_S)
        assert np.array_equal(np.fromfile(path, np.uint8), addressed(8 * MIB))
        assert np.array_equal(near.get(), addressed(8 * MIB))
        calls = cufile.num_writes() + cufile.num_reads()
        engine.read(peer, [(near.address, 0, 8 * MIB)]).wait(WAIT_S)
        assert cufile.num_writes() + cufile.num_reads() == calls


def test_disk_error_fails_the_request(cufile, tmp_path):
    path = file_of(tmp_path, 4 * MIB)
    near = on_gpu(4 * MIB)
    with TransferEngine() as engine, engine.open(f"file:{path}") as peer:
        engine.register(near.buffer)
        cufile.fail(-errno.EIO, after=1, count=1)
        with pytest.raises(TransferError, match="reading at offset .*: Input/output error"):
            engine.read(peer, [(near.address, 0, 4 * MIB)]).wait(WAIT_S)
        engine.read(peer, [(near.address, 0, 4 * MIB)]).wait(WAIT_S)
        assert (near.get() == 0).all()


def test_unavailable_gds_is_explained(found, tmp_path):
    path = file_of(tmp_path, MIB)
    near, host = on_gpu(MIB), untouched(PAGE)
    ways = []
    for way, fails in ((0, False), (NVIDIA_FS, True), (NVIDIA_FS, False)):
        found.set(way)
        if fails:
            found.fail(IO_NOT_SUPPORTED, after=-1)
        with TransferEngine() as engine, engine.open(f"file:{path}") as peer:
            region = engine.register(near.buffer)
            engine.write(peer, [(near.address, 0, MIB)]).wait(WAIT_S)
            assert np.array_equal(np.fromfile(path, np.uint8), addressed(MIB))
            ways.append(engine.explain_path(region, peer, 0, PAGE))
            in_host = engine.explain_path(engine.register(host), peer, 0, PAGE)
            assert (in_host.method, in_host.writable) == ("disk", True)
    found.set(0)
    assert [way.method for way in ways] == ["staged", "staged", "disk"]
    assert "neither nvidia-fs nor P2PDMA" in str(ways[0])
    assert "cuFileHandleRegister: error 5008" in str(ways[1])
    assert "GPUDirect Storage" in str(ways[2])


def test_tmpfs_falls_back_without_o_direct(cufile):
    with open("/dev/shm/mk-test-gpu-file", "wb") as file:
        file.write(bytes(MIB))
    try:
        near = on_gpu(MIB)
        with TransferEngine() as engine, engine.open(f"file:{file.name}") as peer:
            region = engine.register(near.buffer)
            engine.write(peer, [(near.address, 0, MIB)]).wait(WAIT_S)
            assert np.array_equal(np.fromfile(file.name, np.uint8), addressed(MIB))
            explained = str(engine.explain_path(region, peer, 0, PAGE))
            assert cufile.num_writes() > 0 or "no O_DIRECT" in explained
    finally:
        os.unlink(file.name)


def test_many_threads_and_cancelled_requests(cufile, tmp_path):
    """Each has its part of the file; what is cancelled touches nothing afterwards."""
    path = file_of(tmp_path, 16 * MIB)
    with TransferEngine() as engine, engine.open(f"file:{path}") as peer:
        memories = [on_gpu(4 * MIB, i % 2) for i in range(4)]
        for memory in memories:
            engine.register(memory.buffer)

        def work(i: int) -> None:
            row = [(memories[i].address, 4 * i * MIB, 4 * MIB)]
            for _ in range(5):
                engine.write(peer, row).wait(WAIT_S)
                engine.read(peer, row).cancel()
                engine.read(peer, row).wait(WAIT_S)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        for i, memory in enumerate(memories):
            part = np.fromfile(path, np.uint8)[4 * i * MIB : 4 * (i + 1) * MIB]
            assert np.array_equal(part, addressed(4 * MIB))
            assert np.array_equal(memory.get(), addressed(4 * MIB))
