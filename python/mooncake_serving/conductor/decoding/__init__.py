"""Where a request is decoded, and forecasts of the decode load."""

from .choose import choose_decode, has_room
from .in_flight import InFlight
from .load import DecodeLoad

__all__ = ["DecodeLoad", "InFlight", "choose_decode", "has_room"]
