"""SsdTier: what is put is read, also after a restart, and refusals."""

import fcntl
import os
import struct

import numpy as np
import pytest
import torch

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.pool import object_keys
from mooncake_serving.store.ssd import SsdTier, layout

from ..support import EXISTS, STORED, child, content, ended_well
from .support import BUCKET, LARGE, LARGEST, PAGE, keys_of, open_tier, put, read, value

KEYS = [(i, i % 3) for i in range(24)]


def test_keys_by_use(path):
    with open_tier(path) as tier:
        assert put(tier, *KEYS) == [STORED] * len(KEYS)
        assert read(tier, KEYS[5], KEYS[2], (100, 0)) == {KEYS[5], KEYS[2]}
        assert tier.remove(KEYS[3]) and tier.remove(KEYS[20])
        assert put(tier, KEYS[3]) == [STORED]
        last_first = [KEYS[3], *(key for key in KEYS[::-1] if key not in (KEYS[3], KEYS[20]))]
        rest = [key for key in last_first if key not in (KEYS[5], KEYS[2])]
        assert list(map(tuple, tier.keys_by_use().tolist())) == [KEYS[5], KEYS[2], *rest]
    with open_tier(path) as tier:  # nothing was read since this start
        assert list(map(tuple, tier.keys_by_use().tolist())) == last_first


def test_objects_are_read_after_a_restart(path):
    with open_tier(path) as tier:
        assert put(tier, *KEYS) == [STORED] * len(KEYS)
        assert read(tier, *KEYS) == keys_of(tier) == set(KEYS)
        before = tier.stats()
    with open_tier(path) as tier:
        assert read(tier, *KEYS) == read(tier, *KEYS, verify=False) == keys_of(tier) == set(KEYS)
        after = tier.stats()
        assert (after.num_objects, after.live_bytes) == (before.num_objects, before.live_bytes)
        assert after.live_bytes == before.user_bytes == sum(len(value(key)) for key in KEYS)
        assert put(tier, (100, 0)) == [STORED]  # behind what was there
    with open_tier(path) as tier:
        assert read(tier, *KEYS, (100, 0)) == {*KEYS, (100, 0)}


def test_watch_sees_stored_and_removed_keys(path):
    def keys(changes):
        return changes.removed.tolist(), changes.stored.tolist()

    with open_tier(path) as tier:
        put(tier, (1, 0))
        with tier.watch() as watch:
            put(tier, (2, 0))
            assert keys(watch.look()) == ([], [[1, 0], [2, 0]])
            with tier.watch() as another:
                tier.remove((1, 0))
                put(tier, (3, 0))
                tier.remove((3, 0))
                tier.remove((2, 0))
                put(tier, (2, 0))  # as before
                assert keys(watch.look()) == ([[1, 0]], [])
                assert keys(another.look()) == ([], [[2, 0]])
            tier.remove_all()
            assert keys(watch.look()) == ([[2, 0]], []) and keys(watch.look()) == ([], [])
        watch.close()


def test_objects_larger_than_a_slot_and_any_kind_of_memory(path):
    size = 3 * PAGE + 5
    kinds = [bytes, bytearray, memoryview, np.array, torch.from_numpy]
    values = [content((i, 0), size) for i in range(len(kinds))]
    keys = object_keys(np.arange(len(kinds)), "model")
    with open_tier(path, slot_bytes=PAGE) as tier:
        puts = [kind(v) for kind, v in zip(kinds, values, strict=True)]
        assert tier.put_each(keys, puts) == [STORED] * len(kinds)
        buffers = [bytearray(size), torch.zeros(size, dtype=torch.uint8), np.zeros(size + 1, "u1")]
        assert tier.get_into_each(keys[:3], buffers).tolist() == [size] * 3
        for got, expected in zip(buffers, values[:3], strict=True):
            np.testing.assert_array_equal(np.asarray(got)[:size], expected)


def test_codes(path):
    with open_tier(path) as tier:
        assert put(tier, (1, 0), (2, 0), (1, 0)) == [STORED, STORED, EXISTS]
        assert tier.put_each([(1, 0)], [b"other"]) == [EXISTS]
        sizes = tier.get_into_each([(9, 0), (2, 0), (1, 0)], [bytearray(1) for _ in range(3)])
        assert sizes.tolist() == [-1, -2, 1]
        assert tier.num_bytes_each([(2, 0), (9, 0)]).tolist() == [100, -1]
        assert tier.contains_each([(2, 0), (9, 0)]).tolist() == [True, False]
        assert tier.match_prefix([(1, 0), (2, 0), (9, 0), (1, 0)]) == 2
        assert tier.match_prefix([(1, 0)]) == 1 and tier.match_prefix([]) == 0
        assert tier.put_each([], []) == [] and len(tier.get_into_each([], [])) == 0
        assert (tier.stats().num_hits, tier.stats().num_misses) == (1, 1)


