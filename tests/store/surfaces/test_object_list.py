"""Lists of objects against a plain sort, and keys as text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store.keyspace import key_text, parse_key
from mooncake_serving.store.object_list import find_object, list_objects

WORDS = st.sampled_from([0, 1, 0xFF << 56, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
KEYS = st.tuples(WORDS, WORDS)


@given(keys=st.sets(KEYS, max_size=30), limit=st.integers(1, 7), digits=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_pages_concatenate_to_the_sorted_list(keys, limit, digits):
    with ObjectPool.create(64 * 4096) as pool:
        for key in keys:
            pool.put_from(key, bytes(key[0] % 100))
        prefix = f"{next(iter(keys))[0]:016x}"[:digits] if keys else ""
        expected = sorted(key for key in keys if f"{key[0]:016x}".startswith(prefix))
        listed, after = [], None
        while True:
            page = list_objects(pool, prefix=prefix.upper(), after=after, limit=limit)
            assert page.num_left == len(expected) - len(listed)
            listed += page.objects
            if len(listed) == len(expected):
                break
            after = page.objects[-1].key
        assert [found.key for found in listed] == expected
        assert all(found.num_bytes == found.key[0] % 100 for found in listed)


def test_find_object_does_not_count_as_use(pool):
    pool.put_from((1, 2), b"abc", retention="soft")
    found = find_object(pool, (1, 2))
    assert (found.num_bytes, found.retention) == (3, "soft")
    assert find_object(pool, (1, 2)).recency == found.recency and find_object(pool, (1, 3)) is None


@given(KEYS)
def test_keys_as_text(key):
    text = key_text(key)
    assert len(text) == 34 and parse_key("op", text) == key == parse_key("op", text[2:].upper())
    assert text == key_text(np.array(key, np.uint64))


@pytest.mark.parametrize("text", ["", "0x", "12", "0x" + "0" * 33, "g" * 32, "0x0x" + "0" * 30])
def test_invalid_key_text_is_rejected(text):
    with pytest.raises(InvalidArgument, match=r"^op: this must be .*32 hexadecimal digits, got"):
        parse_key("op", text, argument="this")
