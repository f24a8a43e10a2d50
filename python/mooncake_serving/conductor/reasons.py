"""Reasons of decisions: a code and its numbers, which read as a sentence."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Why(Enum):
    """All reasons; the value is the sentence, in which the numbers are named."""

    # where to prefill
    RANDOM = "one of {candidates} instances at random"
    ROUND_ROBIN = "the next of {candidates} instances"
    SHORTEST_QUEUE = "the shortest queue: {wait_s:.3f} s"
    LOCAL_CACHE = "the shortest TTFT, {ttft_s:.3f} s, with {local_tokens} tokens of its own cache"
    FETCH = (
        "the shortest TTFT, {ttft_s:.3f} s: it fetches {fetched_tokens} tokens from instance "
        "{source} in {fetch_s:.3f} s, in addition to {local_tokens} of its own"
    )
    RECOMPUTE_BALANCED = (
        "the shortest TTFT, {ttft_s:.3f} s: its {local_tokens} tokens are enough compared "
        "with the best {best_tokens}, by the balancing threshold"
    )
    RECOMPUTE_CHEAPER = (
        "the shortest TTFT, {ttft_s:.3f} s: to compute what it lacks is faster than the "
        "{fetch_s:.3f} s of a fetch of {best_tokens} tokens"
    )
    # where to decode
    LEAST_TBT = "the shortest TBT, {tbt_s:.4f} s, in a batch of {batch_size}"
    SAME_INSTANCE = "the instance that prefills it decodes it: TBT {tbt_s:.4f} s"
    # whether to accept it
    ACCEPTED = "TTFT {ttft_s:.3f} s and TBT {tbt_s:.4f} s are predicted"
    ACCEPTED_PREFILL = "TTFT {ttft_s:.3f} s is within its limit; TBT is looked at after prefill"
    NO_PREFILL_INSTANCE = "no instance that prefills is up"
    NO_DECODE_INSTANCE = "no instance that decodes is up"
    NO_DECODE_ROOM = "no instance that decodes has room for {kv_tokens} tokens"
    TOO_LONG = "{kv_tokens} tokens are more than any instance holds: {capacity_tokens} at most"
    PREFILL_LOAD = "TTFT {ttft_s:.3f} s is {load:.2f} of its objective, over {limit:.2f}"
    DECODE_LOAD = "TBT {tbt_s:.4f} s is {load:.2f} of its objective, over {limit:.2f}"
    FORECAST_LOAD = (
        "in {horizon_s:.2f} s, when its prefill ends, TBT will be {load:.2f} of its objective over "
        "all that decode, over {limit:.2f}"
    )
    # copies of blocks
    HOT = "asked for {rate:.2f} times a second, over {limit:.2f} for each of its {holders} holders"
    HELD_ELSEWHERE = "asked for {rate:.4f} times a second, and {holders} others hold it"
    COLD = "asked for {rate:.4f} times a second, and to recompute it takes {recompute_s:.4f} s"
    WORTH_KEEPING = (
        "the last copy: to load it takes {load_s:.4f} s, to recompute it {recompute_s:.4f} s"
    )
    # roles
    PREFILL_SHORT = "prefill load {prefill_load:.2f} over {high:.2f}, decode load {decode_load:.2f}"
    DECODE_SHORT = "decode load {decode_load:.2f} over {high:.2f}, prefill load {prefill_load:.2f}"


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason of a decision: ``str(reason)`` is a sentence, ``values`` the numbers in it."""

    why: Why
    values: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the sentence, with its numbers."""
        return self.why.value.format(**self.values)