def test_positions_are_kept(path):
    """Found by the footer, by the records after a death, and where an object was moved."""
    keys, positions = [(1, 0), (2, 0), (9, 9)], [7, 65535, 0]

    def check(tier):
        assert tier.positions_each(keys).tolist() == positions

    with open_tier(path) as tier:
        values = [value(key) for key in keys[:2]]
        assert tier.put_each(keys[:2], values, positions[:2]) == [STORED] * 2
        check(tier)
        image = path.read_bytes()
    with open_tier(path) as tier:
        check(tier)
    path.write_bytes(image)
    with open_tier(path) as tier:
        check(tier)
        for i in range(200):
            assert read(tier, *keys[:2]) == set(keys[:2])
            put(tier, (i, 5))
        assert tier.stats().num_moved >= 4
        check(tier)


def test_remove_each_across_buckets(path):
    """More removals than fit into a bucket, which begins others, and frees the oldest."""
    wanted = [(i, 1) for i in range(300)]
    with open_tier(path) as tier:
        put(tier, *wanted[::2])
        there = [pair in keys_of(tier) for pair in wanted]
        assert any(there)
        assert tier.remove_each([*wanted, wanted[-2]]).tolist() == [*there, False]
        assert keys_of(tier) == set() and tier.remove_each([]).tolist() == []
        assert put(tier, wanted[0]) == [STORED]
        assert tier.remove_each(wanted[:2]).tolist() == [True, False]
    with open_tier(path) as tier:
        assert keys_of(tier) == set()


def test_read_starts_does_not_count_as_use(path):
    with open_tier(path) as tier:
        put(tier, *KEYS)
        wanted = [KEYS[1], (9, 9), KEYS[2]]
        parts = [value(KEYS[1]).tobytes()[:50], b"", value(KEYS[2]).tobytes()[:50]]
        assert tier.read_starts(wanted, 50) == parts
        assert tier.read_starts(KEYS[1:2], 1 << 20) == [value(KEYS[1]).tobytes()]
        assert not tier._index.find(KEYS[1]).is_used
        read(tier, KEYS[1])
        assert tier._index.find(KEYS[1]).is_used


@pytest.mark.parametrize("kill", [False, True])
def test_removed_objects_stay_removed(path, kill):
    with open_tier(path) as tier:
        put(tier, *KEYS)
        assert tier.remove(KEYS[3]) and not tier.remove(KEYS[3])
        tier.remove(KEYS[4])
        assert put(tier, KEYS[4]) == [STORED]
        if kill:
            image = path.read_bytes()
    if kill:
        path.write_bytes(image)  # without the footer of the end
    with open_tier(path) as tier:
        assert read(tier, *KEYS) == set(KEYS) - {KEYS[3]}
        assert tier.remove_all() == len(KEYS) - 1 and tier.remove_all() == 0
        assert read(tier, *KEYS) == set() and put(tier, KEYS[0]) == [STORED]
    with open_tier(path) as tier:
        assert read(tier, *KEYS) == {KEYS[0]}


def test_used_objects_are_moved_and_others_dropped(path):
    used = [(2, 0), (3, 0)]
    with open_tier(path, 3) as tier:
        put(tier, *used)
        for i in range(100, 400):
            assert put(tier, (i, 0)) == [STORED]
            assert read(tier, *used) == set(used)
        stats = tier.stats()
        assert stats.num_moved >= 2 and stats.num_dropped > 200
        assert stats.num_buckets_begun > 3 * 3  # laps
        assert stats.num_free_buckets == 1
        padded = sum(layout.record_bytes(len(value((i, 0)))) for i in range(100, 400))
        bound = (padded + stats.num_moved * (PAGE + layout.pages(20_000))) * 1.5
        assert stats.user_bytes < stats.written_bytes < bound
        assert stats.write_amplification == stats.written_bytes / stats.user_bytes
        kept = keys_of(tier)
    with open_tier(path, 3) as tier:
        assert keys_of(tier) == kept == read(tier, *kept)


