"""block_hashes against the chain in Python: every key is compared."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk
from mooncake_kernels import config, hashing

pytest.importorskip("xxhash", reason="the specification uses the Python xxhash package")
from mooncake_kernels.reference import hashing as reference

from ..threads import in_threads


@given(
    lengths=st.lists(st.integers(0, 200), max_size=6),
    block_size=st.one_of(st.sampled_from([16, 32, 64]), st.integers(1, 70)),
    seed=st.integers(0, 2**64 - 1),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_matches_the_reference(lengths, block_size, seed, data):
    tokens = np.random.default_rng(len(lengths)).integers(0, 2**32, sum(lengths), np.uint32)
    starts = [0, *np.cumsum(lengths, dtype=int).tolist()]
    parent = st.one_of(st.none(), st.integers(0, 2**64 - 1))
    size = len(lengths)
    parents = data.draw(st.one_of(st.none(), st.lists(parent, min_size=size, max_size=size)))
    extra = st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 9), st.text())))
    extra_keys = data.draw(st.one_of(st.none(), st.lists(extra, min_size=size, max_size=size)))
    blocks = [st.lists(extra, min_size=n // block_size, max_size=n // block_size) for n in lengths]
    block_extra_keys = data.draw(
        st.one_of(st.none(), st.tuples(*(st.one_of(st.none(), one) for one in blocks)))
    )
    options = {"cu_seqlens": starts, "parents": parents, "seed": seed}
    options |= {"extra_keys": extra_keys, "block_extra_keys": block_extra_keys}
    keys = mk.block_hashes(tokens, block_size, **options)
    expected = reference.block_hashes(tokens.tolist(), block_size, **options)
    assert keys.dtype == np.uint64 and np.array_equal(keys, expected)


def test_thread_count_follows_the_cpu_affinity(monkeypatch):
    """Of a container's or a worker's, not of the machine's."""
    asked = []

    def block_hashes(tokens, block_size, seed, threads, *rest):
        asked.append(threads)
        return np.zeros(1, dtype=np.uint64)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 8, 9})
    monkeypatch.setattr(hashing._host, "block_hashes", block_hashes)
    with config.override(threads=0):
        mk.block_hashes([1, 2], 2)
    with config.override(threads=5):
        mk.block_hashes([1, 2], 2)
    assert asked == [3, 5]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("num_sequences", [1, 3, 40])
def test_keys_are_independent_of_the_thread_count(threads, num_sequences):
    """Enough tokens that the work is split, in the middle of sequences too."""
    tokens = np.random.default_rng(1).integers(0, 50000, 800_000, np.uint32)
    cuts = np.sort(np.random.default_rng(2).integers(0, tokens.size, num_sequences - 1))
    starts = [0, *cuts.tolist(), tokens.size]
    with config.override(threads=threads):
        keys = mk.block_hashes(tokens, 64, cu_seqlens=starts)
    assert np.array_equal(keys, reference.block_hashes(tokens, 64, cu_seqlens=starts))


def test_prefix_keeps_its_keys_and_a_parent_continues_them():
    tokens = list(range(1000, 1100))
    keys = mk.block_hashes(tokens, 16)
    assert len(keys) == 6
    assert np.array_equal(mk.block_hashes(tokens[:50], 16), keys[:3])
    assert np.array_equal(mk.block_hashes(tokens[48:], 16, parents=[int(keys[2])]), keys[3:])
    changed = mk.block_hashes([0, *tokens[1:]], 16)
    assert not np.isin(changed, keys).any(), "every later name depends on the first token"


def test_different_seeds_give_different_keys():
    tokens = list(range(64))
    assert not np.isin(mk.block_hashes(tokens, 16, seed=1), mk.block_hashes(tokens, 16)).any()


@pytest.mark.parametrize(
    "tokens",
    [
        list(range(40)),
        tuple(range(40)),
        [np.int64(i) for i in range(40)],
        np.arange(40, dtype=np.int64),
        np.arange(40, dtype=np.uint16),
        np.arange(80, dtype=np.int32)[::2] // 2,
        torch.arange(40),
        torch.arange(40, dtype=torch.int32),
    ],
    ids=["list", "tuple", "list of int64", "int64", "uint16", "strided", "torch64", "torch32"],
)
def test_any_token_sequence_type_is_accepted(tokens):
    assert np.array_equal(mk.block_hashes(tokens, 8), reference.block_hashes(range(40), 8))


