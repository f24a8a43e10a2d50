"""The calls of ``MooncakeDistributedStore`` on tensors that are distributed over ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from mooncake_kernels.errors import InvalidArgument

from .batch_calls import Value
from .buffer_calls import Numbers, check_columns
from .buffers import too_small
from .codes import INVALID_PARAMS, check_list, log, or_else, returns_code, returns_instead
from .naming import encoded
from .parallelism import ReadTarget, TensorParallelism, layout_of, shard_of, target_of
from .replicate_config import ReplicateConfig
from .sharded_tensors import read_tensor
from .tensor_calls import Tensors, copied, value_of
from .tensor_header import Shard, decode
from .tensor_memory_calls import TensorMemoryCalls
from .tensor_shard_calls import cut, name_of_shard, values_of_shards

Parallelisms = Sequence[TensorParallelism | None]
Partitions = Sequence[Any]  # objects with rank, size and split_dim, or None


class TensorParallelCalls(TensorMemoryCalls):
    """A tensor is stored whole, or as a shard for each TP rank; it is read in either form, whoever
    has stored it.

    Axes of the other kinds are a part of its name.

    What a put stores:

    ======================================= ====================== ===========================
    layout                                  ``tensor`` is          stored
    ======================================= ====================== ===========================
    none                                    the whole tensor       it
    ``writer_partition``                    the whole tensor       this rank's shard
    ``parallelism`` of a tp axis alone      this rank's shard      it
    ``parallelism`` of a tp axis and others the whole tensor       this rank's shard
    ``parallelism`` without a tp axis       the whole tensor       it
    ======================================= ====================== ===========================

    ``_from`` of a parallelism with a tp axis takes the whole tensor, and stores all shards.
    """

    @returns_code
    def put_tensor_with_parallelism(
        self,
        key: str,
        tensor: torch.Tensor,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """Store a tensor, or a shard of it: 0, -200 or -600."""
        values = values_of(key, tensor, parallelism, writer_partition)
        return self._put_all("put_tensor_with_parallelism", values, config)

    @returns_code
    def upsert_tensor_with_parallelism(
        self,
        key: str,
        tensor: torch.Tensor,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """``put_tensor_with_parallelism`` that replaces an existing value, see ``upsert``."""
        values = values_of(key, tensor, parallelism, writer_partition)
        return self._put_all("upsert_tensor_with_parallelism", values, config, replace=True)

    @returns_instead([INVALID_PARAMS])
    def batch_put_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: Tensors,
        parallelisms: Parallelisms | None = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Partitions | None = None,
    ) -> list[int]:
        """``put_tensor_with_parallelism`` for many: one code each."""
        return self._put_distributed(
            "batch_put_tensor_with_parallelism",
            keys,
            (tensors_list,),
            lambda i, *layout: values_of(keys[i], tensors_list[i], *layout),
            (parallelisms, writer_partitions),
            config,
        )

    @returns_instead([INVALID_PARAMS])
    def batch_upsert_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: Tensors,
        parallelisms: Parallelisms | None = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Partitions | None = None,
    ) -> list[int]:
        """``upsert_tensor_with_parallelism`` for many."""
        return self._put_distributed(
            "batch_upsert_tensor_with_parallelism",
            keys,
            (tensors_list,),
            lambda i, *layout: values_of(keys[i], tensors_list[i], *layout),
            (parallelisms, writer_partitions),
            config,
            replace=True,
        )

    @returns_code
    def put_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """Store a whole tensor from memory, or shards of it: 0, -200 or -600."""
        values = self._values_in(key, buffer_ptr, size, parallelism, writer_partition)
        return self._put_all("put_tensor_with_parallelism_from", values, config)

    @returns_code
    def upsert_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """``put_tensor_with_parallelism_from`` that replaces an existing value, see ``upsert``."""
        values = self._values_in(key, buffer_ptr, size, parallelism, writer_partition)
        return self._put_all("upsert_tensor_with_parallelism_from", values, config, replace=True)

    @returns_instead([INVALID_PARAMS])
    def batch_put_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Numbers,
        sizes: Numbers,
        parallelisms: Parallelisms | None = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Partitions | None = None,
    ) -> list[int]:
        """``put_tensor_with_parallelism_from`` for many: one code each."""
        return self._put_distributed(
            "batch_put_tensor_with_parallelism_from",
            keys,
            (buffer_ptrs, sizes),
            lambda i, *layout: self._values_in(keys[i], buffer_ptrs[i], sizes[i], *layout),
            (parallelisms, writer_partitions),
            config,
        )

    @returns_instead([INVALID_PARAMS])
    def batch_upsert_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Numbers,
        sizes: Numbers,
        parallelisms: Parallelisms | None = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Partitions | None = None,
    ) -> list[int]:
        """``upsert_tensor_with_parallelism_from`` for many."""
        return self._put_distributed(
            "batch_upsert_tensor_with_parallelism_from",
            keys,
            (buffer_ptrs, sizes),
            lambda i, *layout: self._values_in(keys[i], buffer_ptrs[i], sizes[i], *layout),
            (parallelisms, writer_partitions),
            config,
            replace=True,
        )

    @returns_instead(None)
    def get_tensor_with_parallelism(
        self, key: str, target: ReadTarget | None = None
    ) -> torch.Tensor | None:
        """Return a tensor, or a shard of it; None if there is none, or a part is missing."""
        return self._read("get_tensor_with_parallelism", key, target, _new_memory)

    @returns_instead([None])
    def batch_get_tensor_with_parallelism(
        self, keys: Sequence[str], targets: Sequence[ReadTarget | None] | None = None
    ) -> list[torch.Tensor | None]:
        """``get_tensor_with_parallelism`` for many; with ``targets`` key by key."""
        op = "batch_get_tensor_with_parallelism"
        if targets is None:
            return self._get_values(op, keys, copied, None)
        return self._read_each(op, keys, (targets,), lambda i: (targets[i], _new_memory))

    @returns_instead(None)
    def get_tensor_with_parallelism_into(
        self, key: str, buffer_ptr: int, size: int, target: ReadTarget | None = None
    ) -> torch.Tensor | None:
        """``get_tensor_with_parallelism`` into memory, as ``get_tensor_into`` does.

        If shards are missing, some elements may have been written there.
        """
        memory = self._host_memory(buffer_ptr, size, writes=True)
        return self._read("get_tensor_with_parallelism_into", key, target, _part_of(memory))

    @returns_instead([None])
    def batch_get_tensor_with_parallelism_into(
        self,
        keys: Sequence[str],
        buffer_ptrs: Numbers,
        sizes: Numbers,
        targets: Sequence[ReadTarget | None] | None = None,
    ) -> list[torch.Tensor | None]:
        """``get_tensor_with_parallelism_into`` for many, key by key."""
        columns: tuple[Sequence, ...] = (
            buffer_ptrs,
            sizes,
            *([] if targets is None else [targets]),
        )

        def place(i: int) -> tuple[ReadTarget | None, Callable[[int], memoryview]]:
            memory = self._host_memory(buffer_ptrs[i], sizes[i], writes=True)
            return None if targets is None else targets[i], _part_of(memory)

        return self._read_each("batch_get_tensor_with_parallelism_into", keys, columns, place)

    def _put_all(
        self,
        op: str,
        values: list[Value],
        config: ReplicateConfig | None,
        *,
        replace: bool = False,
    ) -> int:
        return self._put_values(op, [0], {0: values}, config, replace=replace)[0]

    def _put_distributed(
        self,
        op: str,
        keys: Sequence[str],
        columns: Sequence[Sequence],
        make: Callable[..., list[Value]],
        layouts: tuple[Parallelisms | None, Partitions | None],
        config: ReplicateConfig | None,
        *,
        replace: bool = False,
    ) -> list[int]:
        """Store what ``make`` makes of each index and its layout."""
        given = [column for column in layouts if column is not None]
        values: dict[int, list[Value]] = {}

        def look_up(i: int) -> int:
            if len(given) > 1:
                raise InvalidArgument("parallelisms or writer_partitions must be None, got both")
            values[i] = make(i, *(None if column is None else column[i] for column in layouts))
            return 0

        codes = self._each(op, keys, (*columns, *given), look_up)
        return self._put_values(op, codes, values, config, replace=replace)

    def _values_in(
        self, key: str, pointer: int, size: int, parallelism: Any, writer_partition: Any
    ) -> list[Value]:
        """The values to be stored of a whole tensor in memory."""
        tensor = decode(self._host_memory(pointer, size, writes=False))
        return values_of(key, tensor, parallelism, writer_partition, all_shards=True)

    def _read(
        self, op: str, key: str, target: Any, room: Callable[[int], memoryview]
    ) -> torch.Tensor | None:
        encoded(key)  # refuses invalid names
        return read_tensor(op, self._running().objects, key, target_of(target), room)

    def _read_each(
        self,
        op: str,
        keys: Sequence[str],
        columns: Sequence[Sequence],
        place: Callable[[int], tuple[Any, Callable[[int], memoryview]]],
    ) -> list[torch.Tensor | None]:
        """What ``_read`` returns for each key, with the target and the memory of its index."""
        check_list("keys", keys)
        try:
            check_columns(keys, columns)
        except InvalidArgument as error:
            log.error("%s: %s", op, error)
            return [None] * len(keys)

        def one(i: int) -> torch.Tensor | None:
            return self._read(op, keys[i], *place(i))

        return [or_else(op, partial(one, i), lambda: None) for i in range(len(keys))]


def values_of(
    key: str,
    tensor: torch.Tensor,
    parallelism: Any,
    writer_partition: Any,
    *,
    all_shards: bool = False,
) -> list[Value]:
    """What is stored of a tensor; ``all_shards``: it is whole, and those of all TP ranks are.

    Raises:
        InvalidArgument: the layout is wrong, or the tensor cannot be cut in this way.
    """
    encoded(key)  # refuses invalid names
    if parallelism is not None and writer_partition is not None:
        raise InvalidArgument("parallelism or writer_partition must be None, got both")
    if writer_partition is not None:
        return [_one_shard(key, tensor, shard_of("writer_partition", writer_partition))]
    if parallelism is None:
        return [value_of(key, tensor)]
    suffix, shard = layout_of(parallelism)
    name = key + suffix
    if shard is None:
        return [value_of(name, tensor)]
    if all_shards:
        return values_of_shards(name, tensor, shard.size, shard.split_dim)
    if suffix:
        return [_one_shard(name, tensor, shard)]
    value = value_of(name_of_shard(name, shard.rank), tensor, shard)
    if shard.split_dim >= tensor.dim():
        raise InvalidArgument(
            f"split_dim must be an axis of the tensor's {tensor.dim()}, got {shard.split_dim}"
        )
    return [value]


def _one_shard(name: str, tensor: torch.Tensor, shard: Shard) -> Value:
    """The value of a shard of a whole tensor."""
    rank, size, split_dim = shard
    return value_of(name_of_shard(name, rank), cut(tensor, size, split_dim)[rank], shard)


def _new_memory(num_bytes: int) -> memoryview:
    return np.empty(num_bytes, np.uint8).data


def _part_of(memory: memoryview) -> Callable[[int], memoryview]:
    """Return a function that returns the first bytes of memory, which may be larger."""

    def room(num_bytes: int) -> memoryview:
        if num_bytes > len(memory):
            raise InvalidArgument(too_small(num_bytes, len(memory)))
        return memory[:num_bytes]

    return room
