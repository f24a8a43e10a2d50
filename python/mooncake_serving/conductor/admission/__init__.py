"""Which requests are accepted under overload."""

from .interface import Admission, Arrival
from .limits import Limits
from .rules import AcceptAll, Baseline, EarlyRejection, PredictiveRejection

__all__ = [
    "AcceptAll",
    "Admission",
    "Arrival",
    "Baseline",
    "EarlyRejection",
    "Limits",
    "PredictiveRejection",
]
