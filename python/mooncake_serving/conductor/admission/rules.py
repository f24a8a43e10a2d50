"""Which requests are accepted under overload: the three rules of the paper, and accepting all.

arXiv 2407.00079, section 7: load is a predicted time over its objective. Refusing a request after
its prefill wastes the prefill; refusing it at arrival by the current decode load makes prefill and
decode loads oscillate against each other, since a request is decoded only when its prefill is over.
"""

from dataclasses import dataclass, field, fields

import numpy as np

from ..cluster import Role
from ..decision import DecodeChoice
from ..decoding import DecodeLoad
from ..errors import check_flag, check_instance, check_positive
from ..reasons import Reason, Why
from ..request import Request, Slo
from .interface import Arrival
from .limits import Limits


@dataclass(frozen=True, slots=True)
class AcceptAll:
    """Accepts all requests; one that finds no room waits where it is to be decoded.

    A request that no instance can serve is refused under every rule: it is too long for all, or all
    that prefill or decode are down. Then its owner decides about it again when one is back.
    """

    needs_room: bool = False

    def __post_init__(self) -> None:
        """Check ``needs_room``."""
        check_flag("AcceptAll", "needs_room", self.needs_room)

    def refuse_prefill(self, arrival: Arrival) -> Reason | None:
        """Refuse nothing."""
        return None

    def decode_load(self, arrival: Arrival) -> DecodeLoad | None:
        """Choose by the current load."""
        return DecodeLoad.now(arrival.cluster)

    def refuse_decode(
        self, arrival: Arrival, load: DecodeLoad, decode: DecodeChoice
    ) -> Reason | None:
        """Refuse nothing."""
        return None

    def refuse_later(self, request: Request, slo: Slo, decode: DecodeChoice) -> Reason | None:
        """Refuse nothing."""
        return None


@dataclass(frozen=True, slots=True)
class _WithinLimits:
    """The common part of the rules: TTFT is checked when a request arrives."""

    limits: Limits = field(default_factory=Limits)
    needs_room: bool = True

    def __post_init__(self) -> None:
        """Check ``limits``, and all that is True or False."""
        op = type(self).__name__
        check_instance(op, "limits", self.limits, Limits)
        for flag in fields(self):
            if isinstance(flag.default, bool):
                check_flag(op, flag.name, getattr(self, flag.name))

    def refuse_prefill(self, arrival: Arrival) -> Reason | None:
        """Check the predicted TTFT."""
        return self.limits.refuse_ttft(arrival.request, arrival.slo, arrival.prefill)


@dataclass(frozen=True, slots=True)
class Baseline(_WithinLimits):
    """TTFT is checked when a request arrives, TBT when its prefill is over (section 7.1).

    Attributes:
        pre_select: choose where to decode when the request arrives, as algorithm 1 does, so that KV
            streams there during the prefill; otherwise when the prefill is over, by the load at
            that time.
    """

    pre_select: bool = False

    def decode_load(self, arrival: Arrival) -> DecodeLoad | None:
        """Choose by the current load, or later."""
        return DecodeLoad.now(arrival.cluster) if self.pre_select else None

    def refuse_decode(
        self, arrival: Arrival, load: DecodeLoad, decode: DecodeChoice
    ) -> Reason | None:
        """Refuse nothing at arrival."""
        return None

    def refuse_later(self, request: Request, slo: Slo, decode: DecodeChoice) -> Reason | None:
        """Check the predicted TBT: if it is refused now, the prefill is wasted."""
        return self.limits.refuse_tbt(request, slo, decode.tbt_s)


@dataclass(frozen=True, slots=True)
class EarlyRejection(_WithinLimits):
    """Both are checked when a request arrives, by the load at that time (section 7.2).

    The decode load is the mean over all decoding instances, since the paper compares one load of
    the pool.

    Attributes:
        per_instance: the chosen instance's own TBT must meet its limit, too, so that an accepted
            request is predicted to meet its objective; beyond the paper.
        check_again: check the TBT once more when the prefill is over, as the decoding instance's
            own scheduler does in the paper.
    """

    per_instance: bool = True
    check_again: bool = True

    def decode_load(self, arrival: Arrival) -> DecodeLoad | None:
        """Choose by the current load."""
        return DecodeLoad.now(arrival.cluster)

    def refuse_decode(
        self, arrival: Arrival, load: DecodeLoad, decode: DecodeChoice
    ) -> Reason | None:
        """Check the predicted mean TBT, and that of the chosen instance if ``per_instance``."""
        if reason := self._refuse_pool(arrival, _mean_tbt_s(arrival, load, decode)):
            return reason
        if not self.per_instance:
            return None
        return self.limits.refuse_tbt(arrival.request, arrival.slo, decode.tbt_s)

    def refuse_later(self, request: Request, slo: Slo, decode: DecodeChoice) -> Reason | None:
        """Check it once more, if ``check_again``."""
        return self.limits.refuse_tbt(request, slo, decode.tbt_s) if self.check_again else None

    def _refuse_pool(self, arrival: Arrival, mean_tbt_s: float) -> Reason | None:
        return self.limits.refuse_tbt(arrival.request, arrival.slo, mean_tbt_s)


@dataclass(frozen=True, slots=True)
class PredictiveRejection(EarlyRejection):
    """Both at arrival, TBT by the predicted load when the prefill is over (section 7.4).

    Every request in flight is assumed to be decoded for ``decode_s`` (the paper's t_d).
    """

    decode_s: float = 10.0

    def __post_init__(self) -> None:
        """Check ``limits`` and ``decode_s``."""
        EarlyRejection.__post_init__(self)  # super() finds no class with slots
        check_positive("PredictiveRejection", "decode_s", self.decode_s)

    def decode_load(self, arrival: Arrival) -> DecodeLoad | None:
        """Choose by the predicted load when this prefill is over."""
        horizon_s = arrival.now_s + arrival.prefill.ttft_s
        num_instances = arrival.cluster.num_instances
        return arrival.in_flight.load_at(horizon_s, self.decode_s, num_instances)

    def _refuse_pool(self, arrival: Arrival, mean_tbt_s: float) -> Reason | None:
        load, limit = mean_tbt_s / arrival.slo.tbt_s, self.limits.of(arrival.request)
        if load <= limit:
            return None
        values = {"horizon_s": arrival.prefill.ttft_s, "load": load, "limit": limit}
        return Reason(Why.FORECAST_LOAD, values)


def _mean_tbt_s(arrival: Arrival, load: DecodeLoad, decode: DecodeChoice) -> float:
    """Predict the mean TBT of all decoding instances, including the request."""
    decoders = arrival.cluster.of_role(Role.DECODE)
    tbt_s = arrival.decode_cost.seconds(load.batch_size[decoders], load.kv_tokens[decoders])
    return float(np.where(decoders == decode.instance, decode.tbt_s, tbt_s).mean())
