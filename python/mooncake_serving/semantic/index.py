"""The kept prompts' signatures: which of them a new prompt resembles, and token by token where."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import mooncake_kernels as mk

from ..arguments import as_count, refuse
from .arguments import as_bits, as_number
from .signatures import Signatures


@dataclass(frozen=True)
class Match:
    """A kept prompt that resembles a new one, and the map between their tokens."""

    prompt_id: int
    similarity: float  # clip(1 - mean distance / max_distance, 0, 1), of contents
    index: torch.Tensor  # int64 [num_tokens]: each token's counterpart in the kept prompt, or -1


class SignatureIndex:
    """Find the kept prompt that is most similar to a new one, and each token's counterpart in it.

    Which prompt: the one with the least ``mean(distance)``, where a token's distance is that of
    its content to the nearest in the kept prompt, in bits; their similarity is then
    ``clip(1 - mean(distance) / max_distance, 0, 1)``. It is not symmetric: a prompt that is a part
    of a kept one resembles it fully. If many are kept, a sample of the new prompt's tokens ranks
    them, and all tokens compare the best few.

    Which token: the one whose placed signature is nearest, unless that one or their contents
    differ too much. The similarity does not count the order of the tokens; this does.

    From SemShareKV (arXiv 2509.24832), which takes 30 for ``max_distance`` and 0.8 for the least
    similarity. All is deterministic; among equals the most recently used prompt wins.

    Args:
        bits: of a signature.
        max_distance: the mean distance at which similarity is 0; None: 30 of 256 bits.
        max_token_distance: a token has no counterpart if the two contents differ in more bits;
            None: 32 of 256.
        max_placed_distance: a token has no counterpart if the two placed signatures differ in more
            bits; None: 32 of 256, for the signer's order "context" (docs/serving/semantic.md). Give
            ``bits``, no limit, for "rotary".
        num_sampled: how many tokens rank the prompts.
        num_compared: how many prompts are compared by all tokens.

    Raises:
        InvalidArgument: an argument is not as above.
    """

    def __init__(
        self,
        bits: int,
        *,
        max_distance: float | None = None,
        max_token_distance: int | None = None,
        max_placed_distance: int | None = None,
        num_sampled: int = 64,
        num_compared: int = 4,
    ) -> None:
        op = "SignatureIndex"
        self.bits = as_bits(op, bits)
        farthest = bits * 30 / 256 if max_distance is None else max_distance
        self.max_distance = as_number(op, "max_distance", farthest, 1 / 256, bits)
        differing = bits // 8 if max_token_distance is None else max_token_distance
        self.max_token_distance = as_count(op, "max_token_distance", differing, 0)
        misplaced = bits // 8 if max_placed_distance is None else max_placed_distance
        self.max_placed_distance = as_count(op, "max_placed_distance", misplaced, 0)
        self._num_sampled = as_count(op, "num_sampled", num_sampled, 1)
        self._num_compared = as_count(op, "num_compared", num_compared, 1)
        self.is_taken = False  # by a cache, which no other may share: their ids would collide
        self._kept: dict[int, Signatures] = {}  # in order of use, the oldest first

    def __len__(self) -> int:
        """Count the prompts."""
        return len(self._kept)

    def __contains__(self, prompt_id: int) -> bool:
        """Tell whether a prompt is kept."""
        return prompt_id in self._kept

    @property
    def oldest(self) -> int | None:
        """Return the prompt that was used least recently; None if there is none."""
        return next(iter(self._kept), None)

    def add(self, prompt_id: int, signatures: Signatures) -> None:
        """Keep a prompt's signatures, as the most recently used.

        Args:
            prompt_id: a new one.
            signatures: of at least one token.

        Raises:
            InvalidArgument: the id is taken, or the signatures have other bits than the index.
        """
        self._check("add", signatures)
        if prompt_id in self._kept:
            refuse("add", "prompt_id", "of no kept prompt", prompt_id)
        self._kept[prompt_id] = signatures

    def remove(self, prompt_id: int) -> None:
        """Forget a prompt.

        Raises:
            InvalidArgument: it is not kept.
        """
        self._of("remove", prompt_id)
        del self._kept[prompt_id]

    def touch(self, prompt_id: int) -> None:
        """Make a prompt the most recently used.

        Raises:
            InvalidArgument: it is not kept.
        """
        self._of("touch", prompt_id)
        self._kept[prompt_id] = self._kept.pop(prompt_id)

    def find(self, signatures: Signatures) -> Match | None:
        """Return the most similar prompt, however little it is; None if none is kept.

        The caller compares ``similarity`` with its threshold. Nothing is touched.

        Raises:
            InvalidArgument: see ``add``.
        """
        self._check("find", signatures)
        prompt_ids = list(reversed(self._kept))
        if len(prompt_ids) > self._num_compared:
            step = -(-len(signatures.content) // self._num_sampled)
            sample = signatures.content[::step].contiguous()
            chosen = set(self._ranked(sample, prompt_ids)[: self._num_compared])
            prompt_ids = [i for i in prompt_ids if i in chosen]  # still the most recent first
        best = self._ranked(signatures.content, prompt_ids)[:1]
        return self.match(signatures, best[0]) if best else None

    def match(self, signatures: Signatures, prompt_id: int) -> Match:
        """Compare a new prompt with one that is kept.

        Raises:
            InvalidArgument: see ``add``; or the prompt is not kept.
        """
        self._check("match", signatures)
        kept = self._of("match", prompt_id)
        index, misplaced = mk.hamming_match(signatures.placed, kept.placed)
        differ = differing_bits(signatures.content, kept.content[index]) > self.max_token_distance
        differ |= misplaced > self.max_placed_distance
        mean = self._mean_distance(signatures.content, prompt_id)
        similarity = min(max(1 - mean / self.max_distance, 0.0), 1.0)
        return Match(prompt_id, similarity, index.masked_fill(differ, -1))

    def _ranked(self, content: torch.Tensor, prompt_ids: Sequence[int]) -> list[int]:
        """Sort prompts, the nearest first; equally near ones stay in their order."""
        means = {prompt_id: self._mean_distance(content, prompt_id) for prompt_id in prompt_ids}
        return sorted(prompt_ids, key=means.__getitem__)

    def _mean_distance(self, content: torch.Tensor, prompt_id: int) -> float:
        _, distance = mk.hamming_match(content, self._kept[prompt_id].content)
        return float(distance.double().mean())

    def _check(self, op: str, signatures: Signatures) -> None:
        if not isinstance(signatures, Signatures):
            refuse(op, "signatures", "Signatures", signatures)
        shapes = [list(getattr(part, "shape", ())) for part in signatures]
        dtypes = [getattr(part, "dtype", type(part)) for part in signatures]
        wanted = [*shapes[0][:1], self.bits // 8]
        if shapes != [wanted] * 2 or dtypes != [torch.uint8] * 2:
            got = f"{dtypes} of shapes {shapes}"
            refuse(op, "signatures", f"two uint8 [num_tokens, {self.bits // 8}]", got)
        if not len(signatures.content):
            refuse(op, "signatures", "of at least one token", shapes)

    def _of(self, op: str, prompt_id: int) -> Signatures:
        if prompt_id not in self._kept:
            refuse(op, "prompt_id", "of a kept prompt", prompt_id)
        return self._kept[prompt_id]


def differing_bits(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Count the bits in which signatures differ, token by token.

    Args:
        ours: uint8 ``[num_tokens, num_bytes]``.
        theirs: likewise.

    Returns:
        int64 ``[num_tokens]``.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=ours.device)
    return ((ours ^ theirs)[:, :, None] >> shifts & 1).sum((1, 2))
