"""Files: by descriptor and by path, many at once, errors."""

import errno
import gc
import os
import threading

import numpy as np
import pytest

from mooncake_serving.compat.nixl import _bindings as nixl_bind
from mooncake_serving.compat.nixl import files, nixl_agent_config

from ..support import SIZE, UNTOUCHED, WAIT_S, addressed, in_threads
from .support import BLOCK, near_agent, rows_at, settle


@pytest.fixture
def near():
    with near_agent("near", addressed(SIZE), backends=["UCX", "POSIX"]) as near:
        yield near


def descriptors(path, flags=os.O_RDWR | os.O_CREAT):
    return os.open(path, flags, 0o644)


def prepared(near, operation, memory_rows, file_rows):
    agent = near.agent
    return agent.initialize_xfer(
        operation,
        agent.get_xfer_descs(memory_rows, "DRAM"),
        agent.get_xfer_descs(file_rows, "FILE"),
        near.name,
    )


def many(near, tmp_path, count):
    """A write of a block to each of that many files."""
    tuples = [(0, BLOCK, 3000 + i, f"rw,create:{tmp_path}/{i}") for i in range(count)]
    reg = near.agent.register_memory(tuples, "FILE")
    return prepared(near, "WRITE", near.blocks()[:count], reg.trim())


def bounded(call, *arguments):
    """The call must return."""
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "it hangs"


class Held:
    """A replacement of ``File.grow`` that waits until it is let go."""

    def __init__(self, monkeypatch):
        self.num_begun = 0
        self.go_on = threading.Event()
        monkeypatch.setattr(files.File, "grow", self)

    def __call__(self, num_bytes):
        self.num_begun += 1
        assert self.go_on.wait(WAIT_S)


def move(near, operation, memory_rows, file_rows):
    agent = near.agent
    handle = agent.initialize_xfer(
        operation,
        agent.get_xfer_descs(memory_rows, "DRAM"),
        agent.get_xfer_descs(file_rows, "FILE"),
        near.name,
    )
    agent.transfer(handle)
    assert settle(agent, handle) == "DONE"
    assert agent.query_xfer_backend(handle) == "POSIX"
    told = agent.get_xfer_telemetry(handle)
    assert told.totalBytes == int(np.asarray(memory_rows, np.uint64)[:, 1].sum())
    agent.release_xfer_handle(handle)


