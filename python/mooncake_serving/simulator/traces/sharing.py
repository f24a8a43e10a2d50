"""How requests share prefixes: what each has in common with those before it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .request import TraceRequest


@dataclass(frozen=True, slots=True)
class Sharing:
    """What one request shares with an earlier one.

    Attributes:
        matched_blocks: its first blocks that an earlier request had, too.
        age: how many requests ago the last of these blocks was used last; 0 if there are none.
        parent_blocks: of the request that used it.
    """

    matched_blocks: int
    age: int
    parent_blocks: int


def sharing_of(requests: Iterable[TraceRequest]) -> Iterator[Sharing]:
    """Tell for each request in turn what a cache that never forgets would have of it."""
    last_use: dict[int, tuple[int, int]] = {}
    for index, request in enumerate(requests):
        matched = 0
        for hash_id in request.hash_ids:
            if hash_id not in last_use:
                break
            matched += 1
        if matched:
            used_at, parent_blocks = last_use[request.hash_ids[matched - 1]]
            yield Sharing(matched, index - used_at, parent_blocks)
        else:
            yield Sharing(0, 0, 0)
        use = (index, len(request.hash_ids))
        for hash_id in request.hash_ids:
            last_use[hash_id] = use
