"""What a cache of a given capacity saves on a trace: hit tokens over input tokens."""

import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mooncake_serving.conductor import InvalidArgument
from mooncake_serving.conductor.errors import check_count

from .caches import BlockCache, Key, make_policy
from .caches.frequency import Belady


class Prompt(Protocol):
    """What the replay needs of a request."""

    @property
    def input_length(self) -> int: ...

    @property
    def hash_ids(self) -> Sequence[Key]: ...


@dataclass(frozen=True)
class HitRate:
    """The result of a replay; tokens of the measured requests, without the warm-up."""

    capacity_tokens: float
    hit_tokens: int
    input_tokens: int

    @property
    def hit_rate(self) -> float:
        """Hit tokens over input tokens; 0 for an empty trace."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


def replay(
    requests: Iterable[Prompt],
    capacity_tokens: float,
    *,
    policy: str = "lru",
    block_tokens: int = 512,
    warm_up: float = 0.0,
) -> HitRate:
    """Replay a trace against one pool of blocks.

    for request: hit += tokens of its longest cached prefix of whole blocks; store all its blocks

    The last block of a prompt counts with the number of its tokens in the block.

    Args:
        requests: in the order of their arrival.
        capacity_tokens: of the pool, rounded down to whole blocks; inf for no limit.
        policy: lru, fifo, lfu, length-aware, sieve or belady.
        block_tokens: tokens of a block.
        warm_up: the first requests, up to this share, fill the cache and are not counted.

    Raises:
        InvalidArgument: capacity_tokens is negative or not a number, block_tokens is below 1, or
            warm_up is not in [0, 1).
        ValueError: there is no such policy.

    Source: Mooncake (FAST'25), section 5.3.1 and Figure 9.
    """
    if not (isinstance(capacity_tokens, numbers.Real) and capacity_tokens >= 0):
        raise InvalidArgument(f"replay: capacity_tokens must be >= 0, got {capacity_tokens!r}")
    check_count("replay", "block_tokens", block_tokens, 1)
    if not (isinstance(warm_up, numbers.Real) and 0 <= warm_up < 1):
        raise InvalidArgument(f"replay: warm_up must be in [0, 1), got {warm_up!r}")
    prompts = list(requests)
    rule = make_policy(policy, [prompt.hash_ids for prompt in prompts])
    unlimited = capacity_tokens == float("inf")
    cache = BlockCache(None if unlimited else int(capacity_tokens // block_tokens), rule)
    first = int(len(prompts) * warm_up)
    hit_tokens = input_tokens = 0
    for index, prompt in enumerate(prompts):
        if isinstance(rule, Belady):
            rule.begin()
        if index >= first:
            blocks = cache.match(prompt.hash_ids)
            hit_tokens += min(blocks * block_tokens, prompt.input_length)
            input_tokens += prompt.input_length
        cache.insert(prompt.hash_ids)
    return HitRate(capacity_tokens, hit_tokens, input_tokens)