def test_write_and_read_back_by_descriptor(near, tmp_path):
    fd = descriptors(tmp_path / "pool")
    near.agent.register_memory([(0, SIZE, fd, "")], "FILE")
    order = np.random.default_rng(0).permutation(SIZE // BLOCK)
    rows = near.blocks()
    places = rows_at(0)
    places[:, 2] = fd
    move(near, "WRITE", rows, places[order])
    expected = np.empty_like(near.memory).reshape(-1, BLOCK)
    expected[order] = addressed(SIZE).reshape(-1, BLOCK)
    np.testing.assert_array_equal(np.fromfile(tmp_path / "pool", np.uint8), expected.reshape(-1))
    near.memory[:] = UNTOUCHED
    move(near, "READ", rows, places[order])
    np.testing.assert_array_equal(near.memory, addressed(SIZE))
    os.close(fd)


def test_by_path_and_prepared(near, tmp_path):
    """One file a block, as SGLang's and LMCache's stores have it."""
    agent = near.agent
    count = 40
    tuples = [(0, BLOCK, 1000 + i, f"rw,create:{tmp_path}/{i}") for i in range(count)]
    reg = agent.register_memory(tuples, "FILE")
    local = agent.prep_xfer_dlist("", near.blocks(), "DRAM")
    remote = agent.prep_xfer_dlist("near", reg.trim())
    for operation in ("WRITE", "READ"):
        handle = agent.make_prepped_xfer(operation, local, range(count), remote, range(count))
        agent.transfer(handle)
        assert settle(agent, handle) == "DONE"
        near.memory[:] = UNTOUCHED
        if operation == "WRITE":
            files = [np.fromfile(tmp_path / str(i), np.uint8) for i in range(count)]
            np.testing.assert_array_equal(np.concatenate(files), addressed(SIZE)[: count * BLOCK])
    agent.deregister_memory(reg)
    with pytest.raises(nixl_bind.nixlNotFoundError, match="registered file, got 1000"):
        agent.prep_xfer_dlist("near", reg.trim())


def test_a_descriptor_that_is_closed_and_used_again(near, tmp_path):
    """What was registered is what is written, whatever the number stands for by then."""
    fd = descriptors(tmp_path / "mine")
    near.agent.register_memory([(0, BLOCK, fd, "")], "FILE")
    os.close(fd)
    other = descriptors(tmp_path / "other")
    assert other == fd
    move(near, "WRITE", [(near.address, BLOCK, 0)], [(0, BLOCK, fd)])
    np.testing.assert_array_equal(np.fromfile(tmp_path / "mine", np.uint8), addressed(SIZE)[:BLOCK])
    assert os.fstat(other).st_size == 0
    os.close(other)


def test_registered_twice(near, tmp_path):
    fd = descriptors(tmp_path / "pool")
    first = near.agent.register_memory([(0, BLOCK, fd, ""), (BLOCK, BLOCK, fd, "")], "FILE")
    near.agent.register_memory([(0, BLOCK, fd, "")], "FILE")
    near.agent.deregister_memory(first)
    move(near, "WRITE", [(near.address, BLOCK, 0)], [(0, BLOCK, fd)])
    near.agent.deregister_memory(near.agent.get_reg_descs([(0, BLOCK, fd, "")], "FILE"))
    with pytest.raises(nixl_bind.nixlNotFoundError, match="the file"):
        near.agent.deregister_memory(first)
    os.close(fd)


def test_query(near, tmp_path):
    (tmp_path / "there").write_bytes(b"12345")
    tuples = [(0, 0, 0, str(tmp_path / "there")), (0, 0, 0, str(tmp_path / "missing"))]
    there, missing = near.agent.query_memory(tuples, "POSIX", "FILE")
    assert there["size"] == "5" and int(there["mode"]) & 0o400 and int(there["mtime"]) > 0
    assert missing is None
    with pytest.raises(ValueError, match="backend must be one of"):
        near.agent.query_memory(tuples, "GDS", "FILE")
    with pytest.raises(nixl_bind.nixlNotSupportedError, match="must be files"):
        near.agent.query_memory(tuples, "UCX", "FILE")


def test_the_probe_of_sglang(near):
    descs = near.agent.get_reg_descs([(0, 4096, 1, "rw:/nonexistent-nixl-probe")], "FILE")
    with pytest.raises(nixl_bind.nixlBackendError, match="nonexistent-nixl-probe"):
        near.agent.register_memory(descs)


def test_what_is_refused(near, tmp_path):
    agent = near.agent
    with pytest.raises(nixl_bind.nixlBackendError, match="descriptor of an open file"):
        agent.register_memory([(0, 1, 987_654, "")], "FILE")
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="flags of a path"):
        agent.register_memory([(0, 1, 1, f"rw,fast:{tmp_path}/x")], "FILE")
    agent.register_memory([(0, 1, 1001, f"rw,create:{tmp_path}/x")], "FILE")
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="one that no registered file has"):
        agent.register_memory([(0, 1, 1001, f"rw,create:{tmp_path}/y")], "FILE")
    rows = agent.get_xfer_descs([(0, BLOCK, 1001)], "FILE")
    for name in ("", "far"):
        with pytest.raises(nixl_bind.nixlInvalidParamError, match="a remote side of this agent"):
            agent.prep_xfer_dlist(name, rows)
    remote = agent.prep_xfer_dlist("near", rows)
    local = agent.prep_xfer_dlist("", near.blocks(), "DRAM")
    with pytest.raises(nixl_bind.nixlInvalidParamError):
        agent.make_prepped_xfer("READ", remote, [0], local, [0])
    handle = agent.make_prepped_xfer("WRITE", local, [0], remote, [0], b"notice")
    with pytest.raises(nixl_bind.nixlBackendError, match="notif_msg must be empty for files"):
        agent.transfer(handle)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_failures_are_raised_once(near, tmp_path, flags):
    """Beyond the end of a file; and writes to one that may only be read."""
    (tmp_path / "short").write_bytes(b"12345")
    fd = descriptors(tmp_path / "short", flags)
    agent = near.agent
    agent.register_memory([(0, BLOCK, fd, "")], "FILE")
    operation = "WRITE" if flags == os.O_RDONLY else "READ"
    handle = agent.initialize_xfer(
        operation,
        agent.get_xfer_descs(near.blocks()[:1], "DRAM"),
        agent.get_xfer_descs([(0, BLOCK, fd)], "FILE"),
        "near",
    )
    with pytest.raises(nixl_bind.nixlBackendError):
        agent.transfer(handle)
        settle(agent, handle)
    assert agent.check_xfer_state(handle) == "ERR"
    assert (tmp_path / "short").read_bytes() == b"12345"
    agent.release_xfer_handle(handle)
    os.close(fd)


