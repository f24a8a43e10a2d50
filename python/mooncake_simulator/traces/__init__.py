"""Traces of requests: read, described, scaled, and generated from a description."""

from .azure import read_azure
from .burstgpt import read_burstgpt
from .errors import InvalidTrace
from .mooncake import read_mooncake, write_mooncake
from .profile import TraceProfile
from .readers import read_trace, reader_of
from .request import BLOCK_SIZE, TraceRequest
from .scale import scale_trace
from .stats import Lengths, TraceStats, trace_stats
from .synth import synth_trace
from .unshared import unshared

__all__ = [
    "BLOCK_SIZE",
    "InvalidTrace",
    "Lengths",
    "TraceProfile",
    "TraceRequest",
    "TraceStats",
    "read_azure",
    "read_burstgpt",
    "read_mooncake",
    "read_trace",
    "reader_of",
    "scale_trace",
    "synth_trace",
    "trace_stats",
    "unshared",
    "write_mooncake",
]
