"""The work of one step, as lengths: some queries of each of several requests."""

from collections.abc import Sequence
from typing import Any

import torch

from .._tensors import upload
from ..errors import InvalidArgument, shown

INT32_MAX = (1 << 31) - 1
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


class ChunkBatch:
    """A mixed batch: decodes, extends and prefill chunks together.

    Query ``i`` of request ``b`` is row ``cu_q[b] + i`` of the batch, at position
    ``kv_lens[b] - q_lens[b] + i`` of its request, unless ``positions`` says otherwise. The keys of
    request ``b`` are those at positions 0 to ``kv_lens[b] - 1``, including the queries' own.

    Args:
        q_lens: ``[num_requests]`` queries of each request; 0 is allowed.
        kv_lens: ``[num_requests]`` keys of each request, at least as many as its queries.
        positions: ``[num_q]`` the position of each query in its request, each in
            ``[0, kv_lens[b])``, for queries that are not consecutive (selected rows, as
            CacheBlend and SemShareKV recompute them); None for the last ``q_lens[b]`` positions.
        device: where to put the tensors; None: where ``q_lens`` is, or the CPU. They are copied to
            a GPU in the order of its current stream, without waiting for it; only arguments that
            are on a GPU are waited for. No graph may be capturing them.

    Attributes:
        q_lens, kv_lens: int32 ``[num_requests]``.
        cu_q: int32 ``[num_requests + 1]``, where each request's rows begin (and the last ends).
        positions: int32 ``[num_q]``, or None.
        num_requests, num_q: ints.
        q_lens_list, kv_lens_list: the lengths passed to the constructor, as Python ints.

    Raises:
        InvalidArgument: an argument is not as above; the message names the request.
    """

    def __init__(
        self,
        q_lens: Any,
        kv_lens: Any,
        positions: Any = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        if device is None:  # whatever torch's default device
            device = q_lens.device if isinstance(q_lens, torch.Tensor) else "cpu"
        # All are checked on the CPU, to which nothing has to be copied back then.
        own_q, own_kv = _as_int32("q_lens", q_lens), _as_int32("kv_lens", kv_lens)
        queries, keys = own_q.tolist(), own_kv.tolist()
        if len(queries) != len(keys):
            raise InvalidArgument(
                "ChunkBatch: kv_lens must have one entry a request, as q_lens "
                f"({len(queries)}), got {len(keys)}"
            )
        for index, (q_len, kv_len) in enumerate(zip(queries, keys, strict=True)):
            if q_len < 0:
                raise InvalidArgument(f"ChunkBatch: q_lens[{index}] must be >= 0, got {q_len}")
            if kv_len < q_len:
                raise InvalidArgument(
                    f"ChunkBatch: kv_lens[{index}] must be at least q_lens[{index}] ({q_len}), "
                    f"got {kv_len}"
                )
        self.q_lens_list, self.kv_lens_list = queries, keys
        self.num_requests, self.num_q = len(queries), sum(queries)
        if self.num_q > INT32_MAX:
            raise InvalidArgument(
                f"ChunkBatch: q_lens must sum to less than 2**31, got {self.num_q}"
            )
        cu_q = torch.zeros(self.num_requests + 1, dtype=torch.int32, device="cpu")
        torch.cumsum(own_q, 0, out=cu_q[1:])
        own_positions = None if positions is None else _as_positions(positions, own_q, own_kv)
        self.q_lens, self.kv_lens = _moved(own_q, device), _moved(own_kv, device)
        self.cu_q = _moved(cu_q, device)
        self.positions = None if own_positions is None else _moved(own_positions, device)

    @property
    def device(self) -> torch.device:
        """Return where the tensors are."""
        return self.q_lens.device

    def request_of(self) -> torch.Tensor:
        """Return the request of each row, int64 ``[num_q]``."""
        return torch.repeat_interleave(self.q_lens, output_size=self.num_q)

    def query_positions(self) -> torch.Tensor:
        """Return the position of each row in its request, int32 ``[num_q]``."""
        if self.positions is not None:
            return self.positions[: self.num_q]  # a MaskBuilder's batch may have spare rows
        request = self.request_of()
        first = (self.kv_lens - self.q_lens - self.cu_q[:-1])[request]
        rows = torch.arange(self.num_q, dtype=torch.int32, device=self.device)
        return first + rows

    def __repr__(self) -> str:
        """Show the lengths."""
        return f"ChunkBatch(q_lens={self.q_lens.tolist()}, kv_lens={self.kv_lens.tolist()})"


def _as_positions(positions: Any, q_lens: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
    result, limits = _as_int32("positions", positions), kv_lens.repeat_interleave(q_lens)
    if result.numel() != limits.numel():
        raise InvalidArgument(
            f"ChunkBatch: positions must have one entry a query ({limits.numel()}), "
            f"got {result.numel()}"
        )
    outside = ((result < 0) | (result >= limits)).nonzero()
    if outside.numel():
        row = int(outside[0])
        raise InvalidArgument(
            f"ChunkBatch: positions[{row}] must be in [0, {int(limits[row])}), the keys of "
            f"its request, got {int(result[row])}"
        )
    return result


def _moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    try:
        return upload("ChunkBatch: lengths", tensor, torch.device(device))
    except (TypeError, RuntimeError, AssertionError) as error:  # the last: a torch without CUDA
        raise InvalidArgument(
            f"ChunkBatch: device must be one of this machine, got {device!r}: {error}"
        ) from None


def _as_int32(name: str, values: torch.Tensor | Sequence[int]) -> torch.Tensor:
    try:
        wide = torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(
            f"ChunkBatch: {name} must be 1-d integers, got {shown(values)}: {error}"
        ) from None
    if wide.numel() == 0 and not isinstance(values, torch.Tensor):
        wide = wide.to(torch.int64)  # torch makes an empty list float
    is_integer = not (wide.dtype.is_floating_point or wide.dtype.is_complex)
    if wide.dim() != 1 or not is_integer or wide.dtype == torch.bool:
        raise InvalidArgument(
            f"ChunkBatch: {name} must be 1-d integers, got {wide.dtype} of shape "
            f"{tuple(wide.shape)}"
        )
    if wide.dtype in UNSIGNED:  # torch has no minimum for these
        if (wide.to(torch.int64) < 0).any():
            raise InvalidArgument(f"ChunkBatch: {name} must be below 2**31, got more than 2**63")
        wide = wide.to(torch.int64)
    if wide.numel() and (int(wide.max()) > INT32_MAX or int(wide.min()) < -INT32_MAX):
        raise InvalidArgument(f"ChunkBatch: {name} must be below 2**31, got {int(wide.max())}")
    # A copy, so that neither the caller's later writes nor a MaskBuilder's are the other's.
    return wide.to(torch.int32, copy=True).contiguous()
