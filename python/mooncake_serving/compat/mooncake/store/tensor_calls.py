"""The calls of ``MooncakeDistributedStore`` that store tensors, whole or as shards."""

from collections.abc import Sequence

import torch

from mooncake_kernels.errors import InvalidArgument

from ..codes import as_natural
from .codes import INVALID_PARAMS, check_list, log, returns_code, returns_instead
from .lifecycle import Lifecycle
from .replicate_config import ReplicateConfig, keeping_of
from .tensor_header import decode, encode

Tensors = Sequence[torch.Tensor]


class TensorCalls(Lifecycle):
    """A tensor is a value with its dtype and shape. Shard ``r`` of ``key`` is ``key_tp_r``."""

    @returns_code
    def put_tensor(self, key: str, tensor: torch.Tensor) -> int:
        """Store a tensor of host memory, with at most 8 axes: 0, -200 or -600."""
        return self._put_tensor(key, tensor, None)

    @returns_code
    def pub_tensor(
        self, key: str, tensor: torch.Tensor, config: ReplicateConfig | None = None
    ) -> int:
        """``put_tensor`` with a configuration."""
        return self._put_tensor(key, tensor, config)

    @returns_code
    def upsert_tensor(self, key: str, tensor: torch.Tensor) -> int:
        """``put_tensor`` in the place of what is there, see ``upsert``."""
        return self._put_tensor(key, tensor, None, replace=True)

    @returns_instead([INVALID_PARAMS])
    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Tensors) -> list[int]:
        """``put_tensor`` many: one code each."""
        check_list("keys", keys)
        check_list("tensors_list", tensors_list)
        if len(keys) != len(tensors_list):
            log.error(
                "batch_put_tensor: tensors_list must be as many as keys, got %d and %d",
                len(tensors_list),
                len(keys),
            )
            return [INVALID_PARAMS] * len(keys)
        return [self.put_tensor(*one) for one in zip(keys, tensors_list, strict=True)]

    @returns_instead(None)
    def get_tensor(self, key: str) -> torch.Tensor | None:
        """Return a copy of a tensor; None if there is none, or the value is something else."""
        found = self._running().objects.view(key)
        return None if found is None else decode(bytearray(found))

    @returns_instead([None])
    def batch_get_tensor(self, keys: Sequence[str]) -> list[torch.Tensor | None]:
        """``get_tensor`` many."""
        check_list("keys", keys)
        return [self.get_tensor(key) for key in keys]

    @returns_code
    def put_tensor_with_tp(
        self,
        key: str,
        tensor: torch.Tensor,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """Cut a tensor into ``tp_size`` equal shards, and store all of them: 0, -200 or -600.

        ``tp_rank`` is not looked at.
        """
        if as_natural("tp_size", tp_size, minimum=1) == 1:
            return self._put_tensor(key, tensor, None)
        shards = _shards(tensor, tp_size, split_dim)
        for rank, shard in enumerate(shards):
            self._put_tensor(f"{key}_tp_{rank}", shard, None)
        return 0

    @returns_instead(None)
    def get_tensor_with_tp(
        self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> torch.Tensor | None:
        """Return the shard of a rank; of ``tp_size`` 1 the whole tensor. None if there is none."""
        if as_natural("tp_size", tp_size, minimum=1) == 1:
            return self.get_tensor(key)
        if as_natural("tp_rank", tp_rank) >= tp_size:
            raise InvalidArgument(f"tp_rank must be below tp_size {tp_size}, got {tp_rank}")
        return self.get_tensor(f"{key}_tp_{tp_rank}")

    @returns_instead([INVALID_PARAMS])
    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Tensors,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """``put_tensor_with_tp`` many: one code each."""
        check_list("base_keys", base_keys)
        check_list("tensors_list", tensors_list)
        if len(base_keys) != len(tensors_list):
            return self.batch_put_tensor(base_keys, tensors_list)  # which says so
        return [
            self.put_tensor_with_tp(key, tensor, tp_rank, tp_size, split_dim)
            for key, tensor in zip(base_keys, tensors_list, strict=True)
        ]

    @returns_instead([None])
    def batch_get_tensor_with_tp(
        self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[torch.Tensor | None]:
        """``get_tensor_with_tp`` many."""
        check_list("base_keys", base_keys)
        return [self.get_tensor_with_tp(key, tp_rank, tp_size) for key in base_keys]

    def _put_tensor(
        self,
        key: str,
        tensor: torch.Tensor,
        config: ReplicateConfig | None,
        *,
        replace: bool = False,
    ) -> int:
        objects = self._running().objects
        header = encode(tensor)
        elements = tensor.detach().resolve_conj().resolve_neg().contiguous()
        put = objects.replace if replace else objects.put
        put(key, [header, elements], keeping_of(config))
        return 0


def _shards(tensor: torch.Tensor, tp_size: int, split_dim: int) -> Tensors:
    encode(tensor)  # refuses what is no tensor
    if not isinstance(split_dim, int) or not 0 <= split_dim < tensor.dim():
        raise InvalidArgument(
            f"split_dim must be an axis of the tensor's {tensor.dim()}, got {split_dim!r:.80}"
        )
    if tensor.shape[split_dim] % tp_size:
        raise InvalidArgument(
            f"tp_size must divide axis {split_dim} of {tuple(tensor.shape)}, got {tp_size}"
        )
    return tensor.chunk(tp_size, split_dim)
