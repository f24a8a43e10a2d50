"""A cluster with costs that are easy to add up by hand."""

from mooncake_serving.conductor import (
    Cluster,
    Conductor,
    Costs,
    LinearDecode,
    NicTransfer,
    PolynomialPrefill,
    PrefixIndex,
    Request,
    Role,
    Slo,
)

BLOCK = 100
MS = 1e-3

# 1 ms a token; 10 ms a step and 1 ms a request in it; 10,000 tokens a second.
COSTS = Costs(
    PolynomialPrefill(base_s=0, per_token_s=MS, per_pair_s=0),
    LinearDecode(base_s=10 * MS, per_request_s=MS, per_kv_token_s=0),
    NicTransfer(bytes_per_token=1, bytes_per_s=10_000),
)


def request(request_id=0, num_blocks=10, first_key=0, **options) -> Request:
    """A prompt of whole blocks: keys first_key, first_key + 1, ..."""
    keys = tuple(range(first_key, first_key + num_blocks))
    return Request(request_id, num_blocks * BLOCK, keys, BLOCK, **options)


def make(num_prefill=2, num_decode=1, *, slo=None, capacity_tokens=10**9, **options) -> Conductor:
    """Prefill instances come first."""
    roles = [Role.PREFILL] * num_prefill + [Role.DECODE] * num_decode
    cluster = Cluster(roles, capacity_tokens=capacity_tokens)
    index = PrefixIndex(len(roles))
    return Conductor(cluster, index, COSTS, slo or Slo(30, 0.1), **options)


STATE = ("num_sending", "batch_size", "kv_tokens", "reserved_requests", "reserved_tokens")


def state(conductor: Conductor) -> dict[str, list[int]]:
    """Everything that the reservations count, by instance."""
    return {name: getattr(conductor.cluster, name).tolist() for name in STATE}


def longest(held: set[int], keys) -> int:
    """Count the leading keys that are held."""
    return next((i for i, key in enumerate(keys) if key not in held), len(keys))


def chain(tail: int, length: int) -> list[int]:
    """A path through a binary tree of prefixes: the lower bits of ``tail`` are its turns."""
    return [(1 << depth) | (tail & ((1 << depth) - 1)) for depth in range(length)]
