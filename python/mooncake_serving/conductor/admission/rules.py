"""Who is taken under overload: the three rules of the paper, and everybody.

arXiv 2407.00079, section 7: load is a predicted time over its objective. To refuse a request after
its prefill wastes that; to refuse it at its arrival by what is decoded then makes prefill and
decode loads swing against each other, for a request is decoded only when its prefill is over.
"""

from dataclasses import dataclass, field

import numpy as np

from ..cluster import Role
from ..decision import DecodeChoice
from ..decoding import DecodeLoad
from ..errors import check_positive
from ..reasons import Reason, Why
from ..request import Request, Slo
from .interface import Arrival
from .limits import Limits


@dataclass(frozen=True, slots=True)
class AcceptAll:
    """Everybody is taken; who finds no room waits where it is to be decoded."""

    needs_room: bool = False

    def refuse_prefill(self, arrival: Arrival) -> Reason | None:
        """Refuse nobody."""
        return None

    def decode_load(self, arrival: Arrival) -> DecodeLoad | None:
        """Choose by what is decoded now."""
        return DecodeLoad.now(arrival.cluster)

    def refuse_decode(
        self, arrival: Arrival, load: DecodeLoad, decode: DecodeChoice
    ) -> Reason | None:
        """Refuse nobody."""
        return None

    def refuse_later(self, request: Request, slo: Slo, decode: DecodeChoice) -> Reason | None:
        """Refuse nobody."""
        return None


@dataclass(frozen=True, slots=True)
class Baseline:
    """TTFT is looked at when a request arrives, TBT when its prefill is over (section 7.1)."""

    limits: Limits = field(default_factory=Limits)
    needs_room: bool = True

    def refuse_prefill(self, arrival: Arrival) -> Reason | None:
        """Look at the TTFT that is predicted."""
        return self.limits.refuse_ttft(arrival.request, arrival.slo, arrival.prefill)

    def decode_load(self, arrival: Arrival) -> DecodeLoad | None:
        """Choose later."""
        return None

    def refuse_decode(
        self, arrival: Arrival, load: DecodeLoad, decode: DecodeChoice
    ) -> Reason | None:
        """Refuse nobody at arrival."""
        return None

    def refuse_later(self, request: Request, slo: Slo, decode: DecodeChoice) -> Reason | None:
        """Look at the TBT that is predicted: by now the prefill is wasted."""
        return self.limits.refuse_tbt(request, slo, decode)


@dataclass(frozen=True, slots=True)
class EarlyRejection(Baseline):
    """Both are looked at when a request arrives, by what is decoded then (section 7.2).

    Attributes:
        check_again: look at the TBT once more when the prefill is over, as the decoding
            instance's own scheduler does in the paper.
    """

    check_again: bool = True

    def decode_load(self, arrival: Arrival) -> DecodeLoad | None:
        """Choose by what is decoded now."""
        return DecodeLoad.now(arrival.cluster)

    def refuse_decode(
        self, arrival: Arrival, load: DecodeLoad, decode: DecodeChoice
    ) -> Reason | None:
        """Look at the TBT that is predicted."""
        return self.limits.refuse_tbt(arrival.request, arrival.slo, decode)

    def refuse_later(self, request: Request, slo: Slo, decode: DecodeChoice) -> Reason | None:
        """Look at it once more, if that is wanted."""
        return self.limits.refuse_tbt(request, slo, decode) if self.check_again else None


@dataclass(frozen=True, slots=True)
class PredictiveRejection(EarlyRejection):
    """Both at arrival, TBT by what will be decoded when the prefill is over (section 7.4).

    Every request in flight is taken to be decoded for ``decode_s`` (the paper's t_d). The load is
    the mean over all instances that decode; beyond the paper, the chosen instance's own TBT must
    meet its limit, too, so that who is taken is predicted to meet its objective.
    """

    decode_s: float = 10.0

    def __post_init__(self) -> None:
        """Check ``decode_s``."""
        check_positive("PredictiveRejection", "decode_s", self.decode_s)

    def decode_load(self, arrival: Arrival) -> DecodeLoad | None:
        """Choose by what will be decoded when this prefill is over."""
        horizon_s = arrival.now_s + arrival.prefill.ttft_s
        num_instances = arrival.cluster.num_instances
        return arrival.in_flight.load_at(horizon_s, self.decode_s, num_instances)

    def refuse_decode(
        self, arrival: Arrival, load: DecodeLoad, decode: DecodeChoice
    ) -> Reason | None:
        """Look at the mean TBT that is forecast, and at the chosen one's."""
        decoders = arrival.cluster.of_role(Role.DECODE)
        tbt_s = arrival.decode_cost.seconds(load.batch_size[decoders], load.kv_tokens[decoders])
        tbt_s = np.where(decoders == decode.instance, decode.tbt_s, tbt_s)
        mean, limit = float(tbt_s.mean()) / arrival.slo.tbt_s, self.limits.of(arrival.request)
        if mean > limit:
            values = {"horizon_s": arrival.prefill.ttft_s, "load": mean, "limit": limit}
            return Reason(Why.FORECAST_LOAD, values)
        return self.limits.refuse_tbt(arrival.request, arrival.slo, decode)
