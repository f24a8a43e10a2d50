"""The calls of ``MooncakeDistributedStore`` that take and return tensors."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from mooncake_kernels.errors import InvalidArgument

from .batch_calls import BatchCalls, Value
from .codes import INVALID_PARAMS, check_list, code_of, log, returns_code, returns_instead
from .replicate_config import ReplicateConfig, keeping_of
from .tensor_header import Shard, decode, encode

Tensors = Sequence[torch.Tensor]


class TensorCalls(BatchCalls):
    """A tensor in host memory, with at most 8 axes, is a value with its dtype and shape."""

    @returns_code
    def put_tensor(self, key: str, tensor: torch.Tensor) -> int:
        """Store a tensor: 0, -200 or -600."""
        return self._put_tensor(key, tensor)

    @returns_code
    def pub_tensor(
        self, key: str, tensor: torch.Tensor, config: ReplicateConfig | None = None
    ) -> int:
        """``put_tensor`` with a configuration."""
        return self._put_tensor(key, tensor, config)

    @returns_code
    def upsert_tensor(self, key: str, tensor: torch.Tensor) -> int:
        """``put_tensor`` that replaces an existing value, see ``upsert``."""
        return self._put_tensor(key, tensor, replace=True)

    @returns_code
    def upsert_pub_tensor(
        self, key: str, tensor: torch.Tensor, config: ReplicateConfig | None = None
    ) -> int:
        """``upsert_tensor`` with a configuration."""
        return self._put_tensor(key, tensor, config, replace=True)

    @returns_instead([INVALID_PARAMS])
    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Tensors) -> list[int]:
        """``put_tensor`` for many: one code each."""
        return self._put_tensors("batch_put_tensor", keys, tensors_list)

    @returns_instead([INVALID_PARAMS])
    def batch_pub_tensor(
        self, keys: Sequence[str], tensors_list: Tensors, config: ReplicateConfig | None = None
    ) -> list[int]:
        """``pub_tensor`` for many."""
        return self._put_tensors("batch_pub_tensor", keys, tensors_list, config)

    @returns_instead([INVALID_PARAMS])
    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: Tensors) -> list[int]:
        """``upsert_tensor`` for many."""
        return self._put_tensors("batch_upsert_tensor", keys, tensors_list, replace=True)

    @returns_instead([INVALID_PARAMS])
    def batch_upsert_pub_tensor(
        self, keys: Sequence[str], tensors_list: Tensors, config: ReplicateConfig | None = None
    ) -> list[int]:
        """``upsert_pub_tensor`` for many."""
        return self._put_tensors(
            "batch_upsert_pub_tensor", keys, tensors_list, config, replace=True
        )

    @returns_instead(None)
    def get_tensor(self, key: str) -> torch.Tensor | None:
        """Return a copy of a tensor; None if there is none, or the value is something else."""
        found = self._running().objects.view(key)
        return None if found is None else copied(found)

    @returns_instead([None])
    def batch_get_tensor(self, keys: Sequence[str]) -> list[torch.Tensor | None]:
        """``get_tensor`` for many."""
        return self._get_values("batch_get_tensor", keys, copied, None)

    def _put_tensor(
        self,
        key: str,
        tensor: torch.Tensor,
        config: ReplicateConfig | None = None,
        *,
        replace: bool = False,
    ) -> int:
        objects = self._running().objects
        put = objects.replace if replace else objects.put
        put(*value_of(key, tensor), keeping_of(config))
        return 0

    def _put_tensors(
        self,
        op: str,
        keys: Sequence[str],
        tensors: Tensors,
        config: ReplicateConfig | None = None,
        *,
        replace: bool = False,
        values_of: Callable[[str, torch.Tensor], list[Value]] | None = None,
    ) -> list[int]:
        """Store each key's tensor, as one value or those that ``values_of`` makes of it."""
        check_list("keys", keys)
        try:
            check_list("tensors_list", tensors)
            if len(keys) != len(tensors):
                raise InvalidArgument(
                    f"tensors_list must be as many as keys, got {len(tensors)} and {len(keys)}"
                )
        except InvalidArgument as error:
            log.error("%s: %s", op, error)
            return [INVALID_PARAMS] * len(keys)
        values: dict[int, list[Value]] = {}

        def look_up(i: int) -> int:
            self._running()
            made = values_of(keys[i], tensors[i]) if values_of else [value_of(keys[i], tensors[i])]
            values[i] = made
            return 0

        codes = [code_of(op, partial(look_up, i)) for i in range(len(keys))]
        return self._put_values(op, codes, values, config, replace=replace)


def value_of(key: str, tensor: torch.Tensor, shard: Shard | None = None) -> Value:
    """The value of a tensor; ``shard``: which part of another it is."""
    header = encode(tensor, shard)
    return Value(key, [header, tensor.detach().resolve_conj().resolve_neg().contiguous()])


def copied(value: memoryview) -> torch.Tensor:
    """The tensor of a value, in memory of its own."""
    return decode(bytearray(value))