def test_release_while_it_runs(near, tmp_path):
    agent = near.agent
    tuples = [(0, BLOCK, 2000 + i, f"rw,create:{tmp_path}/{i}") for i in range(200)]
    reg = agent.register_memory(tuples, "FILE")
    local = agent.prep_xfer_dlist("", near.blocks(), "DRAM")
    remote = agent.prep_xfer_dlist("near", reg.trim())
    handle = agent.make_prepped_xfer("WRITE", local, range(200), remote, range(200))
    agent.transfer(handle)
    agent.release_xfer_handle(handle)
    sizes = {path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes <= {0, BLOCK}
    agent.deregister_memory(reg)


@pytest.mark.parametrize("error", [MemoryError(), OverflowError("too large"), KeyError("x")])
def test_an_unforeseen_error_ends_the_transfer(near, tmp_path, monkeypatch, error):
    def grow(file, num_bytes):
        raise error

    monkeypatch.setattr(files.File, "grow", grow)
    handle = many(near, tmp_path, 3)
    with pytest.raises(nixl_bind.nixlBackendError, match=str(error) or "MemoryError"):
        near.agent.transfer(handle)
        settle(near.agent, handle)
    assert near.agent.check_xfer_state(handle) == "ERR"
    bounded(near.agent.release_xfer_handle, handle)


@pytest.mark.parametrize("offset", [(1 << 63) - BLOCK, 1 << 63, (1 << 64) - BLOCK, (1 << 64) - 1])
def test_offsets_that_no_file_has(near, tmp_path, offset):
    near.agent.register_memory([(0, BLOCK, 1, f"rw,create:{tmp_path}/x")], "FILE")
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="descriptor 1 must end below 2"):
        prepared(near, "WRITE", near.blocks()[:2], [(0, BLOCK, 1), (offset, BLOCK, 1)])


def test_closed_with_files_that_have_not_begun(near, tmp_path, monkeypatch):
    held = Held(monkeypatch)
    handle = many(near, tmp_path, 20)
    assert near.agent.transfer(handle) == "PROC"
    late = prepared(near, "WRITE", near.blocks()[:1], [(0, BLOCK, 3000)])
    near.close()
    held.go_on.set()
    with pytest.raises(nixl_bind.nixlCancelledError, match="the agent was closed"):
        settle(near.agent, handle)
    with pytest.raises(nixl_bind.nixlCancelledError, match="the agent was closed"):
        near.agent.transfer(late)
    assert near.agent.check_xfer_state(late) == "ERR"
    bounded(near.agent.release_xfer_handle, late)
    bounded(near.agent.release_xfer_handle, handle)


def test_release_while_others_keep_the_threads(near, tmp_path, monkeypatch):
    held = Held(monkeypatch)
    handle = many(near, tmp_path, 20)
    near.agent.transfer(handle)
    second = prepared(near, "WRITE", near.blocks()[:1], [(0, BLOCK, 3000)])
    near.agent.transfer(second)
    bounded(near.agent.release_xfer_handle, second)  # no thread has begun it
    held.go_on.set()
    bounded(near.agent.release_xfer_handle, handle)
    assert held.num_begun < 20


def test_a_handle_that_a_working_thread_collects(near, tmp_path, monkeypatch):
    """It is in a cycle, and found by the thread that its cancellation waits for."""
    is_dropped = threading.Event()

    def collecting(file, num_bytes):
        assert is_dropped.wait(WAIT_S)
        gc.collect()

    monkeypatch.setattr(files.File, "grow", collecting)
    handle = many(near, tmp_path, 1)
    job = handle.job
    cycle = [handle]
    cycle.append(cycle)
    near.agent.transfer(handle)
    handle = cycle = None
    is_dropped.set()
    bounded(job.cancel)
    assert job.state() == "ERR"


def test_a_number_that_is_another_file_by_now(near, tmp_path):
    """Registered again, the number is of the new file; what was prepared before is refused."""
    agent = near.agent
    fd = descriptors(tmp_path / "old")
    old = agent.register_memory([(0, BLOCK, fd, "")], "FILE")
    local = agent.prep_xfer_dlist("", near.blocks(), "DRAM")
    remote = agent.prep_xfer_dlist("near", old.trim())
    begun = agent.make_prepped_xfer("WRITE", local, [1], remote, [0])
    os.close(fd)
    with pytest.raises(nixl_bind.nixlBackendError, match="descriptor of an open file"):
        agent.register_memory([(0, BLOCK, fd, "")], "FILE")
    other = descriptors(tmp_path / "new")
    assert other == fd
    agent.register_memory([(0, BLOCK, fd, "")], "FILE")
    move(near, "WRITE", near.blocks()[:1], [(0, BLOCK, fd)])
    with pytest.raises(nixl_bind.nixlNotFoundError, match="registered for another file since"):
        agent.make_prepped_xfer("WRITE", local, [0], remote, [0])
    assert os.stat(tmp_path / "old").st_size == 0
    agent.transfer(begun)
    assert settle(agent, begun) == "DONE"
    blocks = addressed(SIZE).reshape(-1, BLOCK)
    np.testing.assert_array_equal(np.fromfile(tmp_path / "new", np.uint8), blocks[0])
    np.testing.assert_array_equal(np.fromfile(tmp_path / "old", np.uint8), blocks[1])
    os.close(other)


