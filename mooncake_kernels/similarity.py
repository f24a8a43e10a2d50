"""Match similar tokens by their embeddings: SimHash signatures, compared by Hamming distance."""

from typing import Any, Literal

import torch

from . import _library
from ._arguments import as_instance, as_integer
from ._engine import choose
from ._tensors import refuse_gradients
from .errors import InvalidArgument
from .reference import similarity as reference
from .transforms import FLOATS

SimilarityEngine = Literal["auto", "host", "cuda", "reference"]
DTYPES = (*FLOATS, torch.float64)
# Bytes of converted rows at a time: 4 MiB stay in a CPU's cache, 256 MiB fill a GPU.
MOST_FLOATS = {"cpu": 1 << 20, "cuda": 1 << 26}
MOST = (1 << 63) - 1
# Of csrc/similarity/hamming_match.h.
MOST_TOKENS = 1 << 37
MOST_BYTES = (1 << 20) - 1


def simhash(
    embeddings: torch.Tensor, planes: torch.Tensor, *, engine: SimilarityEngine = "auto"
) -> torch.Tensor:
    """Return a signature of each token: on which side of each plane its embedding lies.

    Equivalent to::

        for t in range(num_tokens):
            for b in range(bits):
                if dot(embeddings[t], planes[:, b]) >= 0:
                    sig[t, b // 8] |= 1 << b % 8

    If the planes are random (Gaussian), two signatures differ in about ``bits * angle / pi`` bits,
    where ``angle`` is that between the embeddings. The bit order is that of FAISS's
    ``IndexLSH``. (Charikar, 2002; its use for KV: SemShareKV, arXiv 2509.24832.)

    Args:
        embeddings: ``[num_tokens, dim]``, float32, float16, bfloat16 or float64.
        planes: the normals of the planes, ``[dim, bits]`` of any of these dtypes, bits a multiple
            of 8.
        engine: "host", "cuda", "reference" (float64); "auto" by the device.

    Returns:
        uint8 ``[num_tokens, bits // 8]``. Dots are torch's float32 products of rows converted to
        float32, in batches; float64 products if either argument is float64. A bit can differ from
        the exact one where the dot is within that type's rounding of 0, or within that of the
        precision set by ``torch.set_float32_matmul_precision``. A NaN dot gives 0. On CUDA all
        work is queued on the current stream. There is no backward: outside ``torch.no_grad()``,
        tensors that require grad are refused, and always those with a forward tangent.

    Raises:
        InvalidArgument: an argument is not as above.
        Unavailable: the named engine is not available.
    """
    op = "simhash"
    _check_matrix(op, "embeddings", embeddings, "[num_tokens, dim]", DTYPES)
    _check_matrix(op, "planes", planes, "[dim, bits]", DTYPES)
    refuse_gradients(op, embeddings=embeddings, planes=planes)
    dim, bits = planes.shape
    if embeddings.shape[1] != dim or embeddings.device != planes.device:
        raise InvalidArgument(
            f"{op}: planes must be [{embeddings.shape[1]}, bits] on {embeddings.device}, as "
            f"embeddings say, got shape {tuple(planes.shape)} on {planes.device}"
        )
    if bits == 0 or bits % 8:
        raise InvalidArgument(f"{op}: planes must have a multiple of 8 bits, got {bits}")
    if choose(op, engine, embeddings.device) == "reference":
        return reference.simhash(embeddings, planes)
    is_double = torch.float64 in (embeddings.dtype, planes.dtype)
    dtype = torch.float64 if is_double else torch.float32
    planes = planes.to(dtype)
    num_rows = max(MOST_FLOATS[embeddings.device.type] // (dim + bits), 1)
    with torch.autocast(embeddings.device.type, enabled=False):
        signatures = [
            _library.call(_library.pack_signs, _as_float32(rows.to(dtype) @ planes))
            for rows in embeddings.split(num_rows)
        ]
    return torch.cat(signatures)


def hamming_match(
    query_sig: torch.Tensor,
    reference_sig: torch.Tensor,
    *,
    max_distance: int | None = None,
    window: int | None = None,
    engine: SimilarityEngine = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Match each query to the reference whose signature differs in the fewest bits.

    Equivalent to::

        for i in range(num_queries):
            near = [j for j in range(num_references) if abs(i - j) <= window]
            j = min(near, key=lambda j: (differing_bits(i, j), abs(i - j), j))
            if differing_bits(i, j) <= max_distance:
                index[i], distance[i] = j, differing_bits(i, j)

    and -1, -1 where nothing is near enough. Among equal distances the reference at the nearest
    position wins, and of two equally near the earlier one. With the signatures of a prompt and of
    one whose KV is cached, ``index`` is SemShareKV's token-to-token map (arXiv 2509.24832).

    Args:
        query_sig: uint8 ``[num_queries, num_bytes]``, at least one byte. 8, 16, 32 and 64 bytes
            are fast.
        reference_sig: uint8 ``[num_references, num_bytes]``.
        max_distance: in bits, at least 0; None for any.
        window: in tokens, at least 0; None for all references.
        engine: "host", "cuda", "reference"; "auto" by the device.

    Returns:
        ``index`` int64 ``[num_queries]`` and ``distance`` int32 ``[num_queries]``. On CUDA both are
        queued on the current stream.

    Raises:
        InvalidArgument: an argument is not as above, or a side has more than 2**37 tokens, or a
            token more than 2**20 - 1 bytes.
        Unavailable: the named engine is not available.
    """
    op = "hamming_match"
    for name, signatures in (("query_sig", query_sig), ("reference_sig", reference_sig)):
        _check_matrix(op, name, signatures, "[num_tokens, num_bytes]", (torch.uint8,))
        num_tokens, num_bytes = signatures.shape
        if num_tokens > MOST_TOKENS:
            raise InvalidArgument(
                f"{op}: {name} must have at most {MOST_TOKENS} tokens, got {num_tokens}"
            )
        if not 1 <= num_bytes <= MOST_BYTES:
            raise InvalidArgument(
                f"{op}: {name} must have 1 to {MOST_BYTES} bytes a token, got {num_bytes}"
            )
    num_bytes = query_sig.shape[1]
    if reference_sig.shape[1] != num_bytes or reference_sig.device != query_sig.device:
        raise InvalidArgument(
            f"{op}: reference_sig must be [num_references, {num_bytes}] on {query_sig.device}, as "
            f"query_sig says, got shape {tuple(reference_sig.shape)} on {reference_sig.device}"
        )
    limits = (
        None if max_distance is None else as_integer(op, "max_distance", max_distance, 0, MOST),
        None if window is None else as_integer(op, "window", window, 0, MOST),
    )
    if choose(op, engine, query_sig.device) == "reference":
        return reference.hamming_match(query_sig, reference_sig, *limits)
    arguments = (query_sig.contiguous(), reference_sig.contiguous(), *limits)
    return _library.call(_library.hamming_match, *arguments)


def _as_float32(dots: torch.Tensor) -> torch.Tensor:
    """Convert dots so that their signs remain: a small negative one would become -0, as good as 0.

    The signs of float64 are exact in float32, and that of NaN is made NaN.
    """
    if dots.dtype == torch.float32:
        return dots
    return dots.sign().where(dots == dots, torch.nan).float()


def _check_matrix(
    op: str, name: str, matrix: Any, shape: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    as_instance(op, name, matrix, torch.Tensor, "a tensor")
    if matrix.layout != torch.strided or matrix.is_nested:
        kind = "nested" if matrix.is_nested else matrix.layout
        raise InvalidArgument(f"{op}: {name} must be a dense tensor, got a {kind} one")
    if matrix.dim() != 2 or matrix.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidArgument(
            f"{op}: {name} must be {names} {shape}, got {matrix.dtype} of shape "
            f"{tuple(matrix.shape)}"
        )
