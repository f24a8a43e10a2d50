"""Older data behind the newest record is never taken for a record."""

import numpy as np
import pytest

from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.pool import PutResult
from mooncake_serving.store.ssd import layout
from mooncake_serving.store.ssd.appending import Appender

from .support import BUCKET, PAGE, keys_of, open_tier, put, read
from .test_tier_crash import Recorder, power_loss

STORED, FULL = PutResult.STORED, PutResult.FULL


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tier"


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
        raise TransferError("file", "the deadline passed", timed_out=True)

    def fail(call):
        with monkeypatch.context() as patch:
            patch.setattr(Appender, "flush", flush)
            return call()

    return fail


def test_a_bucket_that_is_begun_again_after_its_head_was_lost(path):
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


@pytest.mark.parametrize("is_closed", [False, True], ids=["in one life", "after a restart"])
def test_what_a_put_that_failed_has_left_behind(path, failing, is_closed):
    tier = open_tier(path, retry_s=0)
    put(tier, (1, 0))
    assert failing(lambda: put(tier, (2, 0), (3, 0))) == [FULL, FULL]
    if is_closed:
        tier.close()
        tier = open_tier(path)
    assert put(tier, (4, 0)) == [STORED]
    killed(path, tier)
    with open_tier(path) as tier:
        assert read(tier, (1, 0), (4, 0)) == keys_of(tier) == {(1, 0), (4, 0)}


def test_what_a_put_that_failed_has_left_behind_is_removed(path, failing):
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


def test_what_a_put_that_failed_has_left_behind_is_not_moved_behind_by_damage(path, failing):
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


def test_what_was_written_behind_a_footer_that_came_back(path, monkeypatch):
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
