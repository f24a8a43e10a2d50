"""Torn or damaged records are found, dropped and reported; the rest is served."""

import logging
import os

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import PutResult
from mooncake_serving.store.ssd import layout

from .support import LARGE_BUCKET as BUCKET
from .support import LARGE_KEYS as KEYS
from .support import PAGE, keys_of, put, read
from .support import make_large as make
from .support import open_large as opened

FIELDS = {  # of the header of a record: where, how many bytes
    "magic": (0, 8),
    "version": (8, 4),
    "kind": (12, 4),
    "tier": (16, 16),
    "epoch": (32, 8),
    "run": (40, 8),
    "offset": (48, 8),
    "hash": (56, 8),
    "scope": (64, 8),
    "num_bytes": (72, 8),
    "data checksum": (80, 8),
    "position": (88, 8),
    "header checksum": (96, 8),
    "rest of the page": (104, PAGE - 104),
}


def zero(image, start, num_bytes):
    num_bytes = min(num_bytes, len(image) - start)
    image[start : start + num_bytes] = bytes(num_bytes)


def flip(image, start, num_bytes):
    for i in {start, start + num_bytes - 1}:
        image[i] ^= 0x10


def damage(path, how, start, num_bytes) -> None:
    image = bytearray(path.read_bytes())
    how(image, start, num_bytes)
    path.write_bytes(image)


def test_record_field_offsets(path):
    record = make(path, sealed=False)[KEYS[2]]
    page = path.read_bytes()[record.offset :][:PAGE]
    words = {name: page[at : at + size] for name, (at, size) in FIELDS.items()}
    expected = {"offset": record.offset, "hash": 4, "num_bytes": record.num_bytes, "kind": 1}
    expected |= {"data checksum": record.checksum, "run": 1, "version": 3, "scope": 0}
    for name, number in expected.items():
        assert int.from_bytes(words[name], "little") == number, name
    assert words["magic"] == layout.RECORD_MAGIC
    assert words["tier"] == path.read_bytes()[16:32]
    assert words["epoch"] == path.read_bytes()[layout.FIRST_BUCKET + 40 :][:8]


@pytest.mark.parametrize("how", [zero, flip])
@pytest.mark.parametrize("field", FIELDS)
def test_torn_header_loses_only_its_object(path, field, how):
    """Nothing but that object is lost: the next header is looked for page by page."""
    record = make(path, sealed=False)[KEYS[2]]
    at, size = FIELDS[field]
    before = path.read_bytes()
    damage(path, how, record.offset + at, size)
    lost = {KEYS[2]} if path.read_bytes() != before else set()  # zeros may be zeroed
    with opened(path) as tier:
        assert keys_of(tier) == read(tier, *KEYS, verify=False) == set(KEYS) - lost
        assert put(tier, KEYS[2])[0] is (PutResult.STORED if lost else PutResult.EXISTS)
        assert read(tier, *KEYS) == set(KEYS)


@pytest.mark.parametrize("how", [zero, flip])
@pytest.mark.parametrize("place", [0, PAGE, -1])
def test_torn_data_loses_only_its_object(path, how, place):
    record = make(path, sealed=False)[KEYS[-1]]
    assert record.num_bytes > 2 * PAGE
    damage(path, how, record.offset + PAGE + place % record.num_bytes, 1)
    with opened(path) as tier:
        assert keys_of(tier) == read(tier, *KEYS, verify=False) == set(KEYS[:-1])


@pytest.mark.parametrize("kept", [0, 1, PAGE, 2 * PAGE, 20_000 + PAGE - 1])
def test_truncated_write_loses_only_its_object(path, kept):
    """What follows on the disk is older: zeros, as in a new file."""
    record = make(path, sealed=False)[KEYS[-1]]
    damage(path, zero, record.offset + kept, 2 * BUCKET)
    with opened(path) as tier:
        assert read(tier, *KEYS, verify=False) == set(KEYS[:-1])
        assert put(tier, KEYS[-1]) == [PutResult.STORED]
    with opened(path) as tier:
        assert read(tier, *KEYS) == set(KEYS)


