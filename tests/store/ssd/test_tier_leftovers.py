"""Older data behind the newest record is never taken for a record."""

import numpy as np
import pytest

from mooncake_kernels.errors import FailureKind, TransferError, Unavailable
from mooncake_serving.store.ssd import layout
from mooncake_serving.store.ssd.log import Appender, Log

from ..support import FULL, STORED
from .support import BUCKET, LARGE, PAGE, keys_of, open_tier, put, read
from .test_tier_crash import Recorder, power_loss


def killed(path, tier) -> None:
    """End a tier that writes no footer."""
    image = path.read_bytes()
    tier.close()
    path.write_bytes(image)


@pytest.fixture
def failing(monkeypatch):
    """Let a call write all that it has to, and fail then, as by a deadline."""
    real = Appender.flush

    def flush(appender):
        real(appender)
        raise TransferError("file", "the deadline passed", kind=FailureKind.TIMED_OUT)

    def fail(call):
        with monkeypatch.context() as patch:
            patch.setattr(Appender, "flush", flush)
            return call()

    return fail


def test_bucket_restarted_after_its_head_was_lost(path):
    """By damage: what was written behind that head has the same place, and the same number."""
    tier = open_tier(path)
    old, new = np.zeros(100, np.uint8), np.ones(100, np.uint8)
    put(tier, (1, 0), (2, 0))
    assert tier.put_each([(9, 0)], [old]) == [STORED]
    killed(path, tier)
    with open(path, "r+b") as file:
        file.seek(layout.FIRST_BUCKET)
        file.write(bytes(PAGE))
    tier = open_tier(path)
    assert keys_of(tier) == set()
    assert tier.put_each([(9, 0)], [new]) == [STORED]
    killed(path, tier)
    with open_tier(path) as tier:
        found = np.zeros(100, np.uint8)
        assert tier.get_into_each([(9, 0)], [found]).tolist() == [100]
        assert found.all() and keys_of(tier) == {(9, 0)}


def test_leftovers_of_a_failed_put_can_be_removed(path, failing):
    """After a death it would be found, and removed is removed."""
    tier = open_tier(path, retry_s=0)
    put(tier, (1, 0))
    assert failing(lambda: put(tier, (2, 0), (3, 0))) == [FULL, FULL]
    assert not failing(lambda: tier.remove((9, 0)))  # there is nothing to write
    with pytest.raises(Unavailable, match="remove: .* could not be written"):
        failing(lambda: tier.remove((3, 0)))
    assert not tier.remove((3, 0)) and keys_of(tier) == {(1, 0)}
    written = tier.stats().written_bytes
    assert not tier.remove((3, 0)) and tier.stats().written_bytes == written
    killed(path, tier)
    with open_tier(path) as tier:
        assert read(tier, (1, 0)) == keys_of(tier) == {(1, 0)}


def test_leftovers_of_a_failed_put_stay_stale_after_damage(path, failing):
    """A record that is damaged still says that what lies behind it is older."""
    tier = open_tier(path, retry_s=0)
    put(tier, (1, 0))
    assert failing(lambda: put(tier, (2, 0), (3, 0))) == [FULL, FULL]
    assert put(tier, (4, 0)) == [STORED]
    record = tier._index.find((4, 0)).record
    killed(path, tier)
    with open(path, "r+b") as file:
        file.seek(record.offset + PAGE)
        file.write(b"damage")
    with open_tier(path) as tier:
        assert read(tier, (1, 0)) == keys_of(tier) == {(1, 0)}


def test_objects_behind_a_resurrected_footer(path, monkeypatch):
    """The write that takes it away is lost with the power, and what was appended is not."""
    with open_tier(path) as tier:
        put(tier, (1, 0))
    image, recorder = bytearray(path.read_bytes()), Recorder(monkeypatch)
    with open_tier(path) as tier:
        put(tier, (2, 0), (3, 0))
        events = list(recorder.events)
    footer = layout.FIRST_BUCKET + BUCKET - PAGE
    path.write_bytes(power_loss(image, events, lambda place: place != footer))
    tier = open_tier(path)
    before = keys_of(tier)
    put(tier, (4, 0))
    killed(path, tier)
    with open_tier(path) as tier:
        assert read(tier, *keys_of(tier)) == before | {(4, 0)}


@pytest.fixture
def footer_fails(monkeypatch):
    """Let the next footer be written, and its write fail then."""
    real = Log._write

    def fail(error):
        def write(log, offset, data):
            real(log, offset, data)
            if data[-PAGE:][: len(layout.FOOTER_MAGIC)].tobytes() == layout.FOOTER_MAGIC:
                monkeypatch.setattr(Log, "_write", real)
                raise error

        monkeypatch.setattr(Log, "_write", write)

    return fail


