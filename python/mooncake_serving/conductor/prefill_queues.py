"""The prefills that are reserved on each instance, so that any of them can be given up."""

from collections.abc import Hashable
from typing import NamedTuple

from .cluster import Cluster
from .decision import PrefillChoice


class _End(NamedTuple):
    """When the last prefill leaves the first stage, and for how long it is in others after that."""

    free_at_s: float
    drain_s: float


class _Reserved(NamedTuple):
    before: _End  # of the queue before it
    fetched_s: float  # no later prefill delays one that waits for its fetch: all wait for that
    occupied_s: float
    drain_s: float

    @property
    def end(self) -> _End:
        begin_s = max(self.before.free_at_s, self.fetched_s)
        idle_s = begin_s - self.before.free_at_s
        return _End(begin_s + self.occupied_s, max(self.before.drain_s - idle_s, self.drain_s, 0.0))


class PrefillQueues:
    """Moves ``free_at_s`` and ``drain_s`` of a cluster on, and back.

    Example:
        A prefill behind a fetch of 2 s, and one of 1 s behind it, which is done at 3 s::

            queues.put("a", PrefillChoice(instance=0, ...), now_s=0.0)
            queues.put("b", PrefillChoice(instance=0, ...), now_s=0.0)
            queues.give_up("a", 0)  # now "b" is done at 1 s

    What took place is taken from the queue by ``leave``; its time has passed.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._queues: list[dict[Hashable, _Reserved]] = [{} for _ in range(cluster.num_instances)]

    def put(self, request_id: Hashable, prefill: PrefillChoice, now_s: float) -> None:
        """Put a prefill behind those that are reserved on its instance."""
        cluster, instance = self._cluster, prefill.instance
        before = _End(float(cluster.free_at_s[instance]), float(cluster.drain_s[instance]))
        fetch_s = prefill.fetch.seconds if prefill.fetch is not None else 0.0
        reserved = _Reserved(
            before, now_s + fetch_s, prefill.occupied_s, prefill.prefill_s - prefill.occupied_s
        )
        self._queues[instance][request_id] = reserved
        cluster.free_at_s[instance], cluster.drain_s[instance] = reserved.end

    def leave(self, request_id: Hashable, instance: int) -> None:
        """Forget a prefill that is over."""
        self._queues[instance].pop(request_id, None)

    def give_up(self, request_id: Hashable, instance: int) -> None:
        """Take a prefill that will not take place out of the queue; those behind it move up.

        What an instance has reported meanwhile is moved by the difference.
        """
        queue, cluster = self._queues[instance], self._cluster
        if request_id not in queue:
            return
        with_it = next(reversed(queue.values())).end
        given_up = list(queue).index(request_id)
        end = queue[request_id].before
        for behind in list(queue)[given_up + 1 :]:
            queue[behind] = queue[behind]._replace(before=end)
            end = queue[behind].end
        del queue[request_id]
        cluster.free_at_s[instance] += end.free_at_s - with_it.free_at_s
        if cluster.drain_s[instance] == with_it.drain_s:
            cluster.drain_s[instance] = end.drain_s