def test_truncated_file_keeps_complete_objects(path):
    record = make(path, sealed=False)[KEYS[-1]]
    with open(path, "r+b") as file:
        file.truncate(record.offset + 2 * PAGE)
    with opened(path) as tier:
        assert read(tier, *KEYS) == set(KEYS[:-1])


@pytest.mark.parametrize("bit", [0, 13])
def test_flipped_bits_in_data_are_reported_and_zeroed(path, bit, caplog):
    record = make(path, sealed=True)[KEYS[-1]]
    damage(path, lambda image, i, _: image.__setitem__(i, image[i] ^ 1 << bit % 8), *_place(record))
    with opened(path) as tier, caplog.at_level(logging.WARNING):
        assert keys_of(tier) == set(KEYS)
        buffer = np.ones(record.num_bytes, np.uint8)
        assert tier.get_into_each(KEYS[-1:], [buffer]).tolist() == [-4]
        assert not buffer.any() and tier.stats().num_damaged == 1
        assert "object 0x7, 0x0 is damaged: dropped" in caplog.text
        assert read(tier, *KEYS) == set(KEYS[:-1])
        assert put(tier, KEYS[-1]) == [PutResult.STORED] and read(tier, *KEYS) == set(KEYS)
    with opened(path) as tier:
        assert read(tier, *KEYS) == set(KEYS)  # of one key the latest


def test_damaged_object_is_not_moved(path):
    record = make(path, sealed=True)[KEYS[1]]
    damage(path, flip, record.offset + PAGE, 1 + 1)
    with opened(path) as tier:
        entry = tier._index.find(KEYS[1])
        entry.is_used = True
        for i in range(100, 160):
            put(tier, (i, 0))
        assert tier.stats().num_damaged == 1 and not tier.contains_each(KEYS[1:2])[0]


def test_unreadable_object_does_not_fail_its_batch(path):
    """The others of the same call are served."""
    record = make(path, sealed=True)[KEYS[3]]
    with opened(path) as tier:
        os.truncate(path, record.offset + PAGE)
        buffers = [np.zeros(20_000, np.uint8) for _ in KEYS]
        sizes = tier.get_into_each(KEYS, buffers, verify=False)
        assert (sizes >= 0).tolist() == [True] * 3 + [False] * 3
        assert sizes[3:].tolist() == [-4] * 3 and keys_of(tier) == set(KEYS[:3])
        assert tier.stats().num_damaged == 3


@pytest.mark.parametrize("how", [zero, flip])
@pytest.mark.parametrize("part", ["last page", "entries"])
def test_records_are_scanned_without_a_footer(path, how, part):
    make(path, sealed=True)
    back = PAGE if part == "last page" else layout.footer_bytes(len(KEYS))
    damage(path, how, layout.FIRST_BUCKET + BUCKET - back + 40, 8)
    with opened(path) as tier:
        assert read(tier, *KEYS, verify=False) == set(KEYS)


@pytest.mark.parametrize("how", [zero, flip])
def test_footer_is_used_without_a_bucket_head(path, how):
    make(path, sealed=True)
    damage(path, how, layout.FIRST_BUCKET, 32)
    with opened(path) as tier:
        assert read(tier, *KEYS) == set(KEYS)


@pytest.mark.parametrize("how", [zero, flip])
def test_bucket_without_its_head_is_not_appended_to(path, how):
    """For its footer is all that leads to what it holds."""
    make(path, sealed=True)
    damage(path, how, layout.FIRST_BUCKET, 32)
    with opened(path) as tier:
        assert put(tier, (1, 1)) == [PutResult.STORED]
        image = path.read_bytes()
    path.write_bytes(image)  # it has died
    with opened(path) as tier:
        assert read(tier, *KEYS, (1, 1)) == {*KEYS, (1, 1)}


def test_a_damaged_head_is_reported(path):
    make(path, sealed=True)
    damage(path, flip, 16, 16)
    with pytest.raises(InvalidArgument, match="path must be a tier, got .*, whose head is damaged"):
        opened(path)


def _place(record) -> tuple[int, int]:
    return record.offset + PAGE + record.num_bytes // 2, 1
