"""Hit rates of a store over a trace of prefix blocks: the paper's Figure 9, by its own data.

    python bench/store/store_hit_rates.py --trace conversation_trace.jsonl \\
        --json bench/results/store_hit_rates.jsonl --plot bench/results/store_hit_rates.svg

The traces of the Mooncake paper (FAST'25) have one line per request, with an id for each 512 tokens
of its prompt. A request does what an engine does: it looks up its longest cached prefix, reads it,
and puts the rest. A hit is a token of that prefix; blocks after a gap do not count.

The store evicts as much of its pool at once as is its default; `lru exact` evicts one block at a
time. Both must match a dict in the order of use, to the last token. `lru, heads first` reads and
puts a prompt's blocks one by one in their order, so that heads are evicted before their tails.
`cost alone` is length_aware by what a block costs to compute, where attention over 100 blocks costs
as much as all the rest. `belady` is an upper bound for all: the best possible eviction of blocks
that are found without what comes before them. `infinite` never evicts.
"""

import argparse
import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

from lib import machine, results
from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import (
    EvictionPolicy,
    LengthAware,
    Store,
    belady,
    length_aware,
    lfu,
    lru,
    sieve,
)

BLOCK_TOKENS = 512
UNIT = 64  # bytes; an object is one
CAPACITIES = (1e6, 2e6, 3e6, 5e6, 1e7, 2e7, 3e7, 5e7)  # tokens
AT_ONCE = 0.002  # of the pool, by a store's default with lru

POLICIES: dict[str, EvictionPolicy] = {
    "lru": lru,
    "sieve": sieve,
    "lfu": lfu,
    "length_aware": length_aware,
}

COST_ALONE = LengthAware(depth=np.inf, attention=100.0)
# Distinguished by marker and dash, not by colour: a printed page is grey.
MARKS = {
    "lru": ("o", "-"),
    "sieve": ("s", "--"),
    "lfu": ("^", "-"),
    "length_aware": ("D", "-."),
    "belady": ("", "--"),
}

Request = tuple[np.ndarray, int]  # ids of blocks, tokens


def read(trace: Path) -> list[Request]:
    records = map(json.loads, trace.read_text().splitlines())
    return [(np.array(r["hash_ids"], np.uint64), r["input_length"]) for r in records]


def prefix_tokens(num_blocks: int, num_tokens: int) -> int:
    return min(num_blocks * BLOCK_TOKENS, num_tokens)


def replay(
    requests: list[Request],
    num_blocks: int,
    eviction: EvictionPolicy,
    at_once: float | None = None,
    heads_first: bool = False,
) -> int:
    """Return how many tokens were found in a store."""
    hits = 0
    options: dict[str, Any] = {"evict_ratio": at_once, "checksum": False}
    pool = ObjectPool.create(num_blocks * UNIT, alignment=UNIT, num_objects=num_blocks)
    with Store(pool, eviction=eviction, **options) as store:
        for keys, num_tokens in requests:
            found = store.match_prefix(keys)
            if heads_first:
                for key in keys[:found]:
                    store.get(key)
                for i, key in enumerate(keys[found:]):
                    store.put(key, b"1", position=found + i)
            else:
                store.get_into_each(keys[:found], [bytearray(1)] * found)
                store.put_each(keys[found:], [b"1"] * (len(keys) - found), position=found)
            hits += prefix_tokens(found, num_tokens)
    return hits


def simulate(requests: list[Request], num_blocks: float, at_once: int = 1) -> int:
    """Return what LRU would find, from an ordered dict."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids, num_tokens in requests:
        blocks = ids.tolist()
        found = 0
        while found < len(blocks) and blocks[found] in cache:
            found += 1
        for block in reversed(blocks[:found]):
            cache.move_to_end(block)
        new = []
        for block in blocks[found:]:
            if block in cache:
                continue
            if len(cache) >= num_blocks:
                for _ in range(at_once):
                    cache.popitem(last=False)
            cache[block] = None
            new.append(block)
        for block in reversed(new):
            if block in cache:
                cache.move_to_end(block)
        hits += prefix_tokens(found, num_tokens)
    return hits


def bound(requests: list[Request], num_blocks: int) -> int:
    """Return what no eviction could exceed, except for tokens that a prompt's last block lacks."""
    found = belady(np.concatenate([ids for ids, _ in requests]).astype(np.int64), num_blocks)
    sizes = np.full(len(found), BLOCK_TOKENS)
    ends = np.cumsum([len(ids) for ids, _ in requests]) - 1
    sizes[ends] = [tokens - BLOCK_TOKENS * (len(ids) - 1) for ids, tokens in requests]
    return int(sizes[found].sum())


def measure(requests: list[Request], num_blocks: int, total: int) -> dict[str, float]:
    """The hit rates of all policies in a store of that many blocks."""
    hits = {name: replay(requests, num_blocks, policy) for name, policy in POLICIES.items()}
    hits["lru exact"] = replay(requests, num_blocks, lru, 0.0)
    hits["lru, heads first"] = replay(requests, num_blocks, lru, heads_first=True)
    hits["cost alone"] = replay(requests, num_blocks, COST_ALONE)
    hits["belady"] = bound(requests, num_blocks)
    at_once = max(1, -(-int(AT_ONCE * num_blocks * UNIT) // UNIT))
    for name, count in (("lru", at_once), ("lru exact", 1)):
        expected = simulate(requests, num_blocks, count)
        assert hits[name] == expected, f"{name}: {hits[name]} tokens are not LRU's {expected}"
    return {name: tokens / total for name, tokens in hits.items()}


def plot(file: Path, rows: list[dict[str, float]], infinite: float) -> None:
    settings = {"svg.hashsalt": "mooncake-kernels", "svg.fonttype": "none", "font.size": 9}
    with mpl.rc_context(settings):
        figure, axes = plt.subplots(figsize=(7, 4.2))
        millions = [row["capacity_tokens"] / 1e6 for row in rows]
        for name, (marker, line) in MARKS.items():
            rates = [row[name] for row in rows]
            axes.plot(millions, rates, color="black", marker=marker, linestyle=line, label=name)
        axes.axhline(infinite, color="0.55", linestyle=":", label="infinite")
        axes.set_xscale("log")
        axes.set_xticks(millions, [f"{value:g}" for value in millions])
        axes.minorticks_off()
        axes.set(xlabel="capacity, million tokens", ylabel="hit rate", ylim=(0, 0.4))
        axes.legend(loc="lower right")
        axes.grid(alpha=0.3)
        figure.tight_layout()
        figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.json and (why := machine.why_not_kept(options.json)):
        parser.error(f"--json: {why}")
    requests = read(options.trace)
    total = sum(tokens for _, tokens in requests)
    infinite = simulate(requests, float("inf")) / total
    sys.stdout.write(f"infinite {infinite:.4f}\n")
    rows: list[dict[str, Any]] = []
    for capacity in CAPACITIES:
        rates = measure(requests, int(capacity) // BLOCK_TOKENS, total)
        rows.append({"capacity_tokens": int(capacity), **rates})
        cells = "  ".join(f"{name} {rate:.4f}" for name, rate in rates.items())
        sys.stdout.write(f"{int(capacity):>10} tokens  {cells}\n")
        sys.stdout.flush()
    if options.json:
        head = {"bench": "store_hit_rates", **machine.describe("cpu", 1)}
        head |= {"trace": options.trace.name, "requests": len(requests), "infinite": infinite}
        results.write(options.json, results.Results(head, rows))
    if options.plot:
        plot(options.plot, rows, infinite)


if __name__ == "__main__":
    main()
