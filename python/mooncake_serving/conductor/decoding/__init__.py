"""Where a request is decoded, and what will be decoded later on."""

from .choose import choose_decode
from .in_flight import InFlight
from .load import DecodeLoad

__all__ = ["DecodeLoad", "InFlight", "choose_decode"]
