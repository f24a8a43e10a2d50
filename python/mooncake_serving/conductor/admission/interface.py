"""The interface of an admission rule."""

from dataclasses import dataclass
from typing import Protocol

from ..cluster import Cluster
from ..costs import DecodeCost
from ..decision import DecodeChoice, PrefillChoice
from ..decoding import DecodeLoad, InFlight
from ..reasons import Reason
from ..request import Request, Slo


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request whose prefill is chosen, with everything that a rule may use.

    Attributes:
        request: that has arrived.
        slo: its objectives.
        now_s: time of the decision.
        prefill: where it would be prefilled.
        cluster: the state of all instances.
        in_flight: requests that were accepted and are not over.
        decode_cost: cost of a step.
    """

    request: Request
    slo: Slo
    now_s: float
    prefill: PrefillChoice
    cluster: Cluster
    in_flight: InFlight
    decode_cost: DecodeCost


class Admission(Protocol):
    """Decides which requests are accepted under overload; None means accepted.

    ``decode_load`` and ``refuse_prefill`` are called at arrival, the former once more if another
    instance is to prefill, since the first has no room to decode. If there is a load, decode is
    chosen by it and ``refuse_decode`` is called. ``refuse_later`` is called once the prefill is
    over.
    """

    @property
    def needs_room(self) -> bool:
        """Whether only instances with room for a request's KV may be chosen to decode."""
        ...

    def refuse_prefill(self, arrival: Arrival) -> Reason | None:
        """Check the predicted TTFT."""
        ...

    def decode_load(self, arrival: Arrival) -> DecodeLoad | None:
        """Return the load by which decode is chosen at arrival; None to choose it later."""
        ...

    def refuse_decode(
        self, arrival: Arrival, load: DecodeLoad, decode: DecodeChoice
    ) -> Reason | None:
        """Check the predicted TBT."""
        ...

    def refuse_later(self, request: Request, slo: Slo, decode: DecodeChoice) -> Reason | None:
        """Check the predicted TBT when the prefill is over."""
        ...
