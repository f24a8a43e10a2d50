"""A stage: some layers of a model over a cache that the stages of a machine share."""

import mmap
from collections import deque
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import torch

import mooncake_kernels as mk

from ..attention import attention_of
from ..batch import Batch
from ..config import ModelConfig
from ..errors import NotFinite
from ..kv_cache import PagedKVCache
from ..llama import Llama
from ..loader import load_model
from ..rope import rotation
from ..sampling import Draw, sample
from .link import Inbox, Outbox
from .messages import Done, GroupOptions, Listening, StageOptions, Step

LOOK_S = 0.1  # between two looks at the pipe while the input has not come


def divide_layers(num_layers: int, num_stages: int) -> list[range]:
    """Return each stage's layers; those at the end have one more, if they are not equally many."""
    ends = [index * num_layers // num_stages for index in range(num_stages + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def cache_bytes(config: ModelConfig, options: GroupOptions, dtype: torch.dtype) -> int:
    """Return the size of a group's cache."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    return options.num_blocks * options.block_size * per_token


def shared_cache(
    config: ModelConfig, options: GroupOptions, dtype: torch.dtype, descriptor: int
) -> PagedKVCache:
    """Make a cache in a file's memory, which all stages map; each uses its own layers of it."""
    memory = mmap.mmap(descriptor, cache_bytes(config, options, dtype))
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    return PagedKVCache(
        config, options.num_blocks, block_size=options.block_size, dtype=dtype, buffer=buffer
    )


class Stage:
    """Some layers of a model, and what the first and the last stage have besides.

    Args:
        model: with the weights of these layers alone.
        cache: of all layers.
        layers: its own.
    """

    def __init__(self, model: Llama, cache: PagedKVCache, layers: range) -> None:
        self.model, self.cache, self.layers = model, cache, layers

    @torch.inference_mode()
    def compute(self, batch: Batch, x: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the layers of a step, and write their keys and values.

        Args:
            batch: the step.
            x: ``[num_tokens, hidden_size]``, what the stage before returned; None: this is the
                first.

        Returns:
            ``[num_tokens, hidden_size]``.
        """
        model, attention = self.model, attention_of(batch)
        cos_sin = rotation(batch.positions, model.weights.frequencies, model.dtype)
        if x is None:
            x = model.weights.embedding[batch.token_ids]
        for layer_index, layer in zip(self.layers, model.weights.layers, strict=True):
            q, k, v = model.project(layer, x, cos_sin)
            k_cache, v_cache = self.cache.layer(layer_index)
            attention.append(k, v, k_cache, v_cache)
            x = model.complete_layer(layer, x, attention.attend(q, k_cache, v_cache))
        return x

    @torch.inference_mode()
    def choose(
        self, batch: Batch, x: torch.Tensor, ends: list[int], draws: list[Draw]
    ) -> list[int | None]:
        """Choose the tokens behind some chunks; None for those whose logits are not finite."""
        if not ends:
            return []
        last_rows = [batch.row_starts[end + 1] - 1 for end in ends]
        logits = self.model.to_logits(x[last_rows])
        try:
            return [*sample(logits, draws)]
        except NotFinite as error:
            finite = [row for row in range(len(draws)) if row not in error.requests]
            token_ids: list[int | None] = [None] * len(draws)
            good = sample(logits[finite], [draws[row] for row in finite]) if finite else []
            for row, token_id in zip(finite, good, strict=True):
                token_ids[row] = token_id
            return token_ids


class StageWorker:
    """A process with one stage other than the first: it serves the pipe until that closes.

    Args:
        pipe: the descriptor of the cache's memory comes first, then steps; reports go out.
        options: which stage.
    """

    def __init__(self, pipe: Connection, options: StageOptions):
        torch.set_num_threads(options.group.threads)
        self._pipe, self._steps = pipe, deque[Step]()
        descriptor = recv_handle(pipe)
        dtype, group = getattr(torch, options.dtype), options.group
        layers, batch_invariant = options.layers, group.batch_invariant
        model, _ = load_model(
            group.model, dtype=dtype, batch_invariant=batch_invariant, layers=layers
        )
        config = model.config
        self._stage = Stage(model, shared_cache(config, group, dtype, descriptor), layers)
        self._is_last = layers.stop == config.num_layers
        self.transfer = mk.TransferEngine(transports=("shm",), secret=options.secret)
        self._form = (group.num_slots, group.max_batch_tokens, config.hidden_size, dtype)
        self._inbox = Inbox(self.transfer, *self._form)

    def run(self) -> None:
        """Serve until the engine's process closes its end of the pipe."""
        self._pipe.send(Listening(self.transfer.name, self._inbox.address))
        outbox = None
        if not self._is_last:
            next_stage: Listening = self._pipe.recv()
            outbox = Outbox(self.transfer, next_stage.engine_name, next_stage.address, *self._form)
        while True:
            step = self._next_step()
            batch = Batch.build(step.chunks, self._stage.cache.block_size)
            x = self._inbox.take(step.number, len(batch.token_ids))
            x = self._stage.compute(batch, x)
            if outbox is not None:
                outbox.send(step.number, x)
            else:
                token_ids = self._stage.choose(batch, x, [*step.ends], [*step.draws])
                self._pipe.send(Done(step.number, token_ids))

    def _next_step(self) -> Step:
        """Wait for a step and its input.

        Raises:
            EOFError: there is none any more.
        """
        while not self._steps or not self._inbox.wait(self._steps[0].number, LOOK_S):
            if not self._steps or self._pipe.poll():
                self._steps.append(self._pipe.recv())
        return self._steps.popleft()
