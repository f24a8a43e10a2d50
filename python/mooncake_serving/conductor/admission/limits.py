"""The share of its objectives up to which a request is accepted."""

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..decision import PrefillChoice
from ..errors import InvalidArgument, check_instance, shown
from ..reasons import Reason, Why
from ..request import Request, Slo


@dataclass(frozen=True, slots=True)
class Limits:
    """The load, a predicted time over its objective, up to which requests are accepted.

    If low priorities have a lower limit, the rest of the objective is reserved for the others.

    Attributes:
        default: for requests whose priority is not in ``by_priority``; in (0, 1], so that an
            accepted request is predicted to meet the objective.
        by_priority: for the others.
    """

    default: float = 1.0
    by_priority: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that all are in (0, 1]."""
        check_instance("Limits", "by_priority", self.by_priority, Mapping)
        for limit in (self.default, *self.by_priority.values()):
            is_number = isinstance(limit, numbers.Real) and not isinstance(limit, bool)
            if not is_number or not 0 < limit <= 1:
                raise InvalidArgument(f"Limits: a limit must be in (0, 1], got {shown(limit)}")

    def of(self, request: Request) -> float:
        """Return the limit for a request."""
        return self.by_priority.get(request.priority, self.default)

    def refuse_ttft(self, request: Request, slo: Slo, prefill: PrefillChoice) -> Reason | None:
        """Return why a request's predicted TTFT is too long, or None."""
        ttft_s = request.waited_s + prefill.ttft_s
        load, limit = ttft_s / slo.ttft_s, self.of(request)
        if load <= limit:
            return None
        return Reason(Why.PREFILL_LOAD, {"ttft_s": ttft_s, "load": load, "limit": limit})

    def refuse_tbt(self, request: Request, slo: Slo, tbt_s: float) -> Reason | None:
        """Return why a predicted TBT is too long, or None."""
        load, limit = tbt_s / slo.tbt_s, self.of(request)
        if load <= limit:
            return None
        return Reason(Why.DECODE_LOAD, {"tbt_s": tbt_s, "load": load, "limit": limit})
