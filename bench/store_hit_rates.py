"""Hit rates of a pool over a trace of prefix blocks: the paper's Figure 9, by its own data.

    python store_hit_rates.py --trace conversation_trace.jsonl --json results/store_hit_rates.json

The traces of the Mooncake paper (FAST'25) have one line a request, with an id for each 512 tokens
of its prompt. Each block is looked up, and put if it is not there, in one pool that has as many
blocks as the capacity says. `lru` must be what a dict in the order of use does, to the last hit.
`tail first` is LRU that looks a prompt's blocks up from the last to the first, as the store's
batches do, so that the tail of a prefix goes before its head. Counted in tokens; `infinite` never
evicts.
"""

import argparse
import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import machine

from mooncake_kernels.pool import ObjectPool, PutResult

BLOCK_TOKENS = 512
UNIT = 64  # bytes; an object is one
CAPACITIES = (1e6, 3e6, 1e7, 3e7, 5e7)  # tokens
POLICIES = {"lru": ("lru", False), "sieve": ("sieve", False), "tail first": ("lru", True)}

Request = list[tuple[int, int]]  # (block, tokens)


def read(trace: Path) -> list[Request]:
    requests = []
    for line in trace.read_text().splitlines():
        record = json.loads(line)
        ids, length = record["hash_ids"], record["input_length"]
        tokens = [BLOCK_TOKENS] * (len(ids) - 1) + [length - BLOCK_TOKENS * (len(ids) - 1)]
        requests.append(list(zip(ids, tokens, strict=True)))
    return requests


def replay(requests: list[Request], num_blocks: int, policy: str) -> int:
    """Return how many tokens were found in a pool."""
    eviction, reverse = POLICIES[policy]
    hits = 0
    with ObjectPool.create(num_blocks * UNIT, alignment=UNIT, num_objects=num_blocks) as pool:
        for request in requests:
            for block, tokens in reversed(request) if reverse else request:
                pinned = pool.pin((block, 0))
                if pinned is not None:
                    pinned.close()
                    hits += tokens
                    continue
                while pool.put_from((block, 0), b"1", checksum=False) is PutResult.FULL:
                    pool.evict(UNIT, eviction)
    return hits


def simulate(requests: list[Request], num_blocks: float) -> int:
    """Return what LRU would find, from an ordered dict."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for block, tokens in request:
            if block in cache:
                hits += tokens
                cache.move_to_end(block)
            else:
                cache[block] = None
                if len(cache) > num_blocks:
                    cache.popitem(last=False)
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    requests = read(options.trace)
    total = sum(tokens for request in requests for _, tokens in request)
    infinite = simulate(requests, float("inf")) / total
    rows: list[dict[str, Any]] = []
    sys.stdout.write(f"infinite {infinite:.4f}\n")
    for capacity in CAPACITIES:
        num_blocks = int(capacity) // BLOCK_TOKENS
        row: dict[str, Any] = {"capacity_tokens": int(capacity)}
        for policy in POLICIES:
            row[policy] = replay(requests, num_blocks, policy) / total
        expected = simulate(requests, num_blocks) / total
        assert row["lru"] == expected, f"{row['lru']} is not LRU's {expected}"
        rows.append(row)
        cells = "  ".join(f"{policy} {row[policy]:.4f}" for policy in POLICIES)
        sys.stdout.write(f"{int(capacity):>10} tokens  {cells}\n")
        sys.stdout.flush()
    if options.json:
        head = {"bench": "store_hit_rates", **machine.describe("cpu", 1)}
        head |= {"trace": options.trace.name, "requests": len(requests), "infinite": infinite}
        options.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
