"""The state of all instances, as arrays: what the conductor decides by."""

from collections.abc import Sequence
from enum import IntFlag

import numpy as np

from .errors import InvalidArgument, check_sized


class Role(IntFlag):
    """What an instance does; ``BOTH`` is an instance that does not hand its requests on."""

    PREFILL = 1
    DECODE = 2
    BOTH = 3


class Cluster:
    """The state of ``n`` instances, numbered from 0; the owner writes it, the conductor reads it.

    An instance keeps its number for good, whatever its role becomes, and whether it is up or not.
    All times are seconds of one clock, of which only differences count. An array's element may be
    written at any time between two decisions. :class:`~.conductor.Conductor` writes what it
    promises (``book``), so that the next decision knows of it; what an instance then reports
    overwrites this.

    Attributes:
        role: ``[n]`` int8, a :class:`Role`.
        up: ``[n]`` bool; an instance that is not up gets nothing, and nothing is fetched from it.
        free_at_s: ``[n]`` float64, when an instance can begin the prefill after those it was given.
        drain_s: ``[n]`` float64, for how long after that the last is still in the later stages of
            a pipeline, where the next one does not overtake it.
        sending_until_s: ``[n]`` float64, when its NIC will have sent all the KV it has been asked
            for, at its full bandwidth.
        num_sending: ``[n]`` int64, transfers among which it shares that bandwidth.
        batch_size: ``[n]`` int64, requests that it decodes now.
        kv_tokens: ``[n]`` int64, tokens whose KV these hold now; it grows as they are decoded.
        reserved_requests: ``[n]`` int64, requests that it will decode once they are prefilled.
        reserved_tokens: ``[n]`` int64, memory kept: for those, and for what is still to be
            generated of those that it decodes.
        capacity_tokens: ``[n]`` int64, tokens whose KV its memory holds for decoding.
        max_batch_size: ``[n]`` int64, requests that it decodes at once.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        *,
        capacity_tokens: int | Sequence[int] = 2**62,
        max_batch_size: int | Sequence[int] = 2**31,
    ) -> None:
        check_sized("Cluster", "roles", roles, "a list of Role")
        n = len(roles)
        if not n:
            raise InvalidArgument(f"Cluster: roles must be of at least one instance, got {roles!r}")
        if any(role not in (Role.PREFILL, Role.DECODE, Role.BOTH) for role in roles):
            raise InvalidArgument(f"Cluster: roles must be of Role, got {list(roles)[:8]}")
        _check_each("capacity_tokens", capacity_tokens, n, 0)
        _check_each("max_batch_size", max_batch_size, n, 1)
        self.role = np.array([int(role) for role in roles], np.int8)
        self.up = np.ones(n, bool)
        self.free_at_s = np.zeros(n)
        self.drain_s = np.zeros(n)
        self.sending_until_s = np.zeros(n)
        self.num_sending = np.zeros(n, np.int64)
        self.batch_size = np.zeros(n, np.int64)
        self.kv_tokens = np.zeros(n, np.int64)
        self.reserved_requests = np.zeros(n, np.int64)
        self.reserved_tokens = np.zeros(n, np.int64)
        self.capacity_tokens = np.full(n, capacity_tokens, np.int64)
        self.max_batch_size = np.full(n, max_batch_size, np.int64)

    @property
    def num_instances(self) -> int:
        """Count the instances, those that are down too."""
        return len(self.role)

    def of_role(self, role: Role) -> np.ndarray:
        """List the instances that are up and do ``role``, others beside it or not, ascending."""
        return np.flatnonzero(self.up & (self.role & int(role) != 0))

    def of_role_only(self, role: Role) -> np.ndarray:
        """List the instances that are up and do ``role`` and no other, ascending."""
        return np.flatnonzero(self.up & (self.role == int(role)))

    def most_kv_tokens(self, instances: np.ndarray) -> np.ndarray:
        """Tell how long a request that is prefilled on each of ``instances`` may become at most.

        It is decoded there, or on the largest instance that only decodes. That one may be down, and
        back when the prefill is over; without any there is no limit that is known.
        """
        decoders = self.capacity_tokens[self.role == Role.DECODE]
        largest = decoders.max() if len(decoders) else np.iinfo(np.int64).max
        capacity = self.capacity_tokens[instances]
        return np.where(self.role[instances] == Role.BOTH, capacity, largest)

    def wait_s(self, instances: np.ndarray, now_s: float) -> np.ndarray:
        """Tell how long a new request waits on each of ``instances`` before its prefill begins."""
        return np.maximum(self.free_at_s[instances] - now_s, 0.0)

    def drain_left_s(self, instances: np.ndarray, now_s: float) -> np.ndarray:
        """Tell what of ``drain_s`` is left of each of ``instances`` when a new request begins."""
        idle_s = np.maximum(now_s - self.free_at_s[instances], 0.0)
        return np.maximum(self.drain_s[instances] - idle_s, 0.0)

    def backlog_s(self, instances: np.ndarray, now_s: float) -> np.ndarray:
        """Tell how long each of ``instances`` needs to send what it has been asked for."""
        return np.maximum(self.sending_until_s[instances] - now_s, 0.0)

    def reset(self, instance: int) -> None:
        """Forget all that an instance does: it has failed, or begins anew."""
        for state in (
            self.free_at_s,
            self.drain_s,
            self.sending_until_s,
            self.num_sending,
            self.batch_size,
            self.kv_tokens,
            self.reserved_requests,
            self.reserved_tokens,
        ):
            state[instance] = 0


def _check_each(name: str, value: int | Sequence[int], count: int, low: int) -> None:
    """Refuse what is not a number, or as many as there are instances, of at least ``low``."""
    values = np.asarray(value)
    is_good = values.dtype.kind in "iu" and values.shape in ((), (count,)) and (values >= low).all()
    if not is_good:
        raise InvalidArgument(
            f"Cluster: {name} must be an integer of at least {low}, or {count} of them, "
            f"got {value!r:.80}"
        )
