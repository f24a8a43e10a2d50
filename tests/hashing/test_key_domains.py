"""No two inputs of block_hashes are one by construction: roots, chains, seeds, extra keys."""

import itertools

import numpy as np
import pytest

import mooncake_kernels as mk

xxhash = pytest.importorskip("xxhash", reason="the specification uses the Python xxhash package")
from mooncake_kernels.reference import hashing as reference  # noqa: E402 - it needs xxhash

TOKENS = np.arange(40, 80, dtype=np.uint32)


def words_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<u4")


@pytest.mark.parametrize("seed", [0, 7])
def test_prompt_forging_a_chained_block_has_another_key(seed):
    """Whatever is hashed for a block with a parent is also a valid block of tokens."""
    first, second = (int(key) for key in mk.block_hashes(TOKENS[:8], 4, seed=seed))
    own_seeds = [seed, *(reference.seed_of(p, seed) for p in (b"mk.block", b"mk.chain"))]
    for local_seed in own_seeds:
        local = xxhash.xxh3_64_intdigest(TOKENS[4:8].tobytes(), seed=local_seed)
        pair = np.array([first, local], "<u8").tobytes()
        link = np.array([first, local, 0, 1], "<u8").tobytes()
        for data, block_size in ((pair, 4), (link, 8), (link, 4)):
            keys = mk.block_hashes(words_of(data), block_size, seed=seed)
            assert second not in keys and first not in keys


def test_parent_zero_differs_from_no_parent():
    root, child = mk.block_hashes(TOKENS[:4], 4), mk.block_hashes(TOKENS[:4], 4, parents=[0])
    assert root[0] != child[0]
    assert root[0] == mk.block_hashes(TOKENS[:4], 4, parents=[None])[0]


@pytest.mark.parametrize("block_size", [4, 16])
def test_seeds_that_differ_in_few_bits_share_no_keys(block_size):
    """XXH3 adds its seed to constants that inputs are xored with: a small change of the tokens
    would make up for a small change of a seed."""
    secret = np.frombuffer(bytes.fromhex(SECRET), "<u8")
    with np.errstate(over="ignore"):
        low = secret[3] ^ secret[4]
        high = secret[5] ^ secret[6]
        change = np.array([low ^ (low + np.uint64(1)), high ^ (high - np.uint64(1))])
    first = TOKENS[:4].view("<u8")
    second = first ^ change
    same = [
        xxhash.xxh3_64_intdigest(one.tobytes(), seed=s) for s, one in enumerate((first, second))
    ]
    assert same[0] == same[1], "of XXH3 itself, with 16 bytes"
    assert mk.block_hashes(first.view("<u4"), 4) != mk.block_hashes(second.view("<u4"), 4, seed=1)
    keys = [mk.block_hashes(TOKENS, block_size, seed=2**i) for i in range(64)]
    assert len(np.unique(keys)) == 64 * len(keys[0])


# The first 56 bytes of XXH3's secret.
SECRET = (
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248e"
)

DIFFERENT = [
    None, "a", b"a", 1, "1", -1, 2**64 - 1, "", b"", ("a", "b"), ("ab",), (("a",), "b"),
    (("a", "b"),), (None, "a"), ("a", None), (None,), (None, None), ((),), (1, 2), (12,), (1, "2"),
    "a\0", "n", "t", ("s", "a"), ["image-1", 0], ["image-1", 1],
]  # fmt: skip


def test_different_extra_keys_give_different_keys():
    by_sequence = [mk.block_hashes(TOKENS, 8, extra_keys=[extra]) for extra in DIFFERENT]
    by_block = [
        mk.block_hashes(TOKENS, 8, block_extra_keys=[[extra, None, None, None, None]])
        for extra in DIFFERENT[1:]
    ]
    both = [
        mk.block_hashes(TOKENS, 8, extra_keys=[a], block_extra_keys=[[b, *[None] * 4]])
        for a, b in itertools.permutations(("a", ("a", "b"), "b"), 2)
    ]
    every = np.concatenate([*by_sequence, *by_block, *both])
    assert len(np.unique(every)) == len(every)


