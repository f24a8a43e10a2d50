"""The calls of ``MooncakeDistributedStore`` on tensors in memory given by address."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from mooncake_kernels.errors import InvalidArgument

from .batch_calls import Value
from .buffer_calls import BufferCalls, Numbers
from .codes import (
    INVALID_PARAMS,
    OBJECT_NOT_FOUND,
    check_list,
    code_of,
    fill,
    or_else,
    returns_code,
    returns_instead,
)
from .replicate_config import keeping_of
from .tensor_header import decode
from .tensor_shard_calls import TensorShardCalls, shard_key, shards_of


class TensorMemoryCalls(BufferCalls, TensorShardCalls):
    """In memory, as in a value, 128 bytes with the dtype and shape precede the elements.

    ``put_tensor_from`` accepts what ``get_tensor_into`` has filled. The memory is the host's.
    """

    @returns_instead(None)
    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> torch.Tensor | None:
        """Copy a tensor into memory, which may be larger than its value.

        Returns:
            The tensor in that memory, which must outlive it; None if there is none, the value is
            something else, or the memory is too small.
        """
        return self._tensor_into(key, buffer_ptr, size)

    @returns_instead([None])
    def batch_get_tensor_into(
        self, keys: Sequence[str], buffer_ptrs: Numbers, sizes: Numbers
    ) -> list[torch.Tensor | None]:
        """``get_tensor_into`` for many. None for all if the lists differ in length."""
        return self._tensors_into(
            "batch_get_tensor_into", keys, buffer_ptrs, sizes, lambda key: key
        )

    @returns_instead(None)
    def get_tensor_with_tp_into(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> torch.Tensor | None:
        """``get_tensor_into`` for a rank's shard."""
        return self._tensor_into(shard_key(key, tp_rank, tp_size), buffer_ptr, size)

    @returns_instead([None])
    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Numbers,
        sizes: Numbers,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[torch.Tensor | None]:
        """``get_tensor_with_tp_into`` for many."""
        return self._tensors_into(
            "batch_get_tensor_with_tp_into",
            base_keys,
            buffer_ptrs,
            sizes,
            lambda key: shard_key(key, tp_rank, tp_size),
        )

    @returns_code
    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Store a tensor from memory: 0, -200; -600 if it is not a tensor, or not of this size."""
        return self._put_tensor_from(key, buffer_ptr, size)

    @returns_code
    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """``put_tensor_from`` that replaces an existing value, see ``upsert``."""
        return self._put_tensor_from(key, buffer_ptr, size, replace=True)

    @returns_instead([INVALID_PARAMS])
    def batch_put_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Numbers, sizes: Numbers
    ) -> list[int]:
        """``put_tensor_from`` for many: one code each."""
        return self._put_each(
            "batch_put_tensor_from",
            keys,
            (buffer_ptrs, sizes),
            lambda i: [self._tensor_memory(buffer_ptrs[i], sizes[i])],
            None,
        )

    @returns_instead([INVALID_PARAMS])
    def batch_upsert_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Numbers, sizes: Numbers
    ) -> list[int]:
        """``upsert_tensor_from`` for many."""
        return self._put_each(
            "batch_upsert_tensor_from",
            keys,
            (buffer_ptrs, sizes),
            lambda i: [self._tensor_memory(buffer_ptrs[i], sizes[i])],
            None,
            replace=True,
        )

    @returns_code
    def put_tensor_with_tp_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """``put_tensor_with_tp`` of a whole tensor from memory."""
        tensor = decode(self._host_memory(buffer_ptr, size, writes=False))
        return self._put_shards("put_tensor_with_tp_from", key, tensor, None, tp_size, split_dim)

    @returns_instead([INVALID_PARAMS])
    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Numbers,
        sizes: Numbers,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """``put_tensor_with_tp_from`` for many: one code each."""
        op = "batch_put_tensor_with_tp_from"
        values: dict[int, list[Value]] = {}

        def look_up(i: int) -> int:
            tensor = decode(self._host_memory(buffer_ptrs[i], sizes[i], writes=False))
            values[i] = shards_of(base_keys[i], tensor, tp_size, split_dim)
            return 0

        codes = self._each(op, base_keys, (buffer_ptrs, sizes), look_up)
        return self._put_values(op, codes, values, None, replace=False)

    def _tensor_into(self, key: str, pointer: int, size: int) -> torch.Tensor | None:
        memory = self._host_memory(pointer, size, writes=True)
        num_bytes = self._running().objects.get_into(key, [memory])
        return None if num_bytes == OBJECT_NOT_FOUND else decode(memory[:num_bytes])

    def _put_tensor_from(self, key: str, pointer: int, size: int, *, replace: bool = False) -> int:
        memory = self._tensor_memory(pointer, size)
        objects = self._running().objects
        put: Callable = objects.replace if replace else objects.put
        put(key, [memory], keeping_of(None))
        return 0

    def _tensors_into(
        self,
        op: str,
        keys: Sequence[str],
        pointers: Numbers,
        sizes: Numbers,
        name_of: Callable[[str], str],
    ) -> list[torch.Tensor | None]:
        """Copy each key's tensor into its memory, all in one call."""
        _check_lists(keys, pointers, sizes)
        names: dict[int, str] = {}
        memories: dict[int, memoryview] = {}

        def look_up(i: int) -> int:
            name = name_of(keys[i])
            memories[i] = self._host_memory(pointers[i], sizes[i], writes=True)
            names[i] = name
            return 0

        codes = [code_of(op, partial(look_up, i)) for i in range(len(keys))]
        wanted, views = [*names.values()], [[memory] for memory in memories.values()]
        fill(op, codes, [*names], lambda: self._running().objects.get_into_each(op, wanted, views))
        return [
            None
            if num_bytes < 0
            else or_else(op, partial(decode, memories[i][:num_bytes]), lambda: None)
            for i, num_bytes in enumerate(codes)
        ]

    def _tensor_memory(self, pointer: int, size: int) -> memoryview:
        """The memory of a tensor's value; anything else is refused."""
        memory = self._host_memory(pointer, size, writes=False)
        decode(memory)
        return memory

    def _host_memory(self, pointer: int, size: int, *, writes: bool) -> memoryview:
        memory = self._running().buffers.view(pointer, size, writes=writes)
        if not isinstance(memory, memoryview):
            raise InvalidArgument(f"buffer_ptr must be host memory, got {memory.location}")
        return memory


def _check_lists(keys: Sequence[str], pointers: Numbers, sizes: Numbers) -> None:
    check_list("keys", keys)
    check_list("buffer_ptrs", pointers)
    check_list("sizes", sizes)
    if not len(keys) == len(pointers) == len(sizes):
        raise InvalidArgument(
            f"buffer_ptrs and sizes must be as many as keys, got {len(pointers)}, {len(sizes)} "
            f"and {len(keys)}"
        )
