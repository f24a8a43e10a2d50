"""Keep KV blocks under the hashes of their prefixes, for all processes of a host."""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import mooncake_kernels as mk
from mooncake_serving.store import Store

TOKENS, BLOCK_TOKENS, BLOCK_BYTES = np.arange(1024), 256, 65536


def reader(path: str) -> None:
    """Another process of the host."""
    keys = mk.block_hashes(TOKENS, BLOCK_TOKENS)
    with Store.open(path, namespace="llama/rank0") as store:
        found = store.match_prefix(keys)  # no lock, no server
        blocks = [np.empty(BLOCK_BYTES, np.uint8) for _ in range(found)]
        store.get_into_each(keys[:found], blocks)
        with store.view(keys[0]) as block:  # in place: no copy, and no eviction meanwhile
            assert (np.asarray(block.view) == 0).all()
        print(
            f"the other process found {found} of {len(keys)} blocks: {[int(b[0]) for b in blocks]}"
        )


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = str(Path(folder, "kv"))
        with Store.create(16 << 20, path, namespace="llama/rank0") as store:
            keys = mk.block_hashes(TOKENS, BLOCK_TOKENS)
            values = [np.full(BLOCK_BYTES, i, np.uint8) for i in range(3)]
            store.put_each(keys[:3], values)  # evicts, if there is no room
            subprocess.run([sys.executable, __file__, path], check=True)
            print(store.pool.counts())  # of all processes


if __name__ == "__main__":
    reader(sys.argv[1]) if len(sys.argv) > 1 else main()
