"""The transport file: everything can end at any time, and leaves nothing in flight."""

import contextlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mooncake_kernels.errors import InvalidArgument, TransferError

from .files import PAGE, Pool, environment, open_files
from .support import WAIT_S, addressed, untouched

MIB = 1 << 20


@pytest.fixture
def pool(tmp_path):
    with Pool(tmp_path / "pool", 16 * MIB) as pool:
        yield pool


def train(pool, direction, count=200, **options):
    """Requests that take long together: the file again and again, past the page cache, or not."""
    call = getattr(pool.engine, direction)
    return [call(pool.peer, pool.rows([(0, i % 2 * 5, 15 * MIB)]), **options) for i in range(count)]


def cancel(tickets) -> None:
    """Cancel all; of those that are over it has no effect. The last one is not."""
    cancelled = [ticket.cancel() for ticket in reversed(tickets)]
    assert cancelled[0]


def cause_of(ticket) -> str:
    with pytest.raises(TransferError) as caught:
        ticket.wait()
    assert caught.value.num_bytes_done < caught.value.num_bytes_total
    return caught.value.cause


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.usefixtures("one_lane")
def test_file_is_usable_after_cancellation(tmp_path, direction):
    with Pool(tmp_path / "pool", 16 * MIB) as pool:
        for i in range(4):
            pool.memory[:] = 0x55
            tickets = train(pool, direction)
            time.sleep(i * 8e-3)
            cancel(tickets)
            pool.memory[:] = 0x77
            assert cause_of(tickets[-1]) == "cancelled"
            pool.engine.write(pool.peer, pool.rows([(0, 3, 15 * MIB)])).wait()
            assert (pool.memory == 0x77).all(), "it was read into after the ticket had ended"
            assert (pool.content()[3 : 15 * MIB] == 0x77).all(), "it was written afterwards"


@pytest.mark.usefixtures("one_lane")
def test_cancel_leaves_other_requests_running(tmp_path):
    with Pool(tmp_path / "pool", 16 * MIB) as pool:
        for _ in range(4):
            long = train(pool, "read", 10)
            short = [pool.engine.write(pool.peer, pool.rows([(0, 15 * MIB, 9)])) for _ in range(9)]
            synced = pool.peer.sync()
            for ticket in long:
                ticket.cancel()
            for ticket in (*short, synced):
                ticket.wait()


def test_deadline_fails_queued_requests(pool):
    tickets = train(pool, "read", deadline_s=0.05)
    assert cause_of(tickets[-1]) == "deadline of 0.05 s passed"
    pool.engine.read(pool.peer, pool.rows([(0, 0, 16 * MIB)])).wait()
    assert (pool.memory == addressed(16 * MIB)).all()


@pytest.mark.parametrize("what", ["peer", "engine", "region"])
@pytest.mark.usefixtures("one_lane")
def test_close_fails_requests_in_flight(tmp_path, what):
    with Pool(tmp_path / "pool", 16 * MIB) as pool:
        tickets = train(pool, "read")
        time.sleep(0.01)
        getattr(pool, what).close()
        pool.memory[:] = 0xFF
        cause = "a region in use was closed" if what == "region" else f"the {what} was closed"
        assert cause_of(tickets[-1]) == cause
        time.sleep(0.05)
        assert (pool.memory == 0xFF).all()


def test_closed_peer_releases_its_file(pool):
    mine = [link for link in open_files() if link == str(pool.path) or "io_uring" in link]
    assert str(pool.path) in mine
    pool.engine.read(pool.peer, pool.rows([(0, 0, 16 * MIB)])).wait()
    pool.peer.close()
    assert not [link for link in open_files() if link == str(pool.path) or "io_uring" in link]
    with pytest.raises(InvalidArgument, match="read: peer must be open"):
        pool.engine.read(pool.peer, pool.rows([(0, 0, 1)]))


def test_explain_path_races_with_close(pool):
    def ask(peer):
        with contextlib.suppress(InvalidArgument, TransferError):  # it is closed
            while True:
                assert pool.engine.explain_path(pool.region, peer, 0).method == "disk"

    with ThreadPoolExecutor(2) as threads:
        for _ in range(10):
            peer = pool.engine.open(f"file:{pool.path}")
            asking = [threads.submit(ask, peer) for _ in range(2)]
            peer.close()
            for each in asking:
                each.result(WAIT_S)


def test_a_file_without_a_name_is_still_the_same(pool):
    os.unlink(pool.path)
    pool.engine.write(pool.peer, pool.rows([(0, 0, MIB)])).wait()
    cancel(train(pool, "read"))
    pool.path.write_bytes(bytes(16 * MIB))  # another one, of that name
    pool.memory[:] = 0
    pool.engine.read(pool.peer, pool.rows([(0, 0, MIB)])).wait()
    assert (pool.memory[:MIB] == 0xEE).all()


def test_many_transfers_leak_no_descriptors(pool):
    row = pool.rows([(1, 1, PAGE)])
    pool.engine.read(pool.peer, pool.rows([(0, 0, 16 * MIB)])).wait()  # all lanes are there
    before = len(open_files())
    for _ in range(100):
        tickets = [pool.engine.read(pool.peer, row) for _ in range(100)]
        assert pool.peer.sync().wait() is None
        for ticket in tickets:
            ticket.wait()
    assert len(open_files()) <= before + 2  # other tests' may come and go
    for _ in range(100):
        with pool.engine.open(f"file:{pool.path}") as peer:
            pool.engine.write(peer, row).wait()
    del peer
    assert len(open_files()) <= before + 2


def test_closing_a_region_fails_queued_requests(pool):
    other = pool.engine.register(untouched(MIB))
    running = train(pool, "read")
    queued = [pool.engine.write(pool.peer, [(other.address, 0, MIB)]) for _ in range(200)]
    other.close()
    for ticket in running:
        ticket.cancel()
    assert cause_of(queued[-1]) == "a region in use was closed"


def test_forked_children_leave_the_file_alone(pool):
    row = pool.rows([(0, 0, 16 * MIB)])
    pool.engine.write(pool.peer, row).wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            pool.peer.sync()
        except InvalidArgument as error:
            code = 0 if "in the process that made it" in str(error) else 2
        pool.engine.close()
        os._exit(code)
    for _ in range(5):
        pool.engine.read(pool.peer, row).wait()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (pool.memory == 0xEE).all()


def test_without_io_uring():
    """These tests again, and that lent bytes arrive, where the kernel says no to it, as a
    container's may.
    """
    if os.environ.get("MK_TEST_WITHOUT_IO_URING"):
        pytest.skip("this is without it")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-x",
        "-k",
        "not forked and not locked_memory",
    ]
    names = ("file", "file_errors", "file_lifecycle", "lent")
    paths = [Path(__file__).with_name(f"test_transfer_{name}.py") for name in names]
    result = subprocess.run(
        [sys.executable, "-m", "tests.transfer.files", *command, "--import-mode=append", *paths],
        cwd="/",
        env=environment(MK_TEST_WITHOUT_IO_URING="1"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
