"""A request, and its service level objectives."""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from .errors import (
    InvalidArgument,
    check_at_least,
    check_count,
    check_instance,
    check_integer,
    check_keys,
    check_positive,
)


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objectives: how long a request may wait.

    Attributes:
        ttft_s: seconds from its arrival to its first token.
        tbt_s: seconds between two tokens.
    """

    ttft_s: float
    tbt_s: float

    def __post_init__(self) -> None:
        """Check that both are positive."""
        check_positive("Slo", "ttft_s", self.ttft_s)
        check_positive("Slo", "tbt_s", self.tbt_s)


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as the conductor sees it when it arrives.

    Attributes:
        request_id: chosen by the caller, for example a number or a string: anything that can be a
            key of a dict; unique among requests that are not over.
        num_tokens: tokens of the prompt.
        keys: the prompt's chain of block keys, kept as a tuple: key i stands for all tokens up to
            the end of block i. As many as full blocks, and one more if the caller names the last,
            partial block too (as Mooncake's traces do).
        block_size: tokens in a block.
        num_output_tokens: expected number, to reserve memory for; the conductor does not know when
            a request will end.
        max_output_tokens: maximum number of generated tokens, 0 if unknown: the request is never
            given to an instance whose memory could not hold them.
        priority: the higher, the longer it is served under overload.
        waited_s: since its arrival, if it is decided about again; its TTFT counts from there.
        slo: its objectives; None: those that the conductor has for all.
    """

    request_id: Hashable
    num_tokens: int
    keys: tuple[int, ...] = ()
    block_size: int = 512
    num_output_tokens: int = 0
    priority: int = 0
    max_output_tokens: int = 0
    waited_s: float = 0.0
    slo: Slo | None = None

    def __post_init__(self) -> None:
        """Check the counts, and that the keys agree with the length."""
        try:
            hash(self.request_id)
        except TypeError:
            what = f"Request: request_id must be hashable, got {self.request_id!r:.80}"
            raise InvalidArgument(what) from None
        check_count("Request", "num_tokens", self.num_tokens, 1)
        check_count("Request", "block_size", self.block_size, 1)
        check_count("Request", "num_output_tokens", self.num_output_tokens, 0)
        check_count("Request", "max_output_tokens", self.max_output_tokens, 0)
        check_at_least("Request", "waited_s", self.waited_s, 0)
        check_integer("Request", "priority", self.priority)
        if self.slo is not None:
            check_instance("Request", "slo", self.slo, Slo)
        check_keys("Request", "keys", self.keys)
        if not isinstance(self.keys, tuple):  # so that equal requests are equal, and have a hash
            keys = self.keys.tolist() if isinstance(self.keys, np.ndarray) else self.keys
            object.__setattr__(self, "keys", tuple(keys))
        most = -(-self.num_tokens // self.block_size)
        if len(self.keys) > most:
            raise InvalidArgument(
                f"Request: keys must be at most {most} for {self.num_tokens} tokens in blocks of "
                f"{self.block_size}, got {len(self.keys)}"
            )

    @property
    def num_kv_tokens(self) -> int:
        """Return for how many tokens it will probably keep keys and values while it is decoded."""
        return self.num_tokens + self.num_output_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Return for how many tokens it may at most keep keys and values while it is decoded."""
        return self.num_tokens + max(self.num_output_tokens, self.max_output_tokens)
