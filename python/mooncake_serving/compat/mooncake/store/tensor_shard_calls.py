"""The calls of ``MooncakeDistributedStore`` that store a tensor as the shards of TP ranks."""

from collections.abc import Sequence

import torch

from mooncake_kernels.errors import InvalidArgument

from ..codes import as_natural
from .batch_calls import Value
from .codes import INVALID_PARAMS, returns_code, returns_instead
from .naming import encoded
from .replicate_config import ReplicateConfig
from .tensor_calls import TensorCalls, Tensors, copied, value_of
from .tensor_header import MAX_RANKS, Shard, encode


class TensorShardCalls(TensorCalls):
    """Shard ``r`` of ``key`` is the value ``key_tp_r``; with ``tp_size`` 1 the tensor is whole.

    A put cuts a tensor, and stores all shards: it ignores ``tp_rank``.
    """

    @returns_code
    def put_tensor_with_tp(
        self,
        key: str,
        tensor: torch.Tensor,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """Cut a tensor into ``tp_size`` equal shards, and store all of them: 0, -200 or -600."""
        return self._put_shards("put_tensor_with_tp", key, tensor, None, tp_size, split_dim)

    @returns_code
    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: torch.Tensor,
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """``put_tensor_with_tp`` with a configuration."""
        return self._put_shards("pub_tensor_with_tp", key, tensor, config, tp_size, split_dim)

    @returns_instead([INVALID_PARAMS])
    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Tensors,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """``put_tensor_with_tp`` for many: one code each."""
        return self._put_tensors(
            "batch_put_tensor_with_tp",
            base_keys,
            tensors_list,
            values_of=lambda key, tensor: shards_of(key, tensor, tp_size, split_dim),
        )

    @returns_instead([INVALID_PARAMS])
    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Tensors,
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """``pub_tensor_with_tp`` for many."""
        return self._put_tensors(
            "batch_pub_tensor_with_tp",
            base_keys,
            tensors_list,
            config,
            values_of=lambda key, tensor: shards_of(key, tensor, tp_size, split_dim),
        )

    @returns_instead(None)
    def get_tensor_with_tp(
        self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> torch.Tensor | None:
        """Return the shard of a rank; None if there is none."""
        return self.get_tensor(shard_key(key, tp_rank, tp_size))

    @returns_instead([None])
    def batch_get_tensor_with_tp(
        self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[torch.Tensor | None]:
        """``get_tensor_with_tp`` for many."""
        return self._get_values(
            "batch_get_tensor_with_tp",
            base_keys,
            copied,
            None,
            lambda key: shard_key(key, tp_rank, tp_size),
        )

    def _put_shards(
        self,
        op: str,
        key: str,
        tensor: torch.Tensor,
        config: ReplicateConfig | None,
        tp_size: int,
        split_dim: int,
    ) -> int:
        self._running()
        values = {0: shards_of(key, tensor, tp_size, split_dim)}
        return self._put_values(op, [0], values, config, replace=False)[0]


def shards_of(key: str, tensor: torch.Tensor, tp_size: int, split_dim: int) -> list[Value]:
    """The values of a tensor's shards, one for each rank.

    Raises:
        InvalidArgument: it cannot be cut in this way.
    """
    if as_natural("tp_size", tp_size, minimum=1) == 1:
        return [value_of(key, tensor)]
    encoded(key)  # refuses invalid names
    return values_of_shards(key, tensor, tp_size, split_dim)


def values_of_shards(name: str, tensor: torch.Tensor, tp_size: int, split_dim: int) -> list[Value]:
    """The same, also with a single rank."""
    return [
        value_of(name_of_shard(name, rank), shard, Shard(rank, tp_size, split_dim))
        for rank, shard in enumerate(cut(tensor, tp_size, split_dim))
    ]


def shard_key(key: str, tp_rank: int, tp_size: int) -> str:
    """Key of a rank's shard.

    Raises:
        InvalidArgument: the rank is invalid.
    """
    encoded(key)  # refuses invalid names
    if as_natural("tp_size", tp_size, minimum=1) == 1:
        return key
    if (rank := as_natural("tp_rank", tp_rank)) >= tp_size:
        raise InvalidArgument(f"tp_rank must be below tp_size {tp_size}, got {tp_rank}")
    return name_of_shard(key, rank)


def name_of_shard(name: str, rank: int) -> str:
    """The name of a shard of a tensor of this name."""
    return f"{name}_tp_{rank}"


def cut(tensor: torch.Tensor, tp_size: int, split_dim: int) -> Tensors:
    """The shards of a tensor.

    Raises:
        InvalidArgument: it cannot be cut in this way.
    """
    encode(tensor)  # refuses values that are not tensors
    if type(split_dim) is not int or not 0 <= split_dim < tensor.dim():
        raise InvalidArgument(
            f"split_dim must be an axis of the tensor's {tensor.dim()}, got {split_dim!r:.80}"
        )
    if tensor.shape[split_dim] % tp_size or tp_size > max(tensor.shape[split_dim], 1):
        raise InvalidArgument(
            f"tp_size must divide axis {split_dim} of {tuple(tensor.shape)}, got {tp_size}"
        )
    if tp_size > MAX_RANKS:
        raise InvalidArgument(f"tp_size must be at most {MAX_RANKS}, got {tp_size}")
    return tensor.chunk(tp_size, split_dim)
