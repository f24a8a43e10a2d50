"""The baselines of bench_conductor.py: the same index and the same algorithm in plain Python.

Run as a program, it prints how many bytes a key takes: `baselines/conductor.py NUM_KEYS ours|sets`.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mooncake_serving.conductor import Conductor, Index, PrefixIndex, Request

CHAIN_BLOCKS = 16
NUM_INSTANCES = 10_000


class SetIndex:
    """Key to a set of holders, the obvious implementation."""

    def __init__(self, num_instances: int):
        self.num_instances = num_instances
        self.sets: dict[int, set[int]] = {}

    def add(self, instance: int, keys: Iterable[int]) -> None:
        for key in keys:
            self.sets.setdefault(key, set()).add(instance)

    def remove(self, instance: int, keys: Iterable[int]) -> None:
        for key in keys:
            if key in self.sets:
                self.sets[key].discard(instance)
                if not self.sets[key]:
                    del self.sets[key]

    def match(self, keys: Sequence[int]) -> list[int]:
        out = [0] * self.num_instances
        alive: set[int] | None = None
        for number, key in enumerate(keys, 1):
            held = self.sets.get(key, set())
            alive = set(held) if alive is None else alive & held
            for instance in alive:
                out[instance] = number
        return out


def least_ttft(conductor: Conductor, index: SetIndex, request: Request, now_s: float) -> float:
    """Algorithm 1 in a loop over instances; the polynomial's and the NIC's arithmetic inlined."""
    cluster, costs, threshold = conductor.cluster, conductor.costs, 2.0
    cost, per_token_s = costs.prefill, costs.transfer.bytes_per_token / costs.transfer.bytes_per_s
    n = request.num_tokens

    def prefill(prefix: int) -> float:
        pairs = (n * n - prefix * prefix) / 2
        return cost.base_s + cost.per_token_s * (n - prefix) + cost.per_pair_s * pairs

    tokens = [min(blocks * request.block_size, n - 1) for blocks in index.match(request.keys)]
    best = max(tokens)
    least = float("inf")
    free_at_s, role, up = cluster.free_at_s.tolist(), cluster.role.tolist(), cluster.up.tolist()
    for i in range(cluster.num_instances):
        if not up[i] or not role[i] & 1:
            continue
        wait = max(free_at_s[i] - now_s, 0.0)
        ttft = wait + prefill(tokens[i])
        if best > threshold * tokens[i]:
            ttft = min(ttft, (best - tokens[i]) * per_token_s + wait + prefill(best))
        least = min(least, ttft)
    return least


def chains(num_chains: int, seed: int = 0) -> Iterator[tuple[list[int], list[int]]]:
    """Generate chains and their holders: nine of ten have one instance, the others up to 32."""
    rng = np.random.default_rng(seed)
    for _ in range(num_chains):
        num_holders = 1 if rng.random() < 0.9 else int(rng.integers(2, 33))
        holders = rng.choice(NUM_INSTANCES, num_holders, replace=False)
        yield rng.integers(0, 2**63, CHAIN_BLOCKS).tolist(), holders.tolist()


def fill(index: Index | SetIndex, num_keys: int) -> None:
    """Put ``num_keys`` blocks into an index."""
    for keys, holders in chains(num_keys // CHAIN_BLOCKS):
        for holder in holders:
            index.add(holder, keys)


def resident_bytes() -> int:
    """Return the memory that this process uses."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Fill an index, and print the bytes of a key."""
    num_keys = int(sys.argv[1])
    index = (PrefixIndex if sys.argv[2] == "ours" else SetIndex)(NUM_INSTANCES)
    before = resident_bytes()
    fill(index, num_keys)
    sys.stdout.write(f"{(resident_bytes() - before) / num_keys:.1f}\n")


if __name__ == "__main__":
    main()