@pytest.mark.parametrize(
    ("one", "other"),
    [(None, ()), (None, []), ("a", ("a",)), (["a", 1], ("a", 1)), (1, np.int64(1)),
     (b"a", memoryview(b"a")), ((("a",),), [["a"]])],
)  # fmt: skip
def test_equivalent_extra_keys_give_equal_keys(one, other):
    first, second = (mk.block_hashes(TOKENS, 8, extra_keys=[extra]) for extra in (one, other))
    assert np.array_equal(first, second)


def test_empty_extra_keys_equal_no_extra_keys():
    keys = mk.block_hashes(TOKENS, 8)
    for extra, blocks in (
        (None, [None]),
        ([None], None),
        ([()], [[None] * 5]),
        ([None], [[()] * 5]),
    ):
        assert np.array_equal(
            mk.block_hashes(TOKENS, 8, extra_keys=extra, block_extra_keys=blocks), keys
        )


def test_an_image_changes_the_keys_from_its_block_on():
    plain = mk.block_hashes(TOKENS, 8)
    keys = [
        mk.block_hashes(TOKENS, 8, block_extra_keys=[[None, None, image, None, None]])
        for image in ("cat", "dog")
    ]
    assert np.array_equal(keys[0][:2], plain[:2]) and np.array_equal(keys[1][:2], plain[:2])
    assert len(np.unique(np.concatenate([plain[2:], keys[0][2:], keys[1][2:]]))) == 9


def test_prefix_with_extra_keys_can_be_continued():
    image = [None, None, "cat", "cat", None]
    options = {"extra_keys": [("lora-7", "salt")], "block_extra_keys": [image]}
    keys = mk.block_hashes(TOKENS, 8, **options)
    options["block_extra_keys"] = [image[3:]]
    later = mk.block_hashes(TOKENS[24:], 8, parents=[int(keys[2])], **options)
    assert np.array_equal(later, keys[3:])
    del options["extra_keys"]
    assert not np.isin(
        mk.block_hashes(TOKENS[24:], 8, parents=[int(keys[2])], **options), keys
    ).any()


def test_each_sequence_has_its_own_extra_keys():
    starts, adapters = [0, 16, 16, 19, 40], ["a", "unused", "short", None]
    keys = mk.block_hashes(TOKENS, 8, cu_seqlens=starts, extra_keys=adapters)
    alone = [
        mk.block_hashes(TOKENS[begin:end], 8, extra_keys=[extra])
        for (begin, end), extra in zip(itertools.pairwise(starts), adapters, strict=True)
    ]
    assert np.array_equal(keys, np.concatenate(alone))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"extra_keys": "lora"}, "extra_keys must be a list or tuple .* 1 sequences, got 'lora'"),
        ({"extra_keys": {"a": 1}}, "extra_keys must be a list or tuple"),
        ({"extra_keys": ["a", "b"]}, "extra_keys must have one entry for each of 1 seq.*, got 2"),
        ({"extra_keys": [True]}, r"extra_keys\[0\]\[0\] must be a str, bytes, .* got True"),
        ({"extra_keys": [1.0]}, r"extra_keys\[0\]\[0\] must be .* got 1.0"),
        ({"extra_keys": [2**64]}, r"extra_keys\[0\]\[0\] must be .* got 18446744073709551616"),
        ({"extra_keys": [10**5000]}, r"extra_keys\[0\]\[0\] must be .* got a huge int"),
        ({"extra_keys": [("a", {"b"})]}, r"extra_keys\[0\]\[1\] must be .* got \{'b'\}"),
        ({"extra_keys": ["\ud800"]}, r"extra_keys\[0\]\[0\] must be text that UTF-8 can hold"),
        ({"block_extra_keys": ["ab"]}, r"block_extra_keys\[0\] must be a list or tuple .* 2 full"),
        ({"block_extra_keys": [["a"]]}, r"block_extra_keys\[0\] must have one entry for each of 2"),
        ({"block_extra_keys": [[None, 1.5]]}, r"block_extra_keys\[0\]\[1\]\[0\] must be .* 1.5"),
    ],
)  # fmt: skip
def test_bad_arguments_are_rejected(arguments, message):
    with pytest.raises(mk.InvalidArgument, match="block_hashes: .*" + message):
        mk.block_hashes([1, 2, 3, 4, 5], 2, **arguments)


def test_self_containing_extra_keys_are_rejected():
    endless: list = []
    endless.append(endless)
    with pytest.raises(mk.InvalidArgument, match="at most 16 deep"):
        mk.block_hashes([1, 2], 2, extra_keys=[endless])
