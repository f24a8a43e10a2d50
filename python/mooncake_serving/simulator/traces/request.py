"""One request of a trace."""

from dataclasses import dataclass

BLOCK_SIZE = 512  # tokens a hash id stands for in Mooncake's traces (FAST'25 release)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace, whatever file it was read from.

    Attributes:
        timestamp_ms: when it arrives, from the trace's beginning; traces ascend in it.
        input_length: tokens of its prompt.
        output_length: tokens generated.
        hash_ids: one a block of the prompt, the last partial block included; equal ids mean equal
            tokens up to there. Empty where the trace says nothing of prefixes.
    """

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
