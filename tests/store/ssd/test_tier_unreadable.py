"""A page that the disk cannot read, at a start that must look at every page.

Everything else is found, and nothing is written where something may be. The system call's error is
simulated: no disk of a test has bad pages.
"""

import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.pool import PutResult
from mooncake_serving.store.ssd import layout, recovery
from mooncake_serving.store.ssd.disk import Disk

from .support import LARGE_BUCKET as BUCKET
from .support import LARGE_KEYS as KEYS
from .support import PAGE, keys_of, put, read
from .support import make_large as make
from .support import open_large as opened


class Failed:
    """A ticket of a read that met a bad page."""

    def __init__(self, ticket, path):
        self._ticket, self._path = ticket, path

    def wait(self):
        self._ticket.wait()
        raise TransferError(self._path, "reading: Input/output error")

    def cancel(self):
        return self._ticket.cancel()


@pytest.fixture
def bad(monkeypatch) -> set[int]:
    """Places of pages that cannot be read from now on."""
    places, real = set(), Disk.read

    def read_or_fail(own, moves):
        ticket = real(own, moves)
        is_bad = any(at <= place < at + size for _, at, size in moves for place in places)
        return Failed(ticket, own.path) if is_bad else ticket

    monkeypatch.setattr(Disk, "read", read_or_fail)
    return places


@pytest.mark.parametrize("window_bytes", [4 * PAGE, recovery.WINDOW_BYTES])
@pytest.mark.parametrize("page", range(1, BUCKET // PAGE))
def test_any_unreadable_page_of_a_bucket(path, bad, monkeypatch, page, window_bytes):
    monkeypatch.setattr(recovery, "WINDOW_BYTES", window_bytes)
    where, place = make(path), layout.FIRST_BUCKET + page * PAGE
    bad.add(place)
    lost = {key for key, record in where.items() if record.offset <= place < record.end}
    with opened(path) as tier:
        assert read(tier, *KEYS, verify=False) == keys_of(tier) == set(KEYS) - lost
        assert put(tier, *((i, 1) for i in range(8))) == [PutResult.STORED] * 8
        there = keys_of(tier)
    bad.clear()  # as if it were the cable
    with opened(path) as tier:
        assert read(tier, *KEYS, *there) == keys_of(tier) == {*KEYS, *there}
        assert put(tier, (100, 0)) == [PutResult.STORED]


def test_many_unreadable_pages(path, bad):
    """Also as often as it is started, until the bucket is reused."""
    where = make(path)
    bad |= {where[key].offset for key in KEYS[::2]}
    for i in range(3):
        with opened(path) as tier:
            assert put(tier, (i, 1)) == [PutResult.STORED]
            there = {*KEYS[1::2], *((j, 1) for j in range(i + 1))}
            assert read(tier, *there) == keys_of(tier) == there
    with opened(path) as tier:
        begun = tier.stats().num_buckets_begun
        for i in range(100, 200):
            assert put(tier, (i, 0)) == [PutResult.STORED]
        assert tier.stats().num_buckets_begun > begun + 4


@pytest.mark.parametrize("bucket", [0, 1, 3], ids=["an older one", "the newest", "a free one"])
def test_unreadable_bucket_head_without_footer_fails_open(path, bad, bucket):
    """Which of its records are the latest is unknown: nothing may be written, or served."""
    with opened(path) as tier:
        put(tier, *KEYS, *((i, 1) for i in range(8)))
        assert tier.stats().num_buckets_begun == 2
        there, image = keys_of(tier), bytearray(path.read_bytes())
    footer = layout.FIRST_BUCKET + BUCKET
    image[footer - PAGE : footer] = bytes(PAGE)  # it is damaged
    path.write_bytes(image)
    bad.add(layout.FIRST_BUCKET + bucket * BUCKET)
    with pytest.raises(TransferError, match=f"the head of bucket {bucket} cannot be read"):
        opened(path)
    assert path.read_bytes() == image
    bad.clear()
    with opened(path) as tier:  # no lock is left
        assert read(tier, *there) == keys_of(tier) == there


def test_unreadable_bucket_head_with_footer_is_not_appended_to(path, bad):
    """It is as good, as long as it is there: nothing is appended."""
    with opened(path) as tier:
        put(tier, *KEYS)
    bad.add(layout.FIRST_BUCKET)
    for i in range(2):
        tier = opened(path)
        assert put(tier, (i, 1)) == [PutResult.STORED]
        there, image = keys_of(tier), path.read_bytes()
        assert there == {*KEYS, *((j, 1) for j in range(i + 1))}
        tier.close()
        path.write_bytes(image)  # it has died
    for _ in range(2):
        with opened(path) as tier:
            assert read(tier, *there) == keys_of(tier) == there
        bad.clear()


def test_temporarily_unreadable_footer_entries(path, monkeypatch):
    """Its records are looked at. It must not hide what is written then once it can be read."""
    with opened(path) as tier:
        put(tier, *KEYS)
    with monkeypatch.context() as patch:
        patch.setattr(recovery, "unpack_entries", lambda *_: None)  # as if it were the cable
        tier = opened(path)
    assert read(tier, *KEYS) == keys_of(tier) == set(KEYS)
    assert put(tier, (1, 1)) == [PutResult.STORED] and tier.remove(KEYS[0])
    there, image = keys_of(tier), path.read_bytes()
    tier.close()
    path.write_bytes(image)  # it has died
    with opened(path) as tier:
        assert read(tier, *there) == keys_of(tier) == there


@pytest.mark.parametrize("when", ["at the start", "later", "when it is moved on"])
def test_unreadable_object_that_was_removed_does_not_return(path, bad, when):
    """It does not return once it can be read."""
    where, key = make(path), KEYS[3]
    place = where[key].offset + PAGE
    bad |= {place} if when == "at the start" else set()
    with opened(path) as tier:
        bad.add(place)
        if when == "later":
            assert key not in read(tier, *KEYS)
        elif when == "when it is moved on":
            tier._index.find(key).is_used = True
            with tier._log.step():
                tier._log._move_used(tier._buckets[0])
        assert not tier.contains_each([key])[0] and not tier.remove(key)
        tier.sync()
    bad.clear()
    with opened(path) as tier:
        assert read(tier, *KEYS) == keys_of(tier) == set(KEYS) - {key}


def test_unreadable_object_can_be_put_again(path, bad):
    where, key = make(path), KEYS[3]
    with opened(path) as tier:
        bad.add(where[key].offset + PAGE)
        assert key not in read(tier, *KEYS)
        assert put(tier, key) == [PutResult.STORED] and tier.remove(key)
        written = tier.stats().written_bytes
        assert not tier.remove(key) and tier.stats().written_bytes == written
