"""The transport file: refusals, disk errors, and what was done despite them."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import TransferEngine

from .files import PAGE, Pool, environment
from .scripts import run_fork
from .support import UNTOUCHED, addressed, engine_pair, error_of

MIB = 1 << 20


@pytest.fixture
def pool(tmp_path):
    with Pool(tmp_path / "pool", 8 * MIB) as pool:
        yield pool


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize(
    "offset,size",
    [(8 * MIB, 1), (8 * MIB - 1, 2), (2**64 - 1, 1), (2**63, 4096), (2**64 - 4096, 4096)],
)
@pytest.mark.parametrize("num_before", [1, 8])  # 8: several pieces, of which the last is wrong
def test_range_outside_the_file_is_rejected(pool, direction, offset, size, num_before):
    before = [(i * MIB, i * MIB, MIB - PAGE) for i in range(num_before)]
    rows = pool.rows([*before, (MIB - PAGE, offset, size)])
    error = error_of(getattr(pool.engine, direction)(pool.peer, rows))
    assert error.cause == (
        f"descriptors[{num_before}] remote range {offset:#x} + {size} bytes is not inside the file "
        f"of {8 * MIB} bytes"
    )
    assert error.peer == pool.peer.name and error.num_bytes_done == 0
    assert (pool.memory == UNTOUCHED).all()
    assert np.array_equal(pool.content(), addressed(8 * MIB))
    pool.engine.read(pool.peer, pool.rows([(0, 0, PAGE)])).wait()


def test_invalid_file_names_are_rejected(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with TransferEngine() as engine:
        for name in ("file:", "file:pool", "file:./pool", "file:/a\0b"):
            with pytest.raises(InvalidArgument, match="open: name must have an absolute path"):
                engine.open(name)
        with pytest.raises(InvalidArgument, match="must be text that UTF-8 can hold"):
            engine.open("file:/\udc80")
        for path, cause in (
            ("none", "stat: No such file or directory"),
            ("", "it must be a regular file or a block device, got a directory"),
            ("pipe", "it must be a regular file or a block device, got something else"),
            ("pipe/below", "stat: Not a directory"),
        ):
            with pytest.raises(TransferError) as caught:
                engine.open(f"file:{tmp_path / path}")
            assert caught.value.cause == cause
            assert caught.value.peer == f"file:{tmp_path / path}"


def test_file_requires_the_file_transport(tmp_path):
    (tmp_path / "pool").write_bytes(b"1")
    with TransferEngine(transports=["local", "shm", "tcp"]) as engine:
        with pytest.raises(InvalidArgument, match="without the transport file, got .*/pool"):
            engine.open(f"file:{tmp_path}/pool")
    with TransferEngine() as far, TransferEngine(transports=["file"]) as engine:
        with pytest.raises(TransferError, match="no engine of that name in this process"):
            engine.open(far.name)
        assert engine.open(f"file:{tmp_path}/pool").transport == "file"


def test_no_one_is_notified(pool):
    for rows in ([], pool.rows([(0, 0, 1)])):
        for call in (pool.engine.write, pool.engine.read):
            with pytest.raises(InvalidArgument, match="notify must be None for a file.* 3 bytes"):
                call(pool.peer, rows, notify=b"abc")


def test_sync_requires_an_open_file(pool):
    with engine_pair("local") as pair, pytest.raises(InvalidArgument, match="must be a file, got"):
        pair.peer.sync()
    with pytest.raises(InvalidArgument, match="deadline_s must be a finite number of seconds"):
        pool.peer.sync(deadline_s=-1)
    pool.peer.close()
    with pytest.raises(InvalidArgument, match="sync: peer must be open, got the closed file:"):
        pool.peer.sync()


@pytest.mark.parametrize("num_blocks", [2, 8])  # 8: several pieces
def test_truncated_file_rejects_ranges_beyond_its_end(pool, num_blocks):
    rows = pool.rows([(i * MIB, i * MIB, MIB) for i in range(num_blocks)])
    os.truncate(pool.path, MIB + 5000)
    for call in (pool.engine.read, pool.engine.write):
        error = error_of(call(pool.peer, rows))
        assert error.cause.endswith(f"is not inside the file of {MIB + 5000} bytes")
        assert error.num_bytes_done == 0
    assert pool.path.stat().st_size == MIB + 5000


def test_file_truncated_during_read_yields_no_made_up_data(pool):
    """What is not there any more is refused, or not read; nothing is made up."""
    with ThreadPoolExecutor(1) as threads:
        for _ in range(8):
            os.truncate(pool.path, 8 * MIB)
            rows = pool.rows([(0, 0, 8 * MIB)])
            tickets = [pool.engine.read(pool.peer, rows) for _ in range(20)]
            threads.submit(os.truncate, pool.path, MIB).result()
            for ticket in tickets:
                with contextlib.suppress(TransferError):
                    ticket.wait()
                    continue
                cause = error_of(ticket).cause
                assert "the file ends there now" in cause or "is not inside the file of" in cause


PERMISSION = """
import mooncake_kernels as mk
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
with TransferEngine() as engine:
    memory = mk.shared_memory(8192).numpy()
    region = engine.register(memory)
    peer = engine.open("file:{path}")
    engine.read(peer, [(region.address, 0, 8192)]).wait()
    assert memory.tobytes() == open("{path}", "rb").read()
    try:
        engine.write(peer, [(region.address, 0, 8192)]).wait()
    except TransferError as error:
        print(error.cause, file=sys.stderr)
    peer.sync().wait()
    engine.open("file:{secret}")