def test_no_full_block_gives_no_keys():
    assert mk.block_hashes([], 16).shape == (0,)
    assert mk.block_hashes(list(range(15)), 16).shape == (0,)
    assert mk.block_hashes([1, 2, 3], 2, cu_seqlens=[0, 1, 2, 3]).shape == (0,)


def test_concurrent_callers_get_equal_keys():
    tokens = np.arange(300_000, dtype=np.uint32)
    expected = mk.block_hashes(tokens, 16)
    results = []

    def call():
        results.append(np.array_equal(mk.block_hashes(tokens, 16), expected))

    in_threads(*[call] * 8)
    assert results == [True] * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, r"block_size must be an integer in \[1, .*got 0"),
        ({"block_size": 16.0}, "block_size must be an integer .*got 16.0"),
        ({"seed": -1}, "seed must be an integer .*got -1"),
        ({"seed": 2**64}, "seed must be an integer"),
        ({"algorithm": "sha256"}, "algorithm must be xxh3, got 'sha256'"),
        ({"tokens": [1, -2, 3]}, r"tokens\[1\] must be in \[0, 2\*\*32\), got -2"),
        ({"tokens": [2**32]}, r"tokens\[0\] must be"),
        ({"tokens": [1, 2, 2**70, 3]}, r"tokens\[2\] must be in \[0, 2\*\*32\), got 1180591"),
        ({"tokens": [2, 1, True]}, "tokens must be 1-d integers, got bool at index 2"),
        ({"tokens": [2, np.True_]}, "tokens must be 1-d integers, got bool at index 1"),
        ({"tokens": torch._neg_view(torch.tensor([1, 2]))}, "tokens must be 1-d integers, got Ten"),
        ({"seed": 10**5000}, "seed must be an integer .* got a huge int"),
        ({"block_size": 10**5000}, "block_size must be an integer .* got a huge int"),
        ({"algorithm": np.array([1, 2])}, "algorithm must be xxh3, got array"),
        ({"parents": np.array(5)}, r"parents must be of one dimension, got shape \(\)"),
        ({"parents": np.array([[5]])}, r"parents must be of one dimension, got shape \(1, 1\)"),
        ({"tokens": (1, None)}, "tokens must be 1-d integers, got object"),
        ({"tokens": [1.5]}, "tokens must be 1-d integers, got float64"),
        ({"tokens": [[1], [2]]}, r"tokens must be 1-d integers, got int64 of shape \(2, 1\)"),
        ({"tokens": torch.zeros(2, dtype=torch.bfloat16)}, "1-d integers, got torch.bfloat16"),
        ({"tokens": [True, False]}, "tokens must be 1-d integers, got bool"),
        ({"tokens": [[1], [2, 3]]}, "tokens must be 1-d integers, got list"),
        ({"tokens": "hello"}, "tokens must be 1-d integers"),
        ({"cu_seqlens": [0, 2]}, r"from 0 to the number of tokens \(4\), got \[0\] to \[2\]"),
        ({"cu_seqlens": [1, 4]}, "cu_seqlens must go from 0"),
        ({"cu_seqlens": []}, "cu_seqlens must go from 0"),
        ({"cu_seqlens": [0, 3, 1, 4]}, "must not decrease, got 1 after 3 at index 2"),
        ({"cu_seqlens": [0, 2**40, 5 - 2**63, 4]}, "not decrease, got .* after .* at index 2"),
        ({"parents": 5}, "parents must be a sequence of integers or None, got int"),
        ({"parents": [1, 2]}, "parents must have one entry for each of 1 sequences, got 2"),
        ({"parents": [-1]}, r"parents\[0\] must be an integer"),
    ],
)
def test_bad_arguments_are_rejected(arguments, message):
    good = {"tokens": [1, 2, 3, 4], "block_size": 2}
    with pytest.raises(mk.InvalidArgument, match="block_hashes: .*" + message):
        mk.block_hashes(**(good | arguments))


def test_hashing_falls_back_to_the_caller_without_threads():
    """What cannot be split is done by the caller."""
    code = """
import resource, numpy as np, mooncake_kernels as mk
from mooncake_kernels import config
tokens = np.arange(1 << 20, dtype=np.uint32)
expected = mk.block_hashes(tokens, 16)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (4 << 20)  # a thread's stack is larger
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
with config.override(threads=8):
    assert np.array_equal(mk.block_hashes(tokens, 16), expected)
"""
    environ = {**os.environ, "MOONCAKE_KERNELS_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)
