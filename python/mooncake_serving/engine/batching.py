"""Continuous batching of requests on one model and one cache."""

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from mooncake_kernels.errors import InvalidArgument

from ..arguments import refuse
from .arguments import as_positive, as_prompts, check_params
from .batch import Batch
from .block_allocator import BlockAllocator
from .caching_allocator import CachingAllocator
from .errors import NotFinite, OutOfBlocks
from .kv_cache import PagedKVCache
from .llama import LayerHooks, Llama
from .prefill import check_prompt
from .request import FinishReason, Generation, Request, TokenOutput
from .sampling import SamplingParams, sample
from .scheduler import Scheduler

GREEDY = SamplingParams()
OnStep = Callable[[Sequence[tuple[Request, int]]], LayerHooks | None]


class BatchingEngine:
    """Serve requests on one model: add them, then ``step`` until none is left.

    A step computes one token of every decoding request and, with the rest of its token budget,
    chunks of prompts. Requests wait while blocks are short. Not thread-safe.

    Args:
        model: the model.
        cache: of the model's config, dtype and device; the engine hands out its blocks.
        max_batch_tokens: tokens of one step.
        chunk_tokens: tokens of one prompt in one step; None: as many as the step has.
        max_requests: requests of one step.
        keep_prefixes: keep full blocks of prompts and answers until their memory is needed, and
            begin prompts behind those that they have in common with earlier ones. Ctrl-C in a step
            may then cost blocks.
        on_step: called before each step with its requests and how many tokens it computes of each;
            the hooks that it returns are called around the step's layers. What either raises,
            ``step`` raises: no request has advanced then, and the next step computes it again.

    Raises:
        InvalidArgument: the cache does not belong to the model, or a number is not positive.
    """

    def __init__(
        self,
        model: Llama,
        cache: PagedKVCache,
        *,
        max_batch_tokens: int = 512,
        chunk_tokens: int | None = None,
        max_requests: int = 64,
        keep_prefixes: bool = False,
        on_step: OnStep | None = None,
    ) -> None:
        max_batch_tokens = as_positive("Engine", "max_batch_tokens", max_batch_tokens)
        max_requests = as_positive("Engine", "max_requests", max_requests)
        self.chunk_tokens = max_batch_tokens
        if chunk_tokens is not None:
            self.chunk_tokens = as_positive("Engine", "chunk_tokens", chunk_tokens)
        _check_cache(model, cache)
        self.model, self.cache = model, cache
        self.allocator = BlockAllocator(cache.num_blocks)
        if keep_prefixes:
            self.allocator = CachingAllocator(cache.num_blocks, cache.block_size)
        self._on_step = on_step
        self.scheduler = Scheduler(
            self.allocator,
            cache.block_size,
            max_batch_tokens=max_batch_tokens,
            chunk_tokens=self.chunk_tokens,
            max_requests=max_requests,
        )
        self._requests: dict[int, Request] = {}
        self._ids = itertools.count()
        self._advances: deque[_Advance] = deque()  # what a step has computed, until it is settled
        self._ready: list[TokenOutput] = []  # of the next step to return
        self._in_stream = False

    @property
    def num_waiting(self) -> int:
        """Count the requests that do not run yet: most have no blocks."""
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Count the requests that are being computed."""
        return len(self.scheduler.running)

    @property
    def has_work(self) -> bool:
        """Tell whether ``step`` would yield or compute anything."""
        return bool(self._requests or self._ready)

    def add_request(self, prompt_tokens: Sequence[int], params: SamplingParams = GREEDY) -> int:
        """Queue a prompt; its tokens come out of ``step``.

        Returns:
            The request's id, which is not used again.

        Raises:
            InvalidArgument: a prompt that is empty, too long or not of this vocabulary, or one that
                with ``max_tokens`` does not fit into the whole cache; or a ``stream`` is open.
        """
        self._check_usable("add_request")
        return self._add_request(prompt_tokens, params)

    def step(self) -> list[TokenOutput]:
        """Compute one batch and return its new tokens; [] while prompts are in progress.

        Ctrl-C may interrupt it: what it has computed by then, the next step returns.

        Raises:
            InvalidArgument: a ``stream`` is open, which would miss them.
            OutOfBlocks: nothing runs, and the next request's blocks are held outside the engine
                (``Engine.reserve``, ``Engine.prefill``); release some and step again.
            NotFinite: the model computed NaN or infinity for the requests it names; abort them
                and step again.
        """
        self._check_usable("step")
        return self._step()

    def _step(self) -> list[TokenOutput]:
        self._settle()
        self._compute(self.scheduler.next_step())
        outputs, self._ready = self._ready, []
        return outputs

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY
    ) -> list[Generation]:
        """Run prompts to completion together; results are in the prompts' order.

        Raises:
            InvalidArgument: see ``add_request``; also if the engine has other work, whose tokens
                would be lost here.
            OutOfBlocks, NotFinite: see ``step``; all of the prompts are aborted, and the tokens
                that they have so far are lost.
        """
        prompts = as_prompts("generate", prompts)
        token_ids: list[list[int]] = [[] for _ in prompts]
        reasons: list[FinishReason] = ["stop" for _ in prompts]
        for index, output in self.stream(prompts, params):
            token_ids[index].append(output.token_id)
            if output.finish_reason is not None:
                reasons[index] = output.finish_reason
        return [Generation(t, r) for t, r in zip(token_ids, reasons, strict=True)]

    def stream(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY
    ) -> Iterator[tuple[int, TokenOutput]]:
        """Run prompts together and yield (index of the prompt, token) as tokens come.

        Until the generator ends or is closed, which aborts what is unfinished, requests can
        neither be added nor stepped otherwise. Errors are those of ``generate``.
        """
        self._check_usable("generate")
        if self.has_work:
            raise InvalidArgument(
                f"generate: the engine must be idle, got {len(self._requests)} unfinished requests"
            )
        prompts = as_prompts("generate", prompts)
        index_of: dict[int, int] = {}
        self._in_stream = True
        try:
            for index, prompt in enumerate(prompts):
                index_of[self._add_request(prompt, params)] = index
            while self.has_work:
                for output in self._step():
                    yield index_of[output.request_id], output
        finally:
            self._in_stream = False
            for request_id in list(self._requests):  # all are of this stream
                self.abort(request_id)
            self._ready = []  # of those that have ended

    def abort(self, request_id: int) -> bool:
        """End a request now and free its blocks; False if it has ended already.

        A first token that ``step`` has not returned yet is dropped with it.
        """
        self._settle()
        self._ready = [output for output in self._ready if output.request_id != request_id]
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request)
        return True

    def _compute(self, work: Sequence[tuple[Request, int]]) -> None:
        """Run one batch; the requests advance only if nothing is raised."""
        if not work:
            if self.scheduler.waiting and not self._ready:
                raise OutOfBlocks(
                    f"step: {self.num_waiting} requests wait for blocks that are held outside the "
                    f"engine, {self.allocator.num_free} of {self.cache.num_blocks} are free"
                )
            return
        chunks = [request.next_chunk(num_tokens) for request, num_tokens in work]
        batch = Batch.build(chunks, self.cache.block_size, self.model.device)
        ends = [index for index, (request, n) in enumerate(work) if n == request.num_pending]
        logits = self._forward(work, batch, ends)
        chosen = [work[index][0] for index in ends]
        try:
            token_ids = sample(logits, [request.next_draw() for request in chosen])
        except NotFinite as error:
            raise NotFinite("step", [chosen[i].request_id for i in error.requests]) from None
        new = dict(zip(chosen, token_ids, strict=True))
        # One assignment: Ctrl-C finds the whole step either not computed or to be settled.
        self._advances = deque(self._advance(r, n, new.get(r)) for r, n in work)
        self._settle()

    def _forward(
        self, work: Sequence[tuple[Request, int]], batch: Batch, ends: Sequence[int]
    ) -> torch.Tensor:
        """Compute the logits after the last token of the requests ``ends`` of ``work``."""
        hooks = None if self._on_step is None else self._on_step(work)
        return self.model.forward(batch, self.cache, requests=ends, hooks=hooks)

    def _check_usable(self, op: str) -> None:
        """Refuse an operation on an engine that a stream has to itself."""
        if self._in_stream:
            raise InvalidArgument(
                f"{op}: the engine's stream must be finished or closed before, got one of "
                f"{len(self._requests)} unfinished requests"
            )

    def _add_request(self, prompt_tokens: Sequence[int], params: SamplingParams) -> int:
        request = self._new_request("add_request", prompt_tokens, params)
        self._requests[request.request_id] = request
        self.scheduler.waiting.append(request)
        return request.request_id

    def _new_request(
        self,
        op: str,
        prompt_tokens: Sequence[int],
        params: SamplingParams,
        *,
        prompt_only: bool = False,
    ) -> Request:
        tokens = check_prompt(op, prompt_tokens, self.model)
        check_params(op, params)
        seed = random.getrandbits(64) if params.seed is None else params.seed
        max_tokens = 1 if prompt_only else self._clip(len(tokens), params)
        request = Request(next(self._ids), tokens, len(tokens), params, seed, max_tokens)
        self._check_fits(op, request)
        return request

    def _check_fits(self, op: str, request: Request) -> None:
        if self.scheduler.num_blocks_for(request) > self.cache.num_blocks:
            raise InvalidArgument(
                f"{op}: prompt_tokens and max_tokens must fit into {self.cache.num_blocks} blocks "
                f"of {self.cache.block_size} tokens, got {request.num_prompt_tokens} + "
                f"{request.max_tokens} tokens"
            )

    def _clip(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        return min(params.max_tokens, self.model.config.max_position - num_prompt_tokens)

    def _advance(self, request: Request, num_tokens: int, token_id: int | None) -> "_Advance":
        """Return what a request is to be after a step, which changes nothing yet."""
        outputs = request.first_token()
        if token_id is not None:
            index = request.num_generated
            reason = self._finish_reason(request, token_id, index + 1)
            outputs.append(TokenOutput(request.request_id, token_id, index, reason))
        return _Advance(request, request.num_computed + num_tokens, outputs)

    def _settle(self) -> None:
        """Advance the requests of a step; what was interrupted is done again: it alters nothing."""
        while self._advances:
            request, num_computed, outputs = self._advances[0]
            request.num_computed = num_computed
            for output in outputs:
                index = request.num_prompt_tokens + output.token_index
                request.tokens[index:] = [output.token_id]
            if self._ready[-1:] != outputs[-1:]:
                self._ready += outputs
            is_over = bool(outputs) and outputs[-1].finished
            # Of a prompt at once, for others that wait; of the answer when that is whole.
            if request.block_ids and (is_over or (outputs and outputs[-1].token_index == 0)):
                self.allocator.keep(request.tokens[:num_computed], request.block_ids)
            if is_over:
                self._end(request)
            self._advances.popleft()

    def _end(self, request: Request) -> None:
        """Free what a request holds, and forget it last: it can be ended again until then."""
        self.scheduler.finish(request)
        self._requests.pop(request.request_id, None)

    def _finish_reason(
        self, request: Request, token_id: int, num_generated: int
    ) -> FinishReason | None:
        params = request.params
        is_eos = token_id in self.model.config.eos_token_ids and not params.ignore_eos
        if is_eos or token_id in params.stop_token_ids:
            return "stop"
        return "length" if num_generated == request.max_tokens else None


class _Advance(NamedTuple):
    """What one step made of one request."""

    request: Request
    num_computed: int
    outputs: list[TokenOutput]


def _check_cache(model: Llama, cache: PagedKVCache) -> None:
    if not isinstance(model, Llama):
        refuse("Engine", "model", "a Llama", model)
    if not isinstance(cache, PagedKVCache):
        refuse("Engine", "cache", "a PagedKVCache", cache)
    k, _ = cache.layer(0)
    got = (cache.num_layers, *k.shape[2:], cache.dtype, cache.device)
    config = model.config
    want = (config.num_layers, config.num_kv_heads, config.head_dim, model.dtype, model.device)
    if got != want:
        raise InvalidArgument(
            "Engine: cache must have the model's layers, KV heads, head size, dtype and device "
            f"{want}, got {got}"
        )
