"""An engine whose steps pass through the stages of a group."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import InvalidArgument

from ..batch import Batch, Chunk
from ..batching import OnStep
from ..engine import Engine
from ..errors import NotFinite
from ..llama import LayerHooks
from ..request import Request, TokenOutput
from .group import StageGroup
from .sizes import StepSizes, fit_cost

WAIT_S = 0.01  # for a step that is under way, in one of ``step``


class _Launched(NamedTuple):
    """A step that is under way."""

    work: Sequence[tuple[Request, int]]
    written: Callable[[int], None] | None


class PipelinedEngine(Engine, Closeable):
    """Serve requests as ``Engine`` does, by the stages of a group: several steps are under way.

    ``step`` computes the first stage of a step, and returns the tokens of those that are done by
    then. Chunks of a prompt follow each other without waiting for each other. With long prefixes
    they are smaller, so that all steps take equally long: the engine measures some when it is
    made. Its ``prefill`` and ``prefill_selected`` are refused.

    Args:
        group: of the stages; closed by the engine's ``close``.
        chunk_tokens: of one step, at the beginning of a prompt.
        max_requests, keep_prefixes, on_step: see ``BatchingEngine``. Of the hooks of a step, all of
            before its layers are called before it is launched, since other stages do not call
            them, and that behind the last layer when it is done.
    """

    def __init__(
        self,
        group: StageGroup,
        *,
        chunk_tokens: int = 128,
        max_requests: int = 64,
        keep_prefixes: bool = False,
        on_step: OnStep | None = None,
    ) -> None:
        super().__init__(
            group.stage.model,
            group.cache,
            max_batch_tokens=group.options.max_batch_tokens,
            chunk_tokens=chunk_tokens,
            max_requests=max_requests,
            keep_prefixes=keep_prefixes,
            on_step=on_step,
        )
        self.group = group
        self._under_way: deque[_Launched] = deque()  # in order
        self._not_finite: list[int] = []  # requests
        capacity = self.cache.num_blocks * self.cache.block_size
        longest = min(capacity, self.model.config.max_position)
        cost = fit_cost(self._compute_alone, self.chunk_tokens, longest)
        self._sizes = StepSizes(cost, self.chunk_tokens)

    def abort(self, request_id: int) -> bool:
        """End a request and free its blocks, when no stage computes it; see ``BatchingEngine``."""
        request = self._requests.get(request_id)
        while request is not None and request.num_under_way:
            self._take_done(WAIT_S)
        if request_id in self._not_finite:
            self._not_finite.remove(request_id)
        return super().abort(request_id)

    def prefill(self, *_: object, **__: object) -> NoReturn:
        """Refuse: prompts are computed by ``add_request`` and ``step``."""
        raise InvalidArgument("prefill: engine must have all layers, got one of a group")

    def prefill_selected(self, *_: object, **__: object) -> NoReturn:
        """Refuse, as ``prefill``."""
        raise InvalidArgument("prefill_selected: engine must have all layers, got one of a group")

    def close(self) -> None:
        """End the group. Idempotent."""
        self.group.close()

    def _step(self) -> list[TokenOutput]:
        self._settle()
        while self._take_done(0.0):
            pass
        self._refuse_not_finite()
        work = self.scheduler.next_step() if self.group.has_room else []
        if work or not self._under_way:
            self._compute(self._sizes.cut(work))
        elif not self._ready:
            self._take_done(WAIT_S)
        self._refuse_not_finite()
        outputs, self._ready = self._ready, []
        return outputs

    def _compute(self, work: Sequence[tuple[Request, int]]) -> None:
        """Launch a step; its requests advance when it is done."""
        if not work:
            super()._compute(work)
            return
        hooks = (self._on_step and self._on_step(work)) or LayerHooks()
        if hooks.before_attention is not None:
            for layer_index in range(self.cache.num_layers):
                hooks.before_attention(layer_index)
        chunks = [request.next_chunk(num_tokens) for request, num_tokens in work]
        ends = [index for index, (request, n) in enumerate(work) if n == request.num_pending]
        draws = [work[index][0].next_draw() for index in ends]
        self.group.launch(chunks, ends, draws)
        for request, num_tokens in work:
            request.num_under_way += num_tokens
        self._under_way.append(_Launched(work, hooks.after_write))

    def _take_done(self, timeout_s: float) -> bool:
        """Advance the requests of the next step, if it is done in time."""
        token_ids = self.group.take_done(timeout_s)
        if token_ids is None:
            return False
        (work, written), chosen = self._under_way.popleft(), iter(token_ids)
        if written is not None:  # of the last layer, behind all others
            written(self.cache.num_layers - 1)
        advances = []
        for request, num_tokens in work:
            is_end = request.num_computed + num_tokens == len(request.tokens)
            token_id = next(chosen) if is_end else None
            request.num_under_way -= num_tokens
            if is_end and token_id is None:
                self._not_finite.append(request.request_id)
            else:
                advances.append(self._advance(request, num_tokens, token_id))
        self._advances = deque(advances)
        self._settle()
        return True

    def _refuse_not_finite(self) -> None:
        """Raise for requests whose logits are not finite, before they are computed again."""
        if self._not_finite:
            requests, self._not_finite = self._not_finite, []
            raise NotFinite("step", requests)

    def _compute_alone(self, num_tokens: int, prefix_tokens: int) -> None:
        """Compute a chunk of the first stage, over blocks that no one has yet."""
        blocks = range(self.cache.num_blocks_for(prefix_tokens + num_tokens))
        chunk = Chunk([0] * num_tokens, prefix_tokens, blocks)
        self.group.stage.compute(Batch.build([chunk], self.cache.block_size))
