"""A disk that cannot be written: nothing is stored, nothing is lost, and the tier says so."""

import errno
import logging
import os
import shutil
import subprocess
import sys

import pytest

from mooncake_kernels.errors import FailureKind, TransferError, Unavailable
from mooncake_serving.store.ssd.disk import Disk
from mooncake_serving.store.ssd.log import Log

from ...transfer.files import environment
from ..support import EXISTS, FULL, STORED
from .support import BUCKET, keys_of, no_writes_from, open_tier, put, read

KEYS = [(i, 0) for i in range(5)]


def test_failed_writes_succeed_later(path, caplog):
    with open_tier(path, retry_s=0) as tier, caplog.at_level(logging.WARNING):
        put(tier, *KEYS)
        tier.sync()
        with no_writes_from(0):
            assert put(tier, (9, 0), KEYS[0], (9, 0)) == [FULL, EXISTS, FULL]
            assert read(tier, *KEYS, (9, 0)) == set(KEYS)
            with pytest.raises(Unavailable, match="remove: .* could not be written"):
                tier.remove(KEYS[1])
            with pytest.raises(Unavailable, match="remove_all: .* could not be written"):
                tier.remove_all()
            assert keys_of(tier) == set(KEYS)
            stats = tier.stats()
            assert stats.num_write_errors == 3 and os.strerror(errno.EFBIG) in stats.error
        assert "nothing is written for 0 s" in caplog.text
        assert put(tier, (9, 0)) == [STORED] and tier.remove(KEYS[1])
        assert tier.stats().error == "" and tier.stats().is_writable
        assert "can be written again" in caplog.text
        there = keys_of(tier)
        assert there == {*KEYS, (9, 0)} - {KEYS[1]}
    with open_tier(path) as tier:
        assert read(tier, *there) == keys_of(tier) == there


def test_writes_pause_after_an_error(path):
    with open_tier(path, retry_s=1000) as tier:
        put(tier, *KEYS)
        with no_writes_from(0):
            assert put(tier, (9, 0)) == [FULL]
        assert not tier.stats().is_writable
        assert put(tier, (9, 0)) == [FULL] and tier.stats().num_write_errors == 1
        assert read(tier, *KEYS) == set(KEYS)


@pytest.mark.parametrize("place", range(0, 4 * BUCKET, 5 * 4096))
def test_unwritable_part_of_the_disk_is_survived(path, place):
    """Wherever a lap is stopped: what is there is right, and it goes on when it can."""
    with open_tier(path, 4, retry_s=0) as tier:
        stored = set()
        with no_writes_from((1 << 20) + place):
            for i in range(40):
                there, begun = keys_of(tier), tier.stats().num_buckets_begun
                if put(tier, (i, 0)) == [STORED]:
                    stored.add((i, 0))
                elif tier.stats().num_buckets_begun == begun:
                    assert keys_of(tier) == there  # nothing is dropped, however often it is tried
            assert tier.stats().num_write_errors > 0
            there = keys_of(tier)
            assert there <= stored and read(tier, *there) == there
        assert put(tier, *((i, 1) for i in range(40))) == [STORED] * 40
    with open_tier(path, 4) as tier:
        there = keys_of(tier)
        assert read(tier, *there, verify=False) == there and len(there) >= 5


