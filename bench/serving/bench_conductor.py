"""The conductor: one decision, the index behind it, and their costs for 10,000 instances.

`decide` is a prompt of 128k tokens in 256 blocks of 512, by Algorithm 1, with 4 prefill instances
per decode instance. In the worst case each instance holds a different length of it. `in Python` is
the same index as a dict of sets, and the same algorithm in a loop. An update is one block of one
instance that comes or goes. A billion tokens are two million blocks of 512. Restarts are as many as
share one look at every key, an eighth of the instances: that look is in the time.
"""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

from baselines import conductor as base
from lib.harness import Case, arguments
from lib.table import report
from mooncake_serving.conductor import (
    A800_X8,
    LLAMA3_70B,
    Cluster,
    Conductor,
    Costs,
    KVEvent,
    LinearDecode,
    NicTransfer,
    PolynomialPrefill,
    PredictiveRejection,
    PrefixIndex,
    Request,
    Role,
    Roofline,
    RooflinePrefill,
    ShardedIndex,
    Slo,
)
from mooncake_simulator.traces import TraceProfile, synth_trace

PROFILE = Path(__file__).parents[2] / "tests/simulator/conversation.profile.json"
NUM_BLOCKS, BLOCK = 256, 512
SHARDS = 16
ROUND = 200  # chains that come and go in one call


def costs() -> Costs:
    """A polynomial fitted to the roofline of LLaMA3-70B on 8 A800, and its KV over their NICs."""
    line = RooflinePrefill(Roofline(LLAMA3_70B, A800_X8))
    tokens, prefix = (a.ravel() for a in np.meshgrid([1024, 8192, 131072], [0, 512]))
    prefill = PolynomialPrefill.fit(tokens, prefix, line.seconds(tokens, prefix))
    transfer = NicTransfer(LLAMA3_70B.kv_bytes_per_token, A800_X8.nic_bytes_per_s)
    return Costs(prefill, LinearDecode(0.02, 1e-4, 2e-8), transfer)


def make(num_instances: int, lengths: list[int]) -> tuple[Conductor, base.SetIndex, Request]:
    rng = np.random.default_rng(0)
    num_prefill = num_instances * 4 // 5
    roles = [Role.PREFILL] * num_prefill + [Role.DECODE] * (num_instances - num_prefill)
    conductor = Conductor(Cluster(roles), PrefixIndex(num_instances), costs(), Slo(1000, 0.1))
    conductor.cluster.free_at_s[:num_prefill] = rng.uniform(0, 20, num_prefill)
    theirs = base.SetIndex(num_instances)
    keys = tuple(rng.integers(0, 2**63, NUM_BLOCKS).tolist())
    for instance in range(num_prefill):
        held = keys[: lengths[int(rng.integers(len(lengths)))]]
        conductor.index.add(instance, held)
        theirs.add(instance, held)
    return conductor, theirs, Request(0, NUM_BLOCKS * BLOCK, keys, BLOCK)


def decide(name: str, num_instances: int, lengths: list[int], in_flight: int = 0) -> Iterator[Case]:
    conductor, theirs, request = make(num_instances, lengths)
    if in_flight:
        conductor.admission = PredictiveRejection(decode_s=10)
        decoders = conductor.cluster.of_role(Role.DECODE)
        for i in range(in_flight):
            one = Request(i + 1, 1000)
            conductor.in_flight.put(one, int(decoders[i % len(decoders)]), i * 20 / in_flight)

    def loop() -> float:
        return base.least_ttft(conductor, theirs, request, 0.0)

    def check() -> None:
        decision = conductor.decide(request, 0.0)
        assert decision.accepted, decision
        assert abs(decision.prefill.ttft_s / loop() - 1) < 1e-9, "wrong: not timed"

    ours = f"{num_instances:,} instances, {name}"
    yield Case(
        f"decide, {ours}", lambda: conductor.decide(request, 0.0), {"in Python": loop}, check
    )

    if in_flight:
        return  # the index does not know of them

    def check_match() -> None:
        assert conductor.index.match(request.keys).tolist() == theirs.match(request.keys)

    yield Case(
        f"match, {ours}",
        lambda: conductor.index.match(request.keys),
        {"in Python": lambda: theirs.match(request.keys)},
        check_match,
    )


