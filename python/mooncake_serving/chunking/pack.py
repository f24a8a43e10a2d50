"""The content of the next step: decodes first, then prompts, as far as the budget allows."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from mooncake_kernels import ChunkBatch, InvalidArgument

from .arguments import is_integer, shown


class Pending(Protocol):
    """What ``pack_batch`` needs of a request."""

    @property
    def num_computed(self) -> int:
        """Count the tokens whose keys and values are in the cache."""

    @property
    def num_pending(self) -> int:
        """Count the tokens that are still to be computed; 1 for a decode."""


@dataclass(frozen=True)
class PendingRequest:
    """A request as ``pack_batch`` sees it, for callers without a class of their own."""

    request_id: object
    num_computed: int
    num_pending: int


R = TypeVar("R", bound=Pending)


class PackedBatch(ChunkBatch, Generic[R]):
    """A ``ChunkBatch`` that knows the request of each row.

    Attributes:
        requests: the request of each entry of ``q_lens`` and ``kv_lens``.
    """

    def __init__(self, chunks: list[tuple[R, int]]) -> None:
        """Take ``num_tokens`` tokens of each request."""
        self.requests = [request for request, _ in chunks]
        super().__init__(
            [num_tokens for _, num_tokens in chunks],
            [request.num_computed + num_tokens for request, num_tokens in chunks],
        )

    @property
    def chunks(self) -> list[tuple[R, int]]:
        """Return each request with its tokens of this step."""
        return list(zip(self.requests, self.q_lens_list, strict=True))


def pack_batch(
    decodes: Iterable[R],
    prefills: Iterable[R],
    budget: int,
    *,
    waiting: Iterable[R] = (),
    admit: Callable[[R], bool] | None = None,
    max_chunk: int | None = None,
    max_requests: int | None = None,
) -> PackedBatch[R]:
    """Fill a step so that no decode waits for a prompt: decodes, prompts in progress, new requests.

    ::

        for request in decodes:   take its pending tokens, all of them, while they fit
        for request in prefills:  take min(its pending tokens, max_chunk, what is left)
        for request in waiting:   stop unless admit(request); then take as above

    Each part keeps its own order. If a decode does not fit, nothing after it gets a token. A
    request that is refused holds up those after it, so that they cannot starve it.

    Args:
        decodes: requests with one pending token, or a few drafts.
        prefills: requests whose prompts are in progress.
        budget: tokens of the step.
        waiting: new requests, first come first.
        admit: called with a new request before it gets its first tokens: reserves its memory, or
            refuses.
        max_chunk: tokens of one prompt in a step; None: limited by the budget only.
        max_requests: requests of a step; None: any number.

    Returns:
            The batch; its ``requests`` are those taken, in the order of the rows.

    Raises:
            InvalidArgument: a budget or limit is below 1, a request has no pending token or a
            negative number of computed ones, or a decode has more pending than the budget.

    Source: Sarathi-Serve (OSDI'24), Algorithm 3; decode-maximal batches: SARATHI, section 4.3.
    """
    largest = budget if max_chunk is None else max_chunk
    step: _Step[R] = _Step(budget, budget if max_requests is None else max_requests)
    for name, value in (("budget", budget), ("max_chunk", largest), ("max_requests", step.room)):
        if not is_integer(value, 1):
            raise InvalidArgument(
                f"pack_batch: {name} must be an integer of at least 1, got {shown(value)}"
            )
    groups = {"decodes": decodes, "prefills": prefills, "waiting": waiting}
    for name, requests in groups.items():
        if not isinstance(requests, Iterable):
            raise InvalidArgument(f"pack_batch: {name} must be requests, got {shown(requests)}")
    for request in decodes:
        _check_pending(request)
        if request.num_pending > budget:
            raise InvalidArgument(
                f"pack_batch: budget must hold the {request.num_pending} pending tokens of the "
                f"decode {shown(request)}, got {budget}"
            )
        if not step.take(request, request.num_pending):
            return PackedBatch(step.chunks)
    for request in prefills:
        _check_pending(request)
        step.take(request, min(request.num_pending, largest, step.num_left))
    candidates = list(islice(waiting, min(step.num_left, step.room - len(step.chunks))))
    for request in candidates:  # all before the first is admitted, which reserves memory
        _check_pending(request)
    for request in candidates:
        if not step.has_room or (admit is not None and not admit(request)):
            break
        step.take(request, min(request.num_pending, largest, step.num_left))
    return PackedBatch(step.chunks)


def _check_pending(request: Pending) -> None:
    for name in ("num_computed", "num_pending"):
        if not hasattr(request, name):
            raise InvalidArgument(f"pack_batch: requests must have {name}, got {shown(request)}")
    if not is_integer(request.num_computed, 0):
        raise InvalidArgument(
            f"pack_batch: num_computed must be at least 0, got {shown(request)} with "
            f"{shown(request.num_computed)}"
        )
    if not is_integer(request.num_pending, 1):
        raise InvalidArgument(
            f"pack_batch: requests must have pending tokens, got {shown(request)} with "
            f"{shown(request.num_pending)}"
        )


class _Step(Generic[R]):
    """What has been taken, and the remaining limits."""

    def __init__(self, num_tokens: int, num_requests: int) -> None:
        self.chunks: list[tuple[R, int]] = []
        self.num_left, self.room = num_tokens, num_requests

    @property
    def has_room(self) -> bool:
        return self.num_left > 0 and len(self.chunks) < self.room

    def take(self, request: R, num_tokens: int) -> bool:
        fits = self.has_room and num_tokens <= self.num_left
        if fits:
            self.chunks.append((request, num_tokens))
            self.num_left -= num_tokens
        return fits
