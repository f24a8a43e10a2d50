"""Which instance should change between prefill and decode: advice, since a switch takes time."""

from dataclasses import dataclass

import numpy as np

from .cluster import Cluster, Role
from .costs import DecodeCost
from .errors import InvalidArgument, check_at_least, check_count, shown
from .reasons import Reason, Why
from .request import Slo


@dataclass(frozen=True, slots=True)
class RoleAdvice:
    """One instance that should change its role once its current work is done."""

    instance: int
    role: Role
    reason: Reason


@dataclass(slots=True)
class RoleAdvisor:
    """Advises to move one instance from the side with spare capacity to the overloaded side.

    The load of a side is a mean of predicted times over their objectives: for prefill the wait
    until a new request could begin, for decode the TBT with all reservations or, if higher, the
    share of memory in use. One instance is moved if one load is over ``high``, the other is under
    ``low``, and would stay under ``high`` with one instance less. (Mooncake, FAST'25 figure 15,
    shows how TTFT and TBT trade off with the ratio of the two.)

    Attributes:
        high: threshold of the overloaded side.
        low: threshold of the other side; below ``high``, to prevent oscillation.
        cooldown_s: between two pieces of advice.
        min_instances: that each side keeps.
    """

    high: float = 0.8
    low: float = 0.4
    cooldown_s: float = 60.0
    min_instances: int = 1
    last_s: float = -np.inf

    def __post_init__(self) -> None:
        """Check that the numbers make sense together."""
        if not 0 <= self.low < self.high:
            got = f"{shown(self.low)} and {shown(self.high)}"
            raise InvalidArgument(f"RoleAdvisor: low must be below high, got {got}")
        check_at_least("RoleAdvisor", "cooldown_s", self.cooldown_s, 0)
        check_count("RoleAdvisor", "min_instances", self.min_instances, 1)

    def advise(
        self, cluster: Cluster, cost: DecodeCost, slo: Slo, now_s: float
    ) -> RoleAdvice | None:
        """Choose which instance should change its role, if any: the least loaded of its side."""
        prefillers = cluster.of_role_only(Role.PREFILL)
        decoders = cluster.of_role_only(Role.DECODE)
        if now_s - self.last_s < self.cooldown_s or not (len(prefillers) and len(decoders)):
            return None
        prefill_loads = cluster.wait_s(prefillers, now_s) / slo.ttft_s
        decode_loads = _decode_loads(cluster, decoders, cost, slo)
        values = {
            "prefill_load": float(prefill_loads.mean()),
            "decode_load": float(decode_loads.mean()),
            "high": self.high,
        }
        if self._may_move(values["prefill_load"], decode_loads):
            instance = int(decoders[decode_loads.argmin()])
            advice = RoleAdvice(instance, Role.PREFILL, Reason(Why.PREFILL_SHORT, values))
        elif self._may_move(values["decode_load"], prefill_loads):
            instance = int(prefillers[prefill_loads.argmin()])
            advice = RoleAdvice(instance, Role.DECODE, Reason(Why.DECODE_SHORT, values))
        else:
            return None
        self.last_s = now_s
        return advice

    def _may_move(self, short: float, others: np.ndarray) -> bool:
        if short <= self.high or len(others) <= self.min_instances:
            return False
        spread = float(others.sum()) / (len(others) - 1)
        return float(others.mean()) < self.low and spread < self.high


def _decode_loads(cluster: Cluster, decoders: np.ndarray, cost: DecodeCost, slo: Slo) -> np.ndarray:
    batch = cluster.batch_size[decoders] + cluster.reserved_requests[decoders]
    tokens = cluster.kv_tokens[decoders] + cluster.reserved_tokens[decoders]
    tbt_s = np.where(batch > 0, cost.seconds(batch, tokens), 0.0)
    capacity = np.maximum(cluster.capacity_tokens[decoders], 1)  # who has none has nothing to do
    return np.maximum(tbt_s / slo.tbt_s, tokens / capacity)
