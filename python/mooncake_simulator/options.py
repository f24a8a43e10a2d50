"""The composition of a simulated cluster."""

from dataclasses import dataclass, field

from mooncake_serving.conductor import InvalidArgument
from mooncake_serving.conductor.errors import (
    check_at_least,
    check_count,
    check_instance,
    check_positive,
)

from .caches import POLICIES
from .machines import A800_NODE, LLAMA3_70B, Machine, Model
from .prefill import PrefillOptions
from .traces import BLOCK_SIZE


@dataclass(frozen=True)
class Failure:
    """An instance that is gone for a while, with its KV and all its work."""

    instance: int  # prefill instances first, then decode instances
    at_s: float
    down_s: float

    def __post_init__(self) -> None:
        check_count("Failure", "instance", self.instance, 0)
        check_at_least("Failure", "at_s", self.at_s, 0)
        check_at_least("Failure", "down_s", self.down_s, 0)


@dataclass(frozen=True)
class DisaggregatedOptions:
    """Prefill and decode instances, a store over the DRAM of the former, and their network.

    Attributes:
        model, machine: what an instance runs, and on what; a prefill instance with a larger group
            is a pipeline of that many nodes, at most one a layer, with all their NICs and SSDs.
        num_prefill, num_decode: instances of each kind, numbered in this order.
        prefill: how prompts are prefilled.
        dram_tokens: of the store, per instance; None for no limit. The default is FAST'25's 1 TB.
        ssd_tokens: of the store's second tier, per instance; only reading takes time.
        eviction: of either tier: lru, fifo, lfu, length-aware, sieve.
        max_batch_size: of a decode instance.
        block_size: tokens that a hash id of the trace stands for.
        stream: send KV to the decode instance layer by layer during prefill, not after it.
        event_delay_s: until the conductor's index knows of a change in a store.
        failures: which instances fail, and when.
    """

    model: Model = LLAMA3_70B
    machine: Machine = A800_NODE
    num_prefill: int = 8
    num_decode: int = 8
    prefill: PrefillOptions = field(default_factory=PrefillOptions)
    dram_tokens: int | None = 3_000_000
    ssd_tokens: int = 0
    eviction: str = "lru"
    max_batch_size: int = 256
    block_size: int = BLOCK_SIZE
    stream: bool = True
    event_delay_s: float = 0.0
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        op = "DisaggregatedOptions"
        check_instance(op, "machine", self.machine, Machine)
        check_instance(op, "prefill", self.prefill, PrefillOptions)
        for name in ("num_prefill", "num_decode", "max_batch_size", "block_size"):
            check_count(op, name, getattr(self, name), 1)
        if self.dram_tokens is not None:
            check_count(op, "dram_tokens", self.dram_tokens, 0)
        check_count(op, "ssd_tokens", self.ssd_tokens, 0)
        check_at_least(op, "event_delay_s", self.event_delay_s, 0)
        if not isinstance(self.eviction, str) or self.eviction not in POLICIES:
            names = ", ".join(POLICIES)
            raise InvalidArgument(f"{op}: eviction must be one of {names}, got {self.eviction!r}")
        self.machine.kv_capacity_tokens(self.model)  # the model must fit
        check_positive(op, "machine.nic_bytes_per_s", self.machine.nic_bytes_per_s)
        if self.prefill.group_size > self.model.num_layers:
            raise InvalidArgument(
                f"{op}: prefill.group_size must be at most {self.model.num_layers}, the layers of "
                f"{self.model.name}, got {self.prefill.group_size}"
            )
        for failure in self.failures:
            check_instance(op, "failures", failure, Failure)
            if not 0 <= failure.instance < self.num_prefill + self.num_decode:
                raise InvalidArgument(
                    f"{op}: failures must be of instances 0 to "
                    f"{self.num_prefill + self.num_decode - 1}, got {failure}"
                )

    @property
    def dram_blocks(self) -> int | None:
        """DRAM capacity of an instance, in blocks of the trace."""
        return None if self.dram_tokens is None else self.dram_tokens // self.block_size
