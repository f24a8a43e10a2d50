"""One request of a trace."""

from dataclasses import dataclass

BLOCK_SIZE = 512  # tokens a hash id stands for in Mooncake's traces (FAST'25 release)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace, from a file of any format.

    Attributes:
        timestamp_ms: when it arrives, from the trace's beginning; traces ascend in it.
        input_length: tokens of its prompt.
        output_length: tokens generated.
        hash_ids: one per block of the prompt, including the last partial block; equal ids mean
            equal tokens up to there. Empty if the trace has no information about prefixes.
    """

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