def updates(num_keys: int) -> Iterator[Case]:
    """Chains come and go in an index that holds ``num_keys`` blocks."""
    coming = [(keys, holders[0]) for keys, holders in base.chains(ROUND, seed=1)]

    def turn(index: PrefixIndex | ShardedIndex | base.SetIndex) -> None:
        for keys, holder in coming:
            index.add(holder, keys)
        for keys, holder in coming:
            index.remove(holder, keys)

    makers = {
        "one index": lambda: PrefixIndex(base.NUM_INSTANCES),
        f"{SHARDS} shards": lambda: ShardedIndex(base.NUM_INSTANCES, SHARDS, depth=2),
    }
    for name, maker in makers.items():
        index, theirs = maker(), base.SetIndex(base.NUM_INSTANCES)
        for one in (index, theirs):
            base.fill(one, num_keys)

        def check(index=index) -> None:
            for keys, holder in coming[:10]:
                index.add(holder, keys)
                assert index.match(keys)[holder] == len(keys)
            turn(index)
            assert not any(index.match(keys).any() for keys, _ in coming)

        yield Case(
            f"{2 * ROUND * base.CHAIN_BLOCKS} updates, {num_keys:,} keys, {name}",
            lambda index=index: turn(index),
            {"in Python": lambda theirs=theirs: turn(theirs)},
            check,
            fields={
                "updates": 2 * ROUND * base.CHAIN_BLOCKS,
                "instances": base.NUM_INSTANCES,
            },
        )
        del index, theirs


def restarts(num_keys: int) -> Iterator[Case]:
    """Instances are emptied, or resend all that they hold, in an index of ``num_keys`` blocks."""
    num_restarts = base.NUM_INSTANCES // 8
    index = PrefixIndex(base.NUM_INSTANCES)
    base.fill(index, num_keys)
    held: list[list[tuple[int, ...]]] = [[] for _ in range(num_restarts)]
    for keys, holders in base.chains(num_keys // base.CHAIN_BLOCKS):
        for holder in holders:
            if holder < num_restarts:
                held[holder].append(tuple(keys))
    snapshots = itertools.count()

    def send_all() -> None:
        sequence = next(snapshots)
        for instance, chains in enumerate(held):
            index.apply(KVEvent(instance, sequence, tuple(chains), snapshot=True))

    def check() -> None:
        chain = held[0][0]
        holders = index.holders(chain[-1])
        index.clear(0)
        assert index.holders(chain[-1]) == [i for i in holders if i != 0]
        send_all()
        assert index.holders(chain[-1]) == holders and index.match(chain)[0] == len(chain)

    fields = {"restarts": num_restarts, "instances": base.NUM_INSTANCES}
    blocks = base.CHAIN_BLOCKS * sum(map(len, held))
    yield Case(
        f"{num_restarts:,} snapshots of {blocks // num_restarts} blocks, {num_keys:,} keys",
        send_all,
        {},
        check,
        fields=fields | {"updates": blocks},
    )
    last = base.NUM_INSTANCES - 1
    yield Case(
        f"{num_restarts:,} instances emptied, {num_keys:,} keys",
        lambda: [index.clear(last) for _ in range(num_restarts)],
        {},
        check,
        fields=fields,
    )


def memory(num_keys: int) -> Case:
    """Bytes a key, each kind in its own process; only a single lookup of such a chain is timed."""
    per_key = {}
    for kind in ("ours", "sets"):
        command = [sys.executable, base.__file__, str(num_keys), kind]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        per_key[kind] = float(told)
    index, asked = PrefixIndex(base.NUM_INSTANCES), next(base.chains(1))[0]
    index.add(0, asked)
    return Case(
        f"{per_key['ours']:.0f} bytes a key (sets {per_key['sets']:.0f}), {num_keys:,} keys",
        lambda: index.match(asked),
        {},
        lambda: None,
        fields={"bytes_per_key": per_key, "keys": num_keys, "instances": base.NUM_INSTANCES},
    )


def balance(num_requests: int) -> Iterator[Case]:
    """How even shards are on a made-up conversation trace: the largest one's keys over the mean."""
    trace = synth_trace(TraceProfile.load(PROFILE), num_requests)
    for depth in (1, 2, 4):
        index = ShardedIndex(1, SHARDS, depth=depth)
        for request in trace:
            index.add(0, request.hash_ids)
        sizes = [len(shard) for shard in index.shards]
        largest = max(sizes) / (sum(sizes) / SHARDS)
        copies = sum(sizes) / len({key for request in trace for key in request.hash_ids})
        yield Case(
            f"shard_of, depth {depth}: largest {largest:.2f} of mean, {copies:.2f} copies",
            lambda index=index: [index.shard_of(request.hash_ids) for request in trace],
            {},
            lambda: None,
            fields={"depth": depth, "largest_over_mean": largest, "copies": copies},
        )


def cases(quick: bool) -> Iterator[Case]:
    every, few = list(range(NUM_BLOCKS + 1)), [0, 0, 0, 0, 0, 4, 128, NUM_BLOCKS]
    yield from decide("all lengths", 1000, every)
    yield from decide("4 lengths", 1000, few)
    yield from decide("4 lengths, 20,000 in flight", 1000, few, in_flight=20_000)
    yield from decide("all lengths", 10_000, every)
    yield from decide("4 lengths", 10_000, few)
    num_keys = 100_000 if quick else 2_000_000
    yield from updates(num_keys)
    yield from restarts(num_keys)
    yield memory(num_keys)
    yield from balance(500 if quick else 4000)


if __name__ == "__main__":
    options = arguments(__doc__, without=("device",))
    report("conductor", cases(options.quick), options)
