"""What a prefill from a similar prompt reports."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .request import Prefilled


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a prefill took from a kept prompt, and what it computed."""

    prompt_id: int | None  # the kept prompt; None: nothing was reused
    similarity: float  # of the most similar kept prompt, reused or not; 0 if none was looked up
    num_exact_tokens: int  # the first tokens that both share, whose keys and values are exact
    num_matched_tokens: int  # of the others, those with a counterpart in the kept prompt
    computed_by_layer: tuple[int, ...]  # tokens whose keys and values each layer computed

    @property
    def is_approximate(self) -> bool:
        """Tell whether some keys and values are another token's or another context's."""
        return self.computed_by_layer[-1] < self.computed_by_layer[0]


class Filled(NamedTuple):
    """What a prompt's blocks have of its keys and values, before it is computed.

    Attributes:
        num_exact_tokens: the first ones, which have exact ones.
        is_reused: bool ``[num_tokens - num_exact_tokens]``, which of the others have those of a
            counterpart, see ``Engine.prefill_selected``; None: none has.
    """

    num_exact_tokens: int
    is_reused: torch.Tensor | None

    @property
    def num_matched_tokens(self) -> int:
        """Count the tokens with a counterpart."""
        return 0 if self.is_reused is None else int(self.is_reused.sum())


class SemanticPrefill(NamedTuple):
    """A prefilled prompt, how it came about, and its name if it was kept."""

    prefilled: Prefilled
    reuse: Reuse
    prompt_id: int | None