@pytest.mark.parametrize("number", range(2))
def test_moving_leaves_room_for_a_large_object(path, number):
    """The bucket that it begins is the last free one: first, used objects are moved there."""
    large = [(4 * i + number, LARGE) for i in range(12)]
    with open_tier(path, 4) as tier:
        assert tier.max_object_bytes == LARGEST
        for i, key in enumerate(large):
            assert put(tier, *((3 + 8 * i, scope) for scope in range(3)), key) == [STORED] * 4
            assert read(tier, key) == {key}
            there = keys_of(tier)
            assert read(tier, *there, verify=False) == there
        assert (tier.stats().num_moved > 0) == (number > 0) and tier.stats().num_damaged == 0
    with open_tier(path, 4) as tier:
        assert read(tier, *there) == keys_of(tier) == there


def test_nothing_is_moved_with_move_ratio_zero(path):
    with open_tier(path, 3, move_ratio=0) as tier:
        put(tier, (3, 0))
        for i in range(100, 150):
            read(tier, (3, 0))
            put(tier, (i, 0))
        assert tier.stats().num_moved == 0 and not tier.contains_each([(3, 0)])[0]


def test_tier_can_grow_but_not_shrink(path):
    with open_tier(path, 3) as tier:
        put(tier, *KEYS[:8])
        had = keys_of(tier)
    with open_tier(path, 6) as tier:
        assert read(tier, *had) == had
        assert tier.stats().capacity_bytes == 6 * BUCKET
    size = path.stat().st_size
    with pytest.raises(InvalidArgument, match="capacity_bytes must not be less than"):
        open_tier(path, 3)
    with pytest.raises(InvalidArgument, match="bucket_bytes must be 65536, as .* got 131072"):
        open_tier(path, 9, bucket_bytes=2 * BUCKET)
    assert path.stat().st_size == size


def test_only_one_tier_can_open_a_file(path):
    with open_tier(path) as tier:
        put(tier, (1, 0))
        with pytest.raises(Unavailable, match="another tier has '.*tier' open"):
            open_tier(path)

        def refuse():
            with pytest.raises(Unavailable, match="another tier"):
                open_tier(path)

        with child(refuse) as pid:
            assert ended_well(pid)
        assert read(tier, (1, 0)) == {(1, 0)}  # it has taken no harm
    with open_tier(path) as tier:
        assert keys_of(tier) == {(1, 0)}


def test_dropped_tier_releases_its_file(path):
    descriptors = set(os.listdir("/proc/self/fd"))
    tiers = [open_tier(path)]
    put(tiers[0], (1, 0))
    with pytest.warns(ResourceWarning, match="unclosed SsdTier"):
        tiers.clear()
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    with open_tier(path) as tier:
        assert read(tier, (1, 0)) == keys_of(tier) == {(1, 0)}


@pytest.mark.parametrize("version", [1, 2, 4])
def test_other_layout_version_is_rejected(path, version):
    with open_tier(path) as tier:
        put(tier, (1, 0))
    with open(path, "r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", version))
    image = path.read_bytes()
    with pytest.raises(Unavailable, match=f"has layout {version}, this is for layout 3"):
        open_tier(path)
    assert path.read_bytes() == image


def test_foreign_file_is_rejected_and_left_alone(path):
    path.write_bytes(b"precious" * 1000)
    with pytest.raises(InvalidArgument, match="path must be a tier or a new file"):
        open_tier(path, 8)
    assert path.read_bytes() == b"precious" * 1000
    with pytest.raises(InvalidArgument, match="path must be a regular file"):
        SsdTier("/dev/null", 8 * BUCKET, bucket_bytes=BUCKET)
    with pytest.raises(FileNotFoundError):
        open_tier(path.parent / "no" / "tier")
    with open(path, "rb") as file:  # no lock is left
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("before", [None, 0, PAGE, layout.FIRST_BUCKET + BUCKET, 9 << 20])
def test_file_with_zeroed_head_is_rejected_and_left_alone(path, before):
    """Wherever its data are: someone else's, or, without `before`, a tier that lost its head."""
    image = bytes(max(before or 0, PAGE)) + b"precious"
    if before is None:
        with open_tier(path) as tier:
            put(tier, (1, 0))
        image = bytes(PAGE) + path.read_bytes()[PAGE:]
    path.write_bytes(image)
    with pytest.raises(InvalidArgument, match="begins with zeros, but has data"):
        open_tier(path, 256)
    assert path.read_bytes() == image