@pytest.mark.parametrize("error", [TransferError("file", "timed out"), KeyboardInterrupt()])
def test_failed_footer_write_does_not_hide_later_objects(path, footer_fails, error):
    """It may be there: it must not hide what is stored, nor what is removed, afterwards."""
    tier = open_tier(path, retry_s=0)
    put(tier, (1, 0), (2, 0), (7, 0))
    footer_fails(error)
    try:
        assert put(tier, (0, LARGE)) == [FULL]
    except KeyboardInterrupt:
        assert isinstance(error, KeyboardInterrupt)
    assert put(tier, (3, 0)) == [STORED] and tier.remove((1, 0))
    tier.sync()
    assert tier.stats().num_buckets_begun == 1
    killed(path, tier)
    with open_tier(path) as tier:
        assert read(tier, (2, 0), (3, 0), (7, 0)) == keys_of(tier) == {(2, 0), (3, 0), (7, 0)}


def test_failed_footer_write_is_retried(path, footer_fails, monkeypatch):
    tier = open_tier(path, retry_s=0)
    put(tier, (1, 0), (2, 0), (7, 0))
    footer_fails(TransferError("file", "timed out"))
    assert put(tier, (0, LARGE)) == [FULL]
    recorder = Recorder(monkeypatch)
    assert put(tier, (0, LARGE)) == [STORED]
    footer = layout.FIRST_BUCKET + BUCKET - layout.footer_bytes(3)
    assert footer in [event[0] for event in recorder.events if event]
    tier.close()


def test_footer_is_rewritten_when_its_removal_fails(path, monkeypatch):
    """It may be gone, or not."""
    with open_tier(path) as tier:
        put(tier, (1, 0))
    tier, real = open_tier(path, retry_s=0), Log._write

    def fail(log, offset, data):
        real(log, offset, data)
        raise TransferError("file", "timed out")

    with monkeypatch.context() as patch:
        patch.setattr(Log, "_write", fail)
        assert put(tier, (2, 0)) == [FULL]
    tier.close()
    page = path.read_bytes()[layout.FIRST_BUCKET + BUCKET - PAGE :][:PAGE]
    assert page.startswith(layout.FOOTER_MAGIC)
    with open_tier(path) as tier:
        assert read(tier, (1, 0)) == keys_of(tier) == {(1, 0)}


def without_footer(path) -> None:
    """Damage that of the first bucket, so that a start looks at its records."""
    with open(path, "r+b") as file:
        file.seek(layout.FIRST_BUCKET + BUCKET - PAGE)
        file.write(bytes(PAGE))


@pytest.mark.parametrize("later", [(4, 0), (0, LARGE)], ids=["same bucket", "an older bucket"])
@pytest.mark.parametrize("is_closed", [False, True], ids=["in one life", "after a restart"])
def test_leftovers_of_a_failed_put_are_not_recovered(path, failing, is_closed, later):
    tier = open_tier(path, retry_s=0)
    put(tier, (1, 0))
    assert failing(lambda: put(tier, (2, 0), (3, 0))) == [FULL, FULL]
    if is_closed:
        tier.close()
        tier = open_tier(path)
    assert put(tier, later) == [STORED] and not tier.remove((2, 0))
    if later[1] == LARGE:
        tier.close()
        without_footer(path)
    else:
        killed(path, tier)
    with open_tier(path) as tier:
        assert tier.stats().num_buckets_begun == 1 + (later[1] == LARGE)
        assert read(tier, (1, 0), later) == keys_of(tier) == {(1, 0), later}


def test_leftovers_of_a_failed_removal_in_an_older_bucket(path, failing):
    tier = open_tier(path, retry_s=0)
    put(tier, (1, 0))
    with pytest.raises(Unavailable):
        failing(lambda: tier.remove((1, 0)))
    assert put(tier, (0, LARGE)) == [STORED]
    tier.close()
    without_footer(path)
    with open_tier(path) as tier:
        assert read(tier, (1, 0), (0, LARGE)) == keys_of(tier) == {(1, 0), (0, LARGE)}


def test_leftovers_of_a_failed_put_in_a_freed_bucket(path, failing, monkeypatch):
    """Its footer is gone, and its head is not yet overwritten."""
    tier = open_tier(path, 3, retry_s=0)
    put(tier, (1, 0))
    assert failing(lambda: put(tier, (2, 0), (3, 0))) == [FULL, FULL]
    assert put(tier, (0, LARGE)) == [STORED] and not tier.remove((2, 0))
    images, real = [], Log._write

    def write(log, offset, data):
        if offset == layout.FIRST_BUCKET:
            images.append(path.read_bytes())
        real(log, offset, data)

    monkeypatch.setattr(Log, "_write", write)
    for i in range(1, 4):
        put(tier, (i, LARGE))
    tier.close()
    path.write_bytes(images[0])  # it has died
    with open_tier(path, 3) as tier:
        assert not {(2, 0), (3, 0)} & keys_of(tier)