@pytest.mark.parametrize("is_without", [False, True])
def test_growing_never_makes_a_file_shorter(near, tmp_path, monkeypatch, is_without):
    """Another process makes it longer between the look at its size and the change of it."""
    fd = descriptors(tmp_path / "shared")
    near.agent.register_memory([(0, BLOCK, fd, "")], "FILE")
    allocate = os.posix_fallocate

    def late(descriptor, offset, num_bytes):
        os.pwrite(fd, b"other", SIZE)
        if is_without:  # as on file systems that have no such call
            raise OSError(errno.EOPNOTSUPP, "not supported")
        allocate(descriptor, offset, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", late)
    move(near, "WRITE", near.blocks()[:1], [(0, BLOCK, fd)])
    assert os.pread(fd, 10, SIZE) == b"other"
    assert os.pread(fd, BLOCK, 0) == addressed(SIZE)[:BLOCK].tobytes()
    os.close(fd)


def test_two_agents_make_one_file_longer(tmp_path):
    """Each writes every second block, and finds what the other has appended meanwhile."""
    source = addressed(SIZE)
    with (
        near_agent("a", source.copy(), backends=["UCX", "POSIX"]) as first,
        near_agent("b", source.copy(), backends=["UCX", "POSIX"]) as second,
    ):
        for near in (first, second):
            near.agent.register_memory([(0, 0, 1, f"rw,create:{tmp_path}/shared")], "FILE")

        def write(index):
            near = (first, second)[index]
            for block in range(index, 60, 2):
                move(near, "WRITE", near.blocks()[[block]], [(block * BLOCK, BLOCK, 1)])

        in_threads(2, write)
    np.testing.assert_array_equal(np.fromfile(tmp_path / "shared", np.uint8), source[: 60 * BLOCK])


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
@pytest.mark.parametrize("is_path", [False, True])
def test_what_a_file_was_opened_for(near, tmp_path, operation, is_path):
    (tmp_path / "x").write_bytes(bytes(2 * BLOCK))
    (tmp_path / "y").write_bytes(bytes(2 * BLOCK))
    access = {"READ": "wo", "WRITE": "ro"}[operation]
    flags = {"wo": os.O_WRONLY, "ro": os.O_RDONLY}[access]
    fd = descriptors(tmp_path / "x", flags)
    device, text = (7, f"{access}:{tmp_path}/x") if is_path else (fd, "")
    near.agent.register_memory([(0, 0, device, text), (0, 0, 8, f"rw:{tmp_path}/y")], "FILE")
    near.memory[:] = UNTOUCHED
    rows = near.blocks()[:2]
    handle = prepared(near, operation, rows, [(0, BLOCK, 8), (0, BLOCK, device)])
    with pytest.raises(nixl_bind.nixlBackendError, match=f"must be opened for .*, got {access}: "):
        near.agent.transfer(handle)
    assert near.agent.check_xfer_state(handle) == "ERR"
    assert (near.memory == UNTOUCHED).all()
    assert {(tmp_path / name).read_bytes() for name in "xy"} == {bytes(2 * BLOCK)}
    move(near, {"READ": "WRITE", "WRITE": "READ"}[operation], rows[:1], [(0, BLOCK, device)])
    os.close(fd)


def test_paths_that_are_no_text(near, tmp_path):
    name = os.fsdecode(b"\xff-pool")
    near.agent.register_memory([(0, BLOCK, 5, f"rw,create:{tmp_path}/{name}")], "FILE")
    assert (tmp_path / name).exists()
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="a text that can be encoded"):
        near.agent.get_reg_descs([(0, BLOCK, 6, "rw:/\ud800")], "FILE")


def test_only_files():
    with near_agent("plain", addressed(SIZE)) as near:
        with pytest.raises(nixl_bind.nixlNotFoundError, match="a backend that takes FILE_SEG"):
            near.agent.register_memory([(0, 1, 5, "")], "FILE")
    assert nixl_agent_config().backends == ["UCX"]
