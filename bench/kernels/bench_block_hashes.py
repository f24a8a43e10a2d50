"""block_hashes against the chains that engines compute in Python.

sha256+pickle is vLLM's default form: sha256 of the pickled (parent, tokens) of each block. xxhash
is the same chain as ours, block by block, through the Python package. All run on one thread.
sha256+pickle goes over a list of Python ints, as engines hold them, and xxhash over an array, which
is less work for it; ours over either.
"""

import hashlib
import pickle
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from lib.harness import Case, arguments
from lib.table import report
from mooncake_kernels import config
from mooncake_kernels.reference import hashing as reference

NUM_TOKENS = 131_072
BLOCK_SIZES = (16, 64, 256)


def sha256_pickle_chain(tokens: list[int], block_size: int) -> list[bytes]:
    parent, keys = b"root", []
    for i in range(0, len(tokens) - block_size + 1, block_size):
        value = (parent, tuple(tokens[i : i + block_size]), None)
        parent = hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()
        keys.append(parent)
    return keys


def case(kind: str, num_tokens: int, block_size: int) -> Case:
    array = np.random.default_rng(0).integers(0, 128_000, num_tokens, np.uint32)
    as_list = array.tolist()
    tokens = array if kind == "array" else as_list

    def check():
        ours = mk.block_hashes(tokens, block_size)
        assert np.array_equal(ours, reference.block_hashes(array, block_size)), "wrong: not timed"
        assert len(sha256_pickle_chain(as_list, block_size)) == len(ours)

    return Case(
        f"{num_tokens} tokens ({kind}), blocks of {block_size}",
        lambda: mk.block_hashes(tokens, block_size),
        {
            "sha256+pickle": lambda: sha256_pickle_chain(as_list, block_size),
            "xxhash": lambda: reference.block_hashes(array, block_size),
        },
        check,
    )


if __name__ == "__main__":
    options = arguments(__doc__, without=("device",))
    num_tokens = NUM_TOKENS // 16 if options.quick else NUM_TOKENS
    with config.override(threads=options.threads):
        kinds = [(kind, size) for size in BLOCK_SIZES for kind in ("array", "list")]
        cases = [case(kind, num_tokens, size) for kind, size in kinds]
        report("block_hashes", cases, options)
