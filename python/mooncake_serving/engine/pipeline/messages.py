"""Messages between the first stage, which has the engine, and the others: data over a pipe."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...arguments import as_integer, refuse
from ..batch import Chunk
from ..sampling import Draw


@dataclass(frozen=True)
class GroupOptions:
    """Options of a group of stages.

    Attributes:
        model: path of the model, of which every other stage reads its layers.
        num_stages: how many processes have a part of the layers, this one included.
        num_blocks, block_size: of the cache; a block is ``block_size`` tokens.
        max_batch_tokens: tokens of one step.
        batch_invariant: see ``Llama``.
        threads: of torch, in each of the other processes.
        start_s: seconds that these have to load the model.
        deadline_s: seconds without an answer after which a stage has failed that computes.

    Raises:
        InvalidArgument: a number is not positive.
    """

    model: str
    num_stages: int
    num_blocks: int
    block_size: int = 16
    max_batch_tokens: int = 512
    batch_invariant: bool = False
    threads: int = 1
    start_s: float = 600.0
    deadline_s: float = 120.0

    def __post_init__(self) -> None:
        """Check the numbers before a process is started."""
        least = {"num_stages": 2, "num_blocks": 1, "block_size": 1, "max_batch_tokens": 1}
        for name, minimum in {**least, "threads": 1}.items():
            if as_integer("GroupOptions", name, getattr(self, name)) < minimum:
                refuse("GroupOptions", name, f"at least {minimum}", getattr(self, name))

    @property
    def num_slots(self) -> int:
        """Steps that may be under way: one in each stage, and one before it."""
        return 2 * self.num_stages


@dataclass(frozen=True)
class StageOptions:
    """Options of one stage other than the first."""

    group: GroupOptions
    dtype: str  # of weights and cache: a name in torch
    layers: range
    secret: str = field(repr=False)  # of the stages' transfer engines


@dataclass(frozen=True)
class Listening:
    """From a stage: it has its weights, and takes its input at an address."""

    engine_name: str
    address: int


@dataclass(frozen=True)
class Step:
    """To a stage: what to compute, when the input of this number has arrived.

    Steps are numbered from 0 on without gaps, and computed in this order.
    """

    number: int
    chunks: Sequence[Chunk]
    ends: Sequence[int]  # of which chunks the token behind the last one is wanted
    draws: Sequence[Draw]  # how these are chosen


@dataclass(frozen=True)
class Done:
    """From the last stage: a step's keys and values are in the cache, of all stages."""

    number: int
    token_ids: list[int | None]  # behind ``ends``; None: the logits are not finite
