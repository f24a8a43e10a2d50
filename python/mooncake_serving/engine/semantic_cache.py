"""Prefill from the keys and values of a similar prompt: SemShareKV on an engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from mooncake_serving.semantic import DEFAULT, Match, Recompute, SignatureIndex, Signer

from ..arguments import as_integer, refuse
from .arguments import as_positive, check_params
from .batching import GREEDY
from .engine import Engine
from .prefill import check_prompt
from .request import Prefilled
from .retained_blocks import RetainedBlocks
from .retained_prompts import RetainedPrompts
from .reuse import Filled, Reuse, SemanticPrefill
from .sampling import SamplingParams

Keep = Literal["no", "exact", "any"]


@dataclass(frozen=True)
class _Source:
    """A kept prompt, and what of it a new one reuses."""

    prompt_id: int
    num_exact_tokens: int  # at the beginning, each its own counterpart
    index: torch.Tensor  # int64 [num_tokens]: each token's counterpart, or -1

    @property
    def is_reused(self) -> torch.Tensor:
        """Tell which of the tokens after the exact ones have a counterpart."""
        return self.index[self.num_exact_tokens :] >= 0


class SemanticCache:
    """Keep prompts' keys and values, and prefill similar prompts from them.

    The results are approximate: first tokens and what follows may differ from those of
    ``Engine.prefill``. Hence only calls of ``prefill`` here reuse anything, and each says what.
    Not thread-safe, as the engine. (SemShareKV, arXiv 2509.24832; docs/serving/semantic.md.)

    Args:
        engine: whose prompts are prefilled; its blocks hold the results.
        num_blocks: how many blocks of the engine's block size may hold kept prompts; they are
            allocated here, on the engine's device. The least recently used prompts are evicted.
        threshold: the least similarity with which a prompt is reused, in [0, 1].
        min_tokens: no similar prompt is looked up for shorter ones. (SemShareKV reports no gain
            below 700.) An exact beginning is reused whatever these two are.
        recompute: which tokens are recomputed in which layer.
        signer: makes signatures of the model's embeddings, on its device; None:
            ``Signer(hidden_size)``.
        index: an empty one of no other cache, for signatures of the signer's bits; None:
            ``SignatureIndex(bits)``.

    Raises:
        InvalidArgument: an argument is not as above.
    """

    def __init__(
        self,
        engine: Engine,
        num_blocks: int,
        *,
        threshold: float = 0.8,
        min_tokens: int = 700,
        recompute: Recompute = DEFAULT,
        signer: Signer | None = None,
        index: SignatureIndex | None = None,
    ) -> None:
        op = "SemanticCache"
        if not isinstance(engine, Engine):
            refuse(op, "engine", "an Engine", engine)
        num_blocks = as_positive(op, "num_blocks", num_blocks)
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
            refuse(op, "threshold", "a number", threshold)
        if not 0 <= threshold <= 1:
            refuse(op, "threshold", "in [0, 1]", threshold)
        if not isinstance(recompute, Recompute):
            refuse(op, "recompute", "a Recompute", recompute)
        if as_integer(op, "min_tokens", min_tokens) < 0:
            refuse(op, "min_tokens", "at least 0", min_tokens)
        self.engine, self.recompute = engine, recompute
        self.threshold, self.min_tokens = float(threshold), min_tokens
        model = engine.model
        self._num_layers = model.config.num_layers
        if signer is None:
            signer = Signer(model.config.hidden_size, device=model.device)
        if not isinstance(signer, Signer):
            refuse(op, "signer", "a Signer", signer)
        if signer.dim != model.config.hidden_size:
            refuse(op, "signer", f"of {model.config.hidden_size} dims", signer.dim)
        if signer.device != model.device:
            refuse(op, "signer", f"on {model.device}", str(signer.device))
        index = SignatureIndex(signer.bits) if index is None else index
        if not isinstance(index, SignatureIndex):
            refuse(op, "index", "a SignatureIndex", index)
        if index.is_taken:
            refuse(op, "index", "of no other cache", index)
        if len(index) or index.bits != signer.bits:
            refuse(op, "index", f"empty and of {signer.bits} bits", f"{len(index)} of {index.bits}")
        blocks = RetainedBlocks(model, engine.cache, num_blocks)
        self._prompts = RetainedPrompts(model, blocks, signer, index)
        index.is_taken = True

    def __len__(self) -> int:
        """Count the kept prompts."""
        return len(self._prompts)

    def __contains__(self, prompt_id: int) -> bool:
        """Tell whether a prompt is still kept."""
        return prompt_id in self._prompts

    @property
    def num_free(self) -> int:
        """Count the blocks that hold no kept prompt."""
        return self._prompts.blocks.num_free

    @property
    def num_bytes(self) -> int:
        """Count the bytes of all blocks for kept prompts."""
        return self._prompts.blocks.num_bytes

    def prefill(
        self,
        prompt_tokens: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        keep: Keep = "no",
    ) -> SemanticPrefill:
        """Prefill a prompt, from a kept one that begins like it or is similar, if there is any.

        An exact beginning is reused alone, which approximates nothing, unless the similar prompt
        leaves fewer tokens to compute, on average over the layers. An identical prompt's always is.

        Args:
            prompt_tokens: the prompt.
            params: as for ``Engine.prefill``.
            keep: whether to keep this prompt for others: "exact" only if all of its keys and
                values are those of a full prefill, "any" in any case. Approximations that are
                built on approximations drift.

        Returns:
            What ``Engine.prefill`` returns, what was reused, and the id if the prompt was kept.
            ``Engine.add_prefilled`` continues; the caller holds the blocks until then.

        Raises:
            InvalidArgument, OutOfBlocks, NotFinite: see ``Engine.prefill``; no block is held. Also
                InvalidArgument, before anything is computed, if a prompt that is to be kept is
                longer than all blocks for kept prompts.
        """
        op = "SemanticCache.prefill"
        tokens = check_prompt(op, prompt_tokens, self.engine.model)
        check_params(op, params)
        if keep not in ("no", "exact", "any"):
            refuse(op, "keep", "'no', 'exact' or 'any'", keep)
        if keep != "no":
            self._check_fits(op, tokens)
        done, reuse = self._prefill(tokens, params)
        try:
            return SemanticPrefill(done, reuse, self._keep_if(keep, tokens, done, reuse))
        except BaseException:
            self.engine.release(done.block_ids)
            raise

    def fill(
        self, prompt_tokens: Sequence[int], block_ids: Sequence[int], num_cached_tokens: int = 0
    ) -> Filled:
        """Copy what a kept prompt has for a prompt into its blocks, if that leaves less to compute.

        It is what ``prefill`` does before it computes, for callers with blocks of their own. They
        go on with ``Engine.prefill_selected`` and ``recompute``, or where no token has a
        counterpart, as behind any cached prefix.

        Args:
            prompt_tokens: the prompt.
            block_ids: allocated blocks for all of it.
            num_cached_tokens: how many of its first tokens have exact keys and values there, in
                whole blocks, which are not written to.

        Raises:
            InvalidArgument: see ``Engine.prefill_selected``.
        """
        op = "SemanticCache.fill"
        tokens = check_prompt(op, prompt_tokens, self.engine.model)
        num_cached, size = num_cached_tokens, self.engine.cache.block_size
        if not 0 <= num_cached < len(tokens) or num_cached % size:
            wanted = f"whole blocks of {size}, less than the prompt's {len(tokens)} tokens"
            refuse(op, "num_cached_tokens", wanted, num_cached)
        held = self.engine.held(op, block_ids, self.engine.cache.num_blocks_for(len(tokens)))
        sources, _ = self._sources(tokens, num_cached)
        best = min(sources, key=self._num_computed, default=None)
        if best is None or self._num_computed(best) >= len(tokens) - num_cached:
            return Filled(num_cached, None)
        index = best.index.clone()
        index[:num_cached] = -1
        prompt = self._prompts.use(best.prompt_id)
        self._prompts.blocks.rearrange(prompt.block_ids, index, held)
        is_reused = best.is_reused
        return Filled(best.num_exact_tokens, is_reused if bool(is_reused.any()) else None)

    def fits(self, num_tokens: int) -> bool:
        """Tell whether a prompt of ``num_tokens`` tokens can be kept."""
        blocks = self._prompts.blocks
        return blocks.num_blocks_for(num_tokens) <= blocks.num_blocks

    def keep(self, prompt_tokens: Sequence[int], block_ids: Sequence[int]) -> int:
        """Keep a prompt that was computed exactly, such as by ``Engine.prefill``.

        The least recently used prompts make room. A prompt that is kept already only becomes the
        most recently used.

        Args:
            prompt_tokens: the prompt.
            block_ids: allocated blocks of the engine that no request holds, such as ``prefill``
                returns, with the prompt's keys and values, in order.

        Returns:
            Its id, which no other prompt gets.

        Raises:
            InvalidArgument: see ``Engine.prefill``; or the prompt is longer than all blocks
                together.
        """
        op = "SemanticCache.keep"
        tokens = check_prompt(op, prompt_tokens, self.engine.model)
        self._check_fits(op, tokens)
        num_blocks = self._prompts.blocks.num_blocks_for(len(tokens))
        held = self.engine.held(op, block_ids, num_blocks)
        return self._prompts.keep(tokens, held, len(tokens))

    def forget(self, prompt_id: int) -> None:
        """Remove a kept prompt.

        Raises:
            InvalidArgument: it is not kept.
        """
        if prompt_id not in self._prompts:
            refuse("SemanticCache.forget", "prompt_id", "of a kept prompt", prompt_id)
        self._prompts.forget(prompt_id)

    def _prefill(self, tokens: list[int], params: SamplingParams) -> tuple[Prefilled, Reuse]:
        sources, similarity = self._sources(tokens, 0)
        if sources:
            best = min(sources, key=self._num_computed)
            return self._prefill_from(best, similarity, tokens, params)
        done = self.engine.prefill(tokens, params)
        computed = (len(tokens),) * self._num_layers
        return done, Reuse(None, similarity, 0, 0, computed)

    def _sources(self, tokens: list[int], num_cached: int) -> tuple[list[_Source], float]:
        """Return the kept prompts that may be reused, of equals the exact one first; and how
        similar the most similar one is.
        """
        match = self._prompts.find(tokens) if len(tokens) >= self.min_tokens else None
        similarity = 0.0 if match is None else match.similarity
        sources = [self._exact_source(tokens, num_cached)]
        if match is not None and similarity >= self.threshold:
            sources.append(self._similar_source(match, tokens, num_cached))
        usable = [source for source in sources if source and bool((source.index >= 0).any())]
        return usable, similarity

    def _exact_source(self, tokens: list[int], num_cached: int) -> _Source | None:
        """Return the longest shared beginning; None if, behind what is cached, a block, or a short
        prompt, is not shared.

        Nearly all prompts share the first few tokens of a template: copying these costs more than
        it saves, and would make some prompt the most recently used.
        """
        found = self._prompts.longest_beginning(tokens)
        if found is None or len(tokens) == 1:
            return None
        prompt_id, num_shared = found
        num_exact = min(num_shared, len(tokens) - 1)
        least = min(self.engine.cache.block_size, len(tokens) - 1 - num_cached)
        if num_exact < num_cached + least:
            return None
        index = torch.arange(len(tokens), device=self.engine.model.device)
        index[num_exact:] = -1
        return _Source(prompt_id, num_exact, index)

    def _similar_source(self, match: Match, tokens: list[int], num_cached: int) -> _Source:
        num_shared = self._prompts.num_shared_tokens(match.prompt_id, tokens)
        num_exact = max(num_cached, min(num_shared, len(tokens) - 1))
        index = match.index.clone()
        index[:num_exact] = torch.arange(num_exact, device=index.device)
        return _Source(match.prompt_id, num_exact, index)

    def _num_computed(self, source: _Source) -> float:
        """Return how many tokens' keys and values will be computed, on average over the layers."""
        is_reused = source.is_reused.clone()
        is_reused[-self.recompute.last_tokens :] = False
        num_reused = int(is_reused.sum())
        layers = range(self._num_layers)
        share = sum(self.recompute.share_of(layer - 1) for layer in layers) / len(layers)
        return len(is_reused) - num_reused + share * num_reused

    def _prefill_from(
        self, source: _Source, similarity: float, tokens: list[int], params: SamplingParams
    ) -> tuple[Prefilled, Reuse]:
        prompt, num_exact = self._prompts.use(source.prompt_id), source.num_exact_tokens
        num_matched = int(source.is_reused.sum())
        block_ids = self.engine.reserve(len(tokens), SamplingParams(max_tokens=1))
        try:
            self._prompts.blocks.rearrange(prompt.block_ids, source.index, block_ids)
            if num_matched:
                done, computed = self.engine.prefill_selected(
                    tokens,
                    params,
                    block_ids=block_ids,
                    is_reused=source.is_reused,
                    num_cached_tokens=num_exact,
                    recompute=self.recompute,
                )
            else:
                done = self.engine.prefill(
                    tokens, params, block_ids=block_ids, num_cached_tokens=num_exact
                )
                computed = (len(tokens) - num_exact,) * self._num_layers
        except BaseException:
            self.engine.release(block_ids)
            raise
        return done, Reuse(source.prompt_id, similarity, num_exact, num_matched, computed)

    def _keep_if(self, keep: Keep, tokens: list[int], done: Prefilled, reuse: Reuse) -> int | None:
        if keep == "no" or (keep == "exact" and reuse.is_approximate):
            return None
        num_exact = reuse.num_exact_tokens if reuse.is_approximate else len(tokens)
        return self._prompts.keep(tokens, done.block_ids, num_exact)

    def _check_fits(self, op: str, tokens: Sequence[int]) -> None:
        blocks = self._prompts.blocks
        if not self.fits(len(tokens)):
            wanted = f"of at most {blocks.num_blocks} blocks, those for kept prompts"
            refuse(op, "prompt_tokens", wanted, f"{len(tokens)} tokens")
