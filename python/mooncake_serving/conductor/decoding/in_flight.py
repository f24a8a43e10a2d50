"""The requests in flight, and the decode load at a later time."""

from collections.abc import Hashable

import numpy as np

from ..request import Request
from .load import DecodeLoad

FIRST_CAPACITY = 64


class InFlight:
    """Requests that were accepted and are not over, as arrays: when and where decoding begins.

    A forecast over all of them takes a few numpy passes, whatever their number.
    """

    def __init__(self) -> None:
        self._slot: dict[Hashable, int] = {}
        self._request_ids: list[Hashable] = []  # by slot
        self._instance = np.zeros(FIRST_CAPACITY, np.int64)
        self._begin_s = np.zeros(FIRST_CAPACITY)
        self._tokens = np.zeros(FIRST_CAPACITY)
        self._output_tokens = np.zeros(FIRST_CAPACITY)

    def __len__(self) -> int:
        """Count the requests."""
        return len(self._slot)

    def put(self, request: Request, instance: int, begin_s: float) -> None:
        """Record when and where a request begins to be decoded, or a change of that."""
        slot = self._slot.setdefault(request.request_id, len(self._slot))
        if slot == len(self._request_ids):
            self._request_ids.append(request.request_id)
        if slot == len(self._begin_s):
            self._grow()
        self._instance[slot] = instance
        self._begin_s[slot], self._tokens[slot] = begin_s, request.num_tokens
        self._output_tokens[slot] = request.num_output_tokens

    def remove(self, request_id: Hashable) -> None:
        """Forget a request, if it is there; the last one takes its slot."""
        slot = self._slot.pop(request_id, None)
        if slot is None:
            return
        last, last_id = len(self._slot), self._request_ids.pop()
        if slot == last:
            return
        for array in self._arrays():
            array[slot] = array[last]
        self._request_ids[slot] = last_id
        self._slot[last_id] = slot

    def load_at(self, at_s: float, decode_s: float, num_instances: int) -> DecodeLoad:
        """Forecast the decode load at ``at_s``, if each request is decoded for ``decode_s``.

        Equivalent to::

            for request in in_flight:
                if begin_s <= at_s < begin_s + decode_s: it is in its instance's batch

        Those whose prefill will be over by then are in, those that have been decoded for longer
        are out (arXiv 2407.00079, section 7.4: the system-level prediction, with the uniform
        decoding time t_d).
        """
        used = slice(0, len(self._slot))
        begin_s = self._begin_s[used]
        there = (begin_s <= at_s) & (at_s < begin_s + decode_s)
        instance = self._instance[used][there]

        def total(values: np.ndarray) -> np.ndarray:
            sums = np.bincount(instance, values[used][there], minlength=num_instances)
            return sums.astype(np.int64)

        return DecodeLoad(
            batch_size=np.bincount(instance, minlength=num_instances),
            kv_tokens=total(self._tokens),
            reserved_requests=np.zeros(num_instances, np.int64),
            reserved_tokens=total(self._output_tokens),
        )

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return (self._instance, self._begin_s, self._tokens, self._output_tokens)

    def _grow(self) -> None:
        for array in self._arrays():
            array.resize(2 * len(array), refcheck=False)
