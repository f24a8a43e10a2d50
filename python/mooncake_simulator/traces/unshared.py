"""Hash ids for traces without them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from .request import BLOCK_SIZE, TraceRequest


def unshared(
    requests: Iterable[TraceRequest], *, block_size: int = BLOCK_SIZE
) -> Iterator[TraceRequest]:
    """Give each request its own blocks, as if no two prompts had a common beginning.

    Azure's and BurstGPT's traces do not tell what their prompts share. With this they can be
    written in Mooncake's format, and fill caches as they would, without a hit.
    """
    first = 0
    for request in requests:
        stop = first - (-request.input_length // block_size)
        yield replace(request, hash_ids=tuple(range(first, stop)))
        first = stop