def test_failed_sync_is_reported(path, monkeypatch):
    """By a stand-in for the system call's error: no disk of a test refuses fdatasync."""
    with open_tier(path, retry_s=0) as tier:
        put(tier, *KEYS)

        def fail(own):
            raise TransferError(own.path, "syncing: Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(Disk, "sync", fail)
            with pytest.raises(Unavailable, match="could not be synced: .* Input/output error"):
                tier.sync()
            assert tier.stats().error == "syncing: Input/output error"
            results = [put(tier, (i, 1))[0] for i in range(60)]  # until a bucket is full
            assert STORED in results and FULL in results
            assert read(tier, *KEYS) == set(KEYS)
        assert put(tier, (100, 0)) == [STORED] and tier.stats().error == ""


def test_failed_remove_all_loses_nothing_put_later(path, monkeypatch):
    """Whether its sync fails, by a stand-in as above, or its write, before or after it is done."""

    def fail(own, *_):
        raise TransferError(own.path, "syncing: Input/output error")

    def write_and_fail(log, tier_id):
        real_write_head(log, tier_id)
        log._is_head_known = False
        raise TransferError(str(path), "timed out", kind=FailureKind.TIMED_OUT)

    real_write_head = Log._write_head
    for i, (kind, name, failing, removed) in enumerate(
        [(Disk, "sync", fail, True), (Log, "_write_head", write_and_fail, False)]
    ):
        with open_tier(path, retry_s=0) as tier:
            put(tier, *KEYS)
            with monkeypatch.context() as patch:
                patch.setattr(kind, name, failing)
                with pytest.raises(Unavailable, match="remove_all: .* could not be written"):
                    tier.remove_all()
            assert keys_of(tier) == (set() if removed else {(0, 1), *KEYS})
            assert put(tier, (i, 1)) == [STORED]
            there = keys_of(tier)
        with open_tier(path) as tier:
            assert read(tier, *there) == keys_of(tier) == there


def test_close_succeeds_when_writes_fail(path):
    tier = open_tier(path)
    put(tier, *KEYS)
    with no_writes_from(0):
        tier.close()  # without a footer
    with open_tier(path) as tier:
        assert read(tier, *KEYS) == set(KEYS)


ON_SMALL_DISK = """
import ctypes, os, sys
from pathlib import Path
import pytest
from mooncake_kernels.pool import PutResult
from tests.store.ssd.support import BUCKET, keys_of, open_tier, put, read

folder = Path(sys.argv[1])
with pytest.raises(OSError, match="No space left on device"):
    open_tier(folder / "large", 400)
assert not os.listdir(folder)  # nor what could be had of it

keys = [(i, 0) for i in range(6)]
with open_tier(folder / "tier", 8, retry_s=0) as tier:
    put(tier, *keys)
    KEEP_SIZE, PUNCH_HOLE = 1, 2
    libc = ctypes.CDLL(None, use_errno=True)
    with open(folder / "tier", "r+b") as file:  # a file system that has taken the space back
        hole = [ctypes.c_int64((1 << 20) + 2 * BUCKET), ctypes.c_int64(6 * BUCKET)]
        assert libc.fallocate(file.fileno(), KEEP_SIZE | PUNCH_HOLE, *hole) == 0
    other = os.open(folder / "other", os.O_CREAT | os.O_RDWR)
    room = os.statvfs(folder)
    os.posix_fallocate(other, 0, room.f_bavail * room.f_bsize)
    results = [put(tier, (i, 1))[0] for i in range(20)]
    assert PutResult.FULL in results, results
    assert "No space left on device" in tier.stats().error
    there = keys_of(tier)
    assert there == {*keys, *((i, 1) for i, r in enumerate(results) if r is PutResult.STORED)}
    assert read(tier, *there) == there
    os.ftruncate(other, 0)
    assert put(tier, (100, 0)) == [PutResult.STORED] and tier.stats().error == ""
with open_tier(folder / "tier", 8) as tier:
    assert read(tier, *there, (100, 0)) == {*there, (100, 0)}
print("survived")
"""


def test_full_disk_is_survived(tmp_path):
    if not shutil.which("unshare"):
        pytest.skip("there is no unshare")
    alone = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else [])]
    mount = 'mount -t tmpfs -o size=4m none "$0" && exec "$@"'
    command = [*alone, "sh", "-c", mount, str(tmp_path)]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"tmpfs cannot be mounted: {tried.stderr.strip()}")
    result = subprocess.run(
        [*command, sys.executable, "-c", ON_SMALL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
    )
    assert (result.returncode, result.stdout) == (0, "survived\n"), result.stderr
