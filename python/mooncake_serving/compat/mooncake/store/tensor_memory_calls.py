"""The calls of ``MooncakeDistributedStore`` on tensors in memory given by address."""

from collections.abc import Callable, Sequence

import torch

from mooncake_kernels.errors import InvalidArgument

from .buffer_calls import BufferCalls, Numbers
from .codes import INVALID_PARAMS, OBJECT_NOT_FOUND, check_list, returns_code, returns_instead
from .replicate_config import keeping_of
from .tensor_header import decode
from .tensor_shard_calls import TensorShardCalls, shard_key


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
        _check_lists(keys, buffer_ptrs, sizes)
        return [self.get_tensor_into(*one) for one in zip(keys, buffer_ptrs, sizes, strict=True)]

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
        _check_lists(base_keys, buffer_ptrs, sizes)
        return [
            self.get_tensor_with_tp_into(*one, tp_rank, tp_size)
            for one in zip(base_keys, buffer_ptrs, sizes, strict=True)
        ]

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
        return self._each(
            "batch_put_tensor_from",
            keys,
            (buffer_ptrs, sizes),
            lambda i: self._put_tensor_from(keys[i], buffer_ptrs[i], sizes[i]),
        )

    @returns_instead([INVALID_PARAMS])
    def batch_upsert_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Numbers, sizes: Numbers
    ) -> list[int]:
        """``upsert_tensor_from`` for many."""
        return self._each(
            "batch_upsert_tensor_from",
            keys,
            (buffer_ptrs, sizes),
            lambda i: self._put_tensor_from(keys[i], buffer_ptrs[i], sizes[i], replace=True),
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
        return self._put_shards_from(key, buffer_ptr, size, tp_size, split_dim)

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
        return self._each(
            "batch_put_tensor_with_tp_from",
            base_keys,
            (buffer_ptrs, sizes),
            lambda i: self._put_shards_from(
                base_keys[i], buffer_ptrs[i], sizes[i], tp_size, split_dim
            ),
        )

    def _tensor_into(self, key: str, pointer: int, size: int) -> torch.Tensor | None:
        memory = self._host_memory(pointer, size, writes=True)
        num_bytes = self._running().objects.get_into(key, [memory])
        return None if num_bytes == OBJECT_NOT_FOUND else decode(memory[:num_bytes])

    def _put_tensor_from(self, key: str, pointer: int, size: int, *, replace: bool = False) -> int:
        memory = self._host_memory(pointer, size, writes=False)
        decode(memory)  # refuses values that are not tensors
        objects = self._running().objects
        put: Callable = objects.replace if replace else objects.put
        put(key, [memory], keeping_of(None))
        return 0

    def _put_shards_from(
        self, key: str, pointer: int, size: int, tp_size: int, split_dim: int
    ) -> int:
        tensor = decode(self._host_memory(pointer, size, writes=False))
        return self._put_shards(key, tensor, None, tp_size, split_dim)

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
