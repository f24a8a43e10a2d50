"""Which ranks of a sending engine a rank of a receiving engine needs."""

from collections.abc import Mapping

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument

# Numbers of heads of a group that has none: every rank holds it whole, as MLA's latents; or each
# rank has a part of its own that cannot be divided, as states of recurrent layers.
REPLICATED, INDIVISIBLE = 0, -1


def sources(num_heads: Mapping[str, int], num_senders: int, rank: int, num_ranks: int) -> list[int]:
    """Return the sender ranks that together hold what a receiver rank needs, each part once.

    Where several hold the same heads, receivers are spread over them.

    Args:
        num_heads: KV heads of the model, for each group of its cache; ``REPLICATED`` if every rank
            holds all of it, ``INDIVISIBLE`` if as many ranks on the other side have the same parts.
        num_senders: ranks of the sending engine.
        rank: of the receiving engine.
        num_ranks: of the receiving engine.

    Raises:
        InvalidArgument: heads cannot be divided so.
    """
    needed: set[int] = set()
    for heads in num_heads.values():
        if heads == REPLICATED:
            needed.add(rank % num_senders)
            continue
        if heads == INDIVISIBLE:
            if num_senders != num_ranks:
                raise InvalidArgument(
                    "sources: num_senders must be num_ranks for a group whose parts cannot be "
                    f"divided, as of recurrent layers, got {num_senders} and {num_ranks}"
                )
            needed.add(rank)
            continue
        holders: dict[tuple[int, int], list[int]] = {}  # of the same heads
        for sender in range(num_senders):
            if mk.shard_heads(heads, (sender, num_senders), (rank, num_ranks)) is not None:
                of_sender = sender * heads // num_senders, max(1, heads // num_senders)
                holders.setdefault(of_sender, []).append(sender)
        needed |= {same[rank % len(same)] for same in holders.values()}
    return sorted(needed)


def first_head(num_heads: int, rank: int, num_ranks: int) -> int:
    """Return the number in the model of a rank's first head, as ``Packer`` takes it."""
    return 0 if num_heads in (REPLICATED, INDIVISIBLE) else rank * num_heads // num_ranks
