"""The composition of a coupled engine's steps, and its limits."""

from dataclasses import dataclass
from enum import Enum

from mooncake_serving.conductor.errors import check_count, check_instance


class Batching(Enum):
    """What a step consists of.

    PREFILL_FIRST: whole prompts, while any wait and fit, and nothing else; otherwise all decodes.
    So decodes stall (vLLM without chunked prefill). CHUNKED: all decodes, and the oldest prompts'
    tokens up to a budget (Sarathi-Serve, arXiv:2403.02310, Algorithm 3). HYBRID: all decodes, and
    whole prompts (Orca; the ablation of Sarathi-Serve's Table 4). CHUNKED_ALONE: steps of prompt
    tokens up to the budget alternate with steps of decodes (the other half of that ablation).
    """

    PREFILL_FIRST = "prefill first"
    CHUNKED = "chunked"
    HYBRID = "hybrid"
    CHUNKED_ALONE = "chunked alone"


@dataclass(frozen=True)
class CoupledOptions:
    """Options of a coupled instance.

    Attributes:
        batching: what a step consists of.
        token_budget: of a chunked step, including its decodes; vLLM 0.5's default is 512.
        max_batched_tokens: of whole prompts in a step; a longer prompt is alone in its step.
        max_batch_size: requests decoded at once; vLLM's default max_num_seqs is 256.
        use_cache: reuse the KV of prefixes in this instance's HBM.
    """

    batching: Batching = Batching.PREFILL_FIRST
    token_budget: int = 512
    max_batched_tokens: int = 8192
    max_batch_size: int = 256
    use_cache: bool = False

    def __post_init__(self) -> None:
        check_instance("CoupledOptions", "batching", self.batching, Batching)
        for name in ("token_budget", "max_batched_tokens", "max_batch_size"):
            check_count("CoupledOptions", name, getattr(self, name), 1)