@pytest.mark.parametrize("num_bytes", [0, 100, 3 << 20])
@pytest.mark.parametrize("is_written", [False, True])
def test_zero_filled_file_becomes_a_tier(path, num_bytes, is_written):
    """As one is of a process that has died while making it."""
    path.write_bytes(bytes(num_bytes if is_written else 0))
    os.truncate(path, num_bytes)
    with open_tier(path, 64) as tier:
        put(tier, (1, 0))
    with open_tier(path, 64) as tier:
        assert keys_of(tier) == {(1, 0)}


@pytest.mark.parametrize(
    "options,message",
    [
        ({"bucket_bytes": 1000}, "bucket_bytes must be an integer from 65536 to .*, got 1000"),
        ({"bucket_bytes": BUCKET + 1}, "bucket_bytes must be whole pages of 4096, got 65537"),
        ({"num_buckets": 1}, "capacity_bytes must be an integer from 131072 to .*, got 65536"),
        ({"slot_bytes": 5000}, "slot_bytes must be whole pages of 4096, got 5000"),
        ({"num_slots": 0}, "num_slots must be an integer from 1 to 1024, got 0"),
        ({"move_ratio": 0.6}, "move_ratio must be a number from 0 to 0.5, got 0.6"),
        ({"retry_s": "1"}, "retry_s must be a number from 0 to .*, got '1'"),
        ({"deadline_s": True}, "deadline_s must be a number from 0.001 to .*, got True"),
    ],
)
def test_wrong_options(path, options, message):
    with pytest.raises(InvalidArgument, match=message):
        open_tier(path, **options)
    assert not path.exists()


@pytest.mark.parametrize("name", [None, 5, "", b"tier", "a\0b", "\ud800"])
def test_path_must_be_a_file_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="SsdTier: path must be the name of a file, got"):
        SsdTier(name, 1 << 30)
    assert not list(tmp_path.iterdir())


def test_wrong_arguments(path):
    with open_tier(path) as tier:
        large = np.zeros(tier.max_object_bytes + 1, np.uint8)
        assert tier.put_each([(1, 1)], [large[:-1]]) == [STORED]
        calls = {
            "values must be as many as keys, got 1 and 2": lambda: tier.put_each(KEYS[:2], [b""]),
            "values must be as many as keys, got None": lambda: tier.put_each(KEYS[:1], None),
            "buffers must be as many as keys, got 1.5": lambda: tier.get_into_each(KEYS[:1], 1.5),
            "buffers must be as many as keys, got 0": lambda: tier.get_into_each(KEYS[:1], []),
            r"keys must be \[n, 2\] integers, got \[1\]": lambda: tier.put_each([1], [b""]),
            r"keys must be from 0 to 2\*\*64 - 1, got \(-1, 0\)": lambda: tier.remove((-1, 0)),
            r"values\[1\] must be at most 49152 bytes, got": lambda: tier.put_each(
                KEYS[:2], [b"", large]
            ),
            r"buffers\[0\] must be writable": lambda: tier.get_into_each([(1, 1)], [b"123"]),
            "positions must be an integer from 0 to 65535 for each key, got": lambda: tier.put_each(
                [(1, 2)], [b"1"], [1 << 16]
            ),
            r"for each key, got \[1, 2\]": lambda: tier.put_each([(1, 2)], [b"1"], [1, 2]),
            r"for each key, got 5": lambda: tier.put_each([(1, 2)], [b"1"], 5),
            r"values\[0\] must be packed": lambda: tier.put_each([(1, 2)], [large[::2]]),
        }
        for message, call in calls.items():
            with pytest.raises(InvalidArgument, match=message):
                call()
        assert keys_of(tier) == {(1, 1)}
    tier.close()
    for call in (
        lambda: put(tier, (1, 0)),
        lambda: read(tier, (1, 0)),
        lambda: tier.remove((1, 0)),
        lambda: tier.contains_each([(1, 0)]),
        lambda: tier.num_bytes_each([(1, 0)]),
        lambda: tier.match_prefix([(1, 0)]),
        lambda: tier.keys_by_use(),
        tier.keys,
        tier.stats,
        tier.sync,
        tier.remove_all,
    ):
        with pytest.raises(InvalidArgument, match="tier must be open, got the closed"):
            call()
