"""The prefills that each engine was sent and has not finished: how long a new one waits."""

from collections.abc import Hashable

import numpy as np


class PrefillBacklog:
    """Predicts from what is under way when each of ``n`` engines can begin another prefill.

    The prefills of an engine are taken to run one after the other, in their order. One that takes
    longer than predicted counts as about to end. Times are of one clock, in seconds.
    """

    def __init__(self, num_instances: int):
        self._queues: list[dict[Hashable, float]] = [{} for _ in range(num_instances)]
        self._shared: set[Hashable] = set()
        self._total_s = np.zeros(num_instances)
        self._head_s = np.zeros(num_instances)
        self._head_since_s = np.zeros(num_instances)

    def put(self, request_id: Hashable, instance: int, seconds: float, now_s: float) -> None:
        """Add a prefill that is predicted to take ``seconds``."""
        queue = self._queues[instance]
        if queue:
            self._shared.update(queue, [request_id])
        queue[request_id] = seconds
        self._set(instance, now_s if len(queue) == 1 else None)

    def revise(self, request_id: Hashable, instance: int, seconds: float) -> None:
        """Predict anew how long a prefill takes that is not over."""
        self._queues[instance][request_id] = seconds
        self._set(instance, None)

    def end(self, request_id: Hashable, instance: int, now_s: float) -> bool:
        """Take out a prefill, over or given up.

        Returns:
            Whether it was there, and no other one on its engine at any time meanwhile.
        """
        queue = self._queues[instance]
        was_alone = request_id in queue and request_id not in self._shared
        self._shared.discard(request_id)
        was_first = next(iter(queue), None) == request_id
        queue.pop(request_id, None)
        self._set(instance, now_s if was_first else None)
        return was_alone

    def length(self, instance: int) -> int:
        """How many prefills an engine has not finished."""
        return len(self._queues[instance])

    def free_at_s(self, now_s: float) -> np.ndarray:
        """Return ``[n]``, when each engine can begin another prefill."""
        done_s = np.minimum(now_s - self._head_since_s, self._head_s)
        return now_s + np.maximum(self._total_s - done_s, 0.0)

    def _set(self, instance: int, head_since_s: float | None) -> None:
        queue = self._queues[instance]
        self._total_s[instance] = sum(queue.values())
        self._head_s[instance] = next(iter(queue.values()), 0.0)
        if head_since_s is not None:
            self._head_since_s[instance] = head_since_s
