"""The engine and its disaggregated halves: prefill, and decode of prompts prefilled elsewhere."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.semantic import DEFAULT, Recompute

from ..arguments import as_integer, refuse
from .arguments import as_integers, check_params
from .batching import GREEDY, BatchingEngine
from .llama import LayerHooks
from .prefill import OnChunk, check_prompt, run_prefill
from .request import Prefilled, Request, TokenOutput
from .sampling import SamplingParams
from .selective_prefill import run_selective_prefill


class Engine(BatchingEngine):
    """Serve requests whole, as ``BatchingEngine`` does, or either half of them.

    One engine runs ``prefill``, which leaves a prompt's keys and values in blocks. The caller
    carries them to blocks of another engine (``reserve``), whose ``add_prefilled`` continues from
    there. What is transferred is the prompt, the first token and the blocks' contents. In between,
    the caller holds the blocks, and ``release`` frees them.
    """

    def add_request(
        self,
        prompt_tokens: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        block_ids: Sequence[int] | None = None,
        num_cached_tokens: int = 0,
    ) -> int:
        """Queue a prompt, whose first tokens may be computed already; see ``BatchingEngine``.

        Args:
            prompt_tokens: the prompt.
            params: how its tokens are chosen.
            block_ids: allocated blocks for the whole answer, as from ``reserve_for``; they are the
                request's, and freed when it ends. None: allocated when it runs.
            num_cached_tokens: how many of its first tokens have their keys and values there.

        Returns:
            The request's id, which is not used again.

        Raises:
            InvalidArgument: see ``BatchingEngine``; or the blocks are not as above, and stay the
                caller's.
        """
        if block_ids is None:
            return super().add_request(prompt_tokens, params)
        self._check_usable("add_request")
        request = self._new_request("add_request", prompt_tokens, params)
        num_cached_tokens = _check_num_cached("add_request", num_cached_tokens, request)
        num_needed = self.scheduler.num_blocks_for(request)
        request.block_ids = self.held("add_request", block_ids, num_needed)
        request.num_computed = request.num_cached_tokens = num_cached_tokens
        self._requests[request.request_id] = request
        self.scheduler.add_with_blocks(request)
        return request.request_id

    def prefill(
        self,
        prompt_tokens: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        block_ids: Sequence[int] | None = None,
        num_cached_tokens: int = 0,
        on_chunk: OnChunk | None = None,
        hooks: LayerHooks | None = None,
    ) -> Prefilled:
        """Compute a prompt's keys and values and its first token, at once and alone.

        Args:
            prompt_tokens: the prompt.
            params: used for the first token. For repeatable draws, give a seed, here and there.
            block_ids: allocated blocks for the whole prompt; None: allocated here.
            num_cached_tokens: how many of the prompt's first tokens already have their keys and
                values in ``block_ids``, which must be given: a prefix found in a store. At least
                one token is computed.
            on_chunk: called after each chunk of ``chunk_tokens``.
            hooks: called around every layer of every chunk.

        Returns:
            The first token and the blocks, which the caller holds until ``release``.

        Raises:
            InvalidArgument: see ``add_request``; or blocks that are not allocated or too few.
            OutOfBlocks: the prompt's blocks are not free now.
            NotFinite: the model computed NaN or infinity.
        """
        request = self._new_request("prefill", prompt_tokens, params, prompt_only=True)
        num_cached_tokens = _check_num_cached("prefill", num_cached_tokens, request)
        if num_cached_tokens and block_ids is None:
            raise InvalidArgument(
                "prefill: num_cached_tokens must be 0 without block_ids, which would hold them, "
                f"got {num_cached_tokens}"
            )
        num_blocks = self.cache.num_blocks_for(request.num_prompt_tokens)
        if block_ids is None:
            request.block_ids = self.allocator.allocate(num_blocks)
        else:
            request.block_ids = self.held("prefill", block_ids, num_blocks)
        request.num_computed = num_cached_tokens
        try:
            return run_prefill(
                self.model,
                self.cache,
                request,
                chunk_tokens=self.chunk_tokens,
                on_chunk=on_chunk,
                hooks=hooks,
            )
        except BaseException:
            if block_ids is None:
                self.allocator.free(request.block_ids)
            raise

    def prefill_selected(
        self,
        prompt_tokens: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        block_ids: Sequence[int],
        is_reused: torch.Tensor,
        num_cached_tokens: int = 0,
        recompute: Recompute = DEFAULT,
    ) -> tuple[Prefilled, tuple[int, ...]]:
        """Compute a prompt over keys and values that others like it left in its blocks.

        Approximate: tokens that are not recomputed keep what is there. The blocks then hold a mix,
        and are not kept for others, with ``keep_prefixes``.

        Args:
            prompt_tokens: the prompt.
            params: as for ``prefill``.
            block_ids: allocated blocks for the whole prompt.
            is_reused: bool ``[num_prompt_tokens - num_cached_tokens]``: which of the tokens after
                the cached ones have keys and values to reuse in ``block_ids``, rotated to their
                positions. The others are computed in every layer.
            num_cached_tokens: how many of the first tokens have exact keys and values there.
            recompute: which of the reused tokens are recomputed in which layer.

        Returns:
            As ``prefill``, in one chunk; and how many tokens' keys and values each layer computed.

        Raises:
            InvalidArgument, NotFinite: see ``prefill``; or ``is_reused`` is not as above.
        """
        op = "prefill_selected"
        request = self._new_request(op, prompt_tokens, params, prompt_only=True)
        request.num_computed = _check_num_cached(op, num_cached_tokens, request)
        _check_is_reused(op, is_reused, request.num_pending, self.model.device)
        if not isinstance(recompute, Recompute):
            refuse(op, "recompute", "a Recompute", recompute)
        num_blocks = self.cache.num_blocks_for(request.num_prompt_tokens)
        request.block_ids = self.held(op, block_ids, num_blocks)
        if bool(is_reused.any()):
            first = request.num_computed // self.cache.block_size
            self.allocator.mark_approximate(request.block_ids[first:])
        return run_selective_prefill(self.model, self.cache, request, is_reused, recompute)

    def reserve(self, num_prompt_tokens: int, params: SamplingParams = GREEDY) -> list[int]:
        """Allocate all the blocks a request will ever need, to receive its keys and values.

        Raises:
            OutOfBlocks: they are not free now.
        """
        num_prompt_tokens = as_integer("reserve", "num_prompt_tokens", num_prompt_tokens)
        check_params("reserve", params)
        context = self.model.config.max_position
        if not 1 <= num_prompt_tokens < context:
            raise InvalidArgument(
                f"reserve: num_prompt_tokens must be in [1, {context}), got {num_prompt_tokens}"
            )
        max_tokens = self._clip(num_prompt_tokens, params)
        return self.allocator.allocate(
            self.cache.num_blocks_for(num_prompt_tokens + max_tokens - 1)
        )

    def reserve_for(
        self, prompt_tokens: Sequence[int], params: SamplingParams = GREEDY
    ) -> tuple[list[int], int]:
        """Allocate all the blocks of a request, the first of them with what is kept of its prompt.

        Returns:
            The blocks, and how many of the first tokens have their keys and values there: 0 without
            ``keep_prefixes``.

        Raises:
            InvalidArgument: see ``add_request``.
            OutOfBlocks: they are not free now.
        """
        request = self._new_request("reserve_for", prompt_tokens, params)
        num_blocks = self.scheduler.num_blocks_for(request)
        block_ids: list[int] = []
        num_cached = self.allocator.allocate_for(request.tokens, num_blocks, into=block_ids)
        return block_ids, num_cached

    def release(self, block_ids: Sequence[int]) -> None:
        """Free blocks that ``prefill``, ``reserve`` or ``reserve_for`` returned.

        Raises:
            InvalidArgument: a block is not the caller's to free; nothing was freed.
        """
        self.allocator.free(self.held("release", block_ids, 0))

    def add_prefilled(
        self,
        prompt_tokens: Sequence[int],
        first_token: int,
        block_ids: Sequence[int],
        params: SamplingParams = GREEDY,
    ) -> int:
        """Continue a request whose prompt was prefilled elsewhere.

        ``step`` reports ``first_token`` first, so a request's tokens are complete: when the request
        first runs, which may be later, while there are ``max_requests`` others.

        Args:
            prompt_tokens: the prompt.
            first_token: the token after it, from ``Prefilled``.
            block_ids: allocated blocks of this engine that hold the prompt's keys and values, in
                order; ``reserve`` gives enough for the whole request, otherwise more are allocated
                here.
            params: as at the prefill.

        Returns:
            The request's id. The blocks are now the request's, and freed when it ends.

        Raises:
            InvalidArgument: see ``add_request``; the blocks stay the caller's.
            OutOfBlocks: the blocks for the further tokens are not free; the same.
        """
        self._check_usable("add_prefilled")
        request = self._new_request("add_prefilled", prompt_tokens, params)
        request.is_prefilled = True
        [first_token] = check_prompt("add_prefilled", [first_token], self.model)
        num_prompt_blocks = self.cache.num_blocks_for(request.num_prompt_tokens)
        held = self.held("add_prefilled", block_ids, num_prompt_blocks)
        missing = max(0, self.scheduler.num_blocks_for(request) - len(held))
        request.block_ids = held + self.allocator.allocate(missing)
        request.num_computed = request.num_prompt_tokens
        request.tokens.append(first_token)
        reason = self._finish_reason(request, first_token, 1)
        if reason is not None:
            self._ready.append(TokenOutput(request.request_id, first_token, 0, reason))
            self.scheduler.finish(request)
        else:
            self._requests[request.request_id] = request
            self.scheduler.add_with_blocks(request)
        return request.request_id

    def held(self, op: str, block_ids: Sequence[int], num_needed: int) -> list[int]:
        """Check that blocks are the caller's: allocated, and not only to requests of this engine.

        Args:
            op: named in errors.
            block_ids: the blocks.
            num_needed: how many are needed at least.

        Returns:
            The blocks, as a list.

        Raises:
            InvalidArgument: a block is not the caller's, or named twice; or they are too few.
        """
        held = as_integers(op, "block_ids", block_ids)
        requests = self._requests.values()
        of_requests = Counter(b for request in requests for b in request.block_ids)
        for index, block_id in enumerate(held):
            if self.allocator.num_holders(block_id) <= of_requests[block_id]:
                raise InvalidArgument(
                    f"{op}: block_ids[{index}] must be an allocated block that no request holds, "
                    f"got {block_id}"
                )
        if len(held) < num_needed or len(set(held)) < len(held):
            raise InvalidArgument(
                f"{op}: block_ids must be at least {num_needed} different blocks, got {held}"
            )
        return held


def _check_is_reused(op: str, is_reused: Any, num_tokens: int, device: torch.device) -> None:
    got = is_reused
    if isinstance(is_reused, torch.Tensor):
        got = (is_reused.dtype, tuple(is_reused.shape), is_reused.device.type)
    if got != (torch.bool, (num_tokens,), device.type):
        refuse(op, "is_reused", f"bool [{num_tokens}] on {device}", got)


def _check_num_cached(op: str, num_cached_tokens: int, request: Request) -> int:
    num_cached_tokens = as_integer(op, "num_cached_tokens", num_cached_tokens)
    if not 0 <= num_cached_tokens < request.num_prompt_tokens:
        raise InvalidArgument(
            f"{op}: num_cached_tokens must be at least 0 and less than the prompt's "
            f"{request.num_prompt_tokens} tokens, got {num_cached_tokens}"
        )
    return num_cached_tokens
