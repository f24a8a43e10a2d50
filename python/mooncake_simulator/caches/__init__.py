"""Caches of KV blocks and their eviction policies: lru, fifo, lfu, length-aware, sieve, belady."""

from collections.abc import Sequence

from mooncake_serving.conductor import InvalidArgument

from .cache import BlockCache
from .frequency import Belady, LengthAware, Lfu
from .policy import Key, Policy
from .recency import Fifo, Lru, Sieve

POLICIES: dict[str, type[Policy]] = {
    "lru": Lru,
    "fifo": Fifo,
    "lfu": Lfu,
    "length-aware": LengthAware,
    "sieve": Sieve,
}
OFFLINE = ("belady",)  # needs the whole replay in advance


def make_policy(name: str, prompts: Sequence[Sequence[Key]] = ()) -> Policy:
    """Make a policy by its name; ``prompts``, the whole replay, is only for belady.

    Raises:
        InvalidArgument: there is no policy of this name.
    """
    if name == "belady":
        return Belady(prompts)
    if name not in POLICIES:
        names = ", ".join([*POLICIES, *OFFLINE])
        raise InvalidArgument(f"make_policy: name must be one of {names}, got {name!r}")
    return POLICIES[name]()


__all__ = [
    "OFFLINE",
    "POLICIES",
    "Belady",
    "BlockCache",
    "Fifo",
    "Key",
    "LengthAware",
    "Lfu",
    "Lru",
    "Policy",
    "Sieve",
    "make_policy",
]
