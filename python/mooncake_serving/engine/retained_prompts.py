"""Prompts whose keys and values are kept for similar ones; the least recently used are evicted."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mooncake_serving.semantic import Match, SignatureIndex, Signatures, Signer

from .llama import Llama
from .retained_blocks import RetainedBlocks


@dataclass(frozen=True, slots=True)
class RetainedPrompt:
    """One prompt, and where its keys and values are."""

    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]  # of RetainedBlocks, in order
    num_exact_tokens: int  # how many of its first tokens have the keys and values of a full prefill

    def num_shared_tokens(self, token_ids: Sequence[int]) -> int:
        """Count the first tokens that a prompt shares with this one, as far as these are exact."""
        shared = 0
        for mine, other in zip(self.token_ids[: self.num_exact_tokens], token_ids, strict=False):
            if mine != other:
                break
            shared += 1
        return shared


class RetainedPrompts:
    """Know the kept prompts by their ids, by their tokens and by their signatures.

    Args:
        model: whose input embeddings are signed.
        blocks: where their keys and values are.
        signer: makes the signatures.
        index: an empty one, of the signer's bits.
    """

    def __init__(
        self, model: Llama, blocks: RetainedBlocks, signer: Signer, index: SignatureIndex
    ) -> None:
        self.blocks = blocks
        self._model, self._signer, self._index = model, signer, index
        self._prompts: dict[int, RetainedPrompt] = {}
        self._id_of: dict[tuple[int, ...], int] = {}
        self._ids = itertools.count()

    def __len__(self) -> int:
        """Count the prompts."""
        return len(self._prompts)

    def __contains__(self, prompt_id: int) -> bool:
        """Tell whether a prompt is kept."""
        return prompt_id in self._prompts

    def find(self, token_ids: Sequence[int]) -> Match | None:
        """Return the most similar prompt; None if there is none at all."""
        return self._index.find(self._sign(token_ids)) if self._prompts else None

    def longest_beginning(self, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """Return the prompt whose exact beginning is shared the longest, and how many tokens long.

        Of equals, the one that was kept last; None if there is no prompt.
        """
        shared = {i: p.num_shared_tokens(token_ids) for i, p in reversed(self._prompts.items())}
        return max(shared.items(), key=lambda item: item[1]) if shared else None

    def num_shared_tokens(self, prompt_id: int, token_ids: Sequence[int]) -> int:
        """Count the first tokens that a prompt shares with a kept one, as far as exact."""
        return self._prompts[prompt_id].num_shared_tokens(token_ids)

    def use(self, prompt_id: int) -> RetainedPrompt:
        """Return a prompt, which becomes the most recently used."""
        self._index.touch(prompt_id)
        return self._prompts[prompt_id]

    def keep(
        self, token_ids: Sequence[int], block_ids: Sequence[int], num_exact_tokens: int
    ) -> int:
        """Copy a prompt's blocks, after evicting as many prompts as it needs.

        A prompt that is kept already, no less exact, only becomes the most recently used. A less
        exact version of it is replaced: after the copy, unless it has to make room.

        Args:
            token_ids: the prompt, not longer than all blocks.
            block_ids: of the engine, at least enough, in order.
            num_exact_tokens: see ``RetainedPrompt``.

        Returns:
            Its id, which no other prompt gets.
        """
        tokens = tuple(token_ids)
        known = self._id_of.get(tokens)
        if known is not None and self.use(known).num_exact_tokens >= num_exact_tokens:
            return known
        signatures = self._sign(tokens)
        num_blocks = self.blocks.num_blocks_for(len(tokens))
        if known is not None and self.blocks.num_free < num_blocks:
            self.forget(known)  # frees as many as it takes, so no other prompt is evicted
            known = None
        while self.blocks.num_free < num_blocks and (oldest := self._index.oldest) is not None:
            self.forget(oldest)
        kept = tuple(self.blocks.save(block_ids[:num_blocks]))
        prompt_id = next(self._ids)
        try:
            self._index.add(prompt_id, signatures)
        except BaseException:
            self.blocks.free(kept)
            raise
        if known is not None:
            self.forget(known)  # only now: an error above leaves it
        self._prompts[prompt_id] = RetainedPrompt(tokens, kept, num_exact_tokens)
        self._id_of[tokens] = prompt_id
        return prompt_id

    def forget(self, prompt_id: int) -> None:
        """Remove a prompt and free its blocks."""
        prompt = self._prompts.pop(prompt_id)
        self._index.remove(prompt_id)
        del self._id_of[prompt.token_ids]
        self.blocks.free(prompt.block_ids)

    def _sign(self, token_ids: Sequence[int]) -> Signatures:
        embedding = self._model.weights.embedding
        return self._signer.sign(embedding[torch.tensor(token_ids, device=embedding.device)])