"""


def test_read_only_file_cannot_be_written():
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)  # pytest's own folders are ours alone
        path, secret = Path(name) / "pool", Path(name) / "secret"
        for file, mode in ((path, 0o444), (secret, 0)):
            file.write_bytes(addressed(8192))
            file.chmod(mode)
        status, said = run_fork(PERMISSION.format(path=path, secret=secret))
        assert said.startswith("the file may only be read: Permission denied\n")
        assert status == 1 and f"transfer with file:{secret}: open: Permission denied" in said
        assert np.array_equal(np.frombuffer(path.read_bytes(), np.uint8), addressed(8192))


LIMITED = """
import resource
import mooncake_kernels as mk
MIB = 1 << 20
with open("{path}", "wb") as file:
    file.truncate(4 * MIB)
with TransferEngine() as engine:
    at = engine.register(mk.shared_memory(4 * MIB)).address
    peer = engine.open("file:{path}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    for offset, size in ((3 * MIB, 8192), (3 * MIB + 1, 100)):  # past the page cache, and not
        rows = [(at, 0, MIB), (at + 2 * MIB, offset, size)]
        try:
            engine.write(peer, rows).wait()
        except TransferError as error:
            print(error.cause, error.num_bytes_done, file=sys.stderr)
    engine.write(peer, rows[:1]).wait()
"""


def test_file_size_limit_fails_the_write(tmp_path):
    status, said = run_fork(LIMITED.format(path=tmp_path / "pool"))
    assert said.splitlines() == [
        f"writing at offset {3 * MIB}: File too large {MIB}",
        f"writing at offset {3 * MIB + 1}: File too large {MIB}",
    ]
    assert status == 0


FULL = """
import os, subprocess, sys
from pathlib import Path
folder = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], check=True)
from mooncake_kernels.errors import TransferError
from tests.transfer.files import Pool
MIB = 1 << 20
with Pool(Path(folder) / "pool", MIB) as pool:
    os.truncate(pool.path, 16 * MIB)
    peer = pool.engine.open(f"file:{pool.path}")
    rows = [(pool.region.address, i * MIB, MIB) for i in range(16)]
    try:
        pool.engine.write(peer, rows).wait()
    except TransferError as error:
        assert 0 < error.num_bytes_done <= 4 * MIB, error
        assert error.num_bytes_done == os.stat(pool.path).st_blocks * 512, error
        print(error.cause.split(": ")[1])
    pool.engine.read(peer, rows[:1]).wait()
"""


def test_full_disk_reports_bytes_written(tmp_path):
    """num_bytes_done is what the disk has: a hole before, all of that fills it."""
    if not shutil.which("unshare"):
        pytest.skip("there is no unshare")
    alone = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else [])]
    mounted = subprocess.run(
        [*alone, "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"tmpfs cannot be mounted: {mounted.stderr.strip()}")
    # One lane: what another had under way when this one failed is not known to be done.
    result = subprocess.run(
        [*alone, sys.executable, "-c", FULL, tmp_path],
        capture_output=True,
        text=True,
        env=environment(MOONCAKE_KERNELS_TRANSFER_LANES="1"),
        cwd="/",
        timeout=120,
    )
    assert (result.returncode, result.stdout) == (0, "No space left on device\n"), result.stderr
