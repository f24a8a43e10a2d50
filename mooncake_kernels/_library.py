"""Load ``_ops.so`` and give every operator its fake, so that torch.compile can trace it.

Not called ``_ops.py``: next to ``_ops.so`` Python would import the library instead.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .errors import ChecksumError, CudaError, InvalidArgument, Unavailable

LIBRARY = Path(__file__).with_name("_ops.so")
logger = logging.getLogger("mooncake_kernels")
_logged: set[tuple[str, str]] = set()

if not LIBRARY.is_file():
    is_source = (LIBRARY.parent.parent / "setup.py").is_file()
    raise Unavailable(
        f"{LIBRARY.name} is not next to {Path(__file__).name}: build the package with "
        "`pip install --no-build-isolation -e .`"
        + (", or leave this source tree, which hides an installed one" if is_source else "")
    )
torch.ops.load_library(str(LIBRARY))

# References are kept, not looked up at each call: that costs 300 ns through torch.ops.
copy_blocks = torch.ops.mooncake_kernels.copy_blocks.default
copy_resolved = torch.ops.mooncake_kernels.copy_resolved.default
copy_listed = torch.ops.mooncake_kernels.copy_listed.default
copy_batch = torch.ops.mooncake_kernels.copy_batch.default
gpu_address = torch.ops.mooncake_kernels.gpu_address.default
resolve_copy_plan = torch.ops.mooncake_kernels.resolve_copy_plan.default
transform_blocks = torch.ops.mooncake_kernels.transform_blocks.default
transform_resolved = torch.ops.mooncake_kernels.transform_resolved.default
checksum_blocks = torch.ops.mooncake_kernels.checksum_blocks.default
checksum_resolved = torch.ops.mooncake_kernels.checksum_resolved.default
set_stream_from_bytes = torch.ops.mooncake_kernels.set_stream_from_bytes.default
signal_flag = torch.ops.mooncake_kernels.signal_flag.default
wait_flag = torch.ops.mooncake_kernels.wait_flag.default
poll_flag = torch.ops.mooncake_kernels.poll_flag.default
paged_attention = torch.ops.mooncake_kernels.paged_attention.default
merge_attention = torch.ops.mooncake_kernels.merge_attention.default
append_kv = torch.ops.mooncake_kernels.append_kv.default
mask_rows = torch.ops.mooncake_kernels.mask_rows.default
mask_block_map = torch.ops.mooncake_kernels.mask_block_map.default
mask_pack_rows = torch.ops.mooncake_kernels.mask_pack_rows.default
mask_pack_rule = torch.ops.mooncake_kernels.mask_pack_rule.default
pack_signs = torch.ops.mooncake_kernels.pack_signs.default
hamming_match = torch.ops.mooncake_kernels.hamming_match.default
has_cuda: bool = torch.ops.mooncake_kernels.has_cuda()


def choose_engine(device_type: str) -> str:
    """Return what "auto" means for tensors of a device type; log it the first time."""
    if device_type not in ("cpu", "cuda"):
        raise InvalidArgument(f"tensors must be on cpu or cuda, got {device_type}")
    engine = "host" if device_type == "cpu" else "cuda" if has_cuda else "triton"
    log_choice(f"tensors on {device_type}", engine)
    return engine


def log_choice(what: str, engine: str) -> None:
    """Log what "auto" chose, the first time it does; a compiled graph cannot log."""
    if not torch.compiler.is_compiling() and (what, engine) not in _logged:
        _logged.add((what, engine))
        logger.info("engine auto: %s for %s", engine, what)


def require_engine(engine: str, device_type: str, op: str = "") -> None:
    """Raise unless a named engine supports tensors of that device type."""
    prefix = f"{op}: " if op else ""
    needed = "cpu" if engine == "host" else "cuda"
    if needed == "cuda" and not has_cuda:
        raise Unavailable(
            f"{prefix}engine {engine}: _ops.so was built without nvcc, so it has no CUDA kernels"
        )
    if device_type != needed:
        raise InvalidArgument(
            f"{prefix}engine {engine} must be given {needed} tensors, got {device_type}"
        )


def triton_module(op: str, name: str, device: torch.device) -> ModuleType:
    """Return a module of ``triton/`` for tensors on a device; only now, as it takes a second."""
    try:
        interpreted = importlib.import_module(".triton", __package__).INTERPRETED
        module = importlib.import_module(f".triton.{name}", __package__)
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        raise Unavailable(
            f"{op}: engine triton: the package triton is not installed: "
            "pip install 'mooncake-kernels[gpu]'"
        ) from None
    if device.type == "cpu" and not interpreted:
        raise Unavailable(
            f"{op}: engine triton: CPU tensors need TRITON_INTERPRET=1 set before the import"
        )
    return module


def call(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Call an operator; convert its errors to those of ``errors.py``."""
    try:
        return operator(*arguments)
    except (ValueError, RuntimeError) as error:
        raise converted(error) from None


def converted(error: ValueError | RuntimeError) -> Exception:
    """Return an operator's error as that of ``errors.py``; any other as it is."""
    text = str(error)
    if isinstance(error, ValueError):  # pybind11's form of mk::InvalidArgument
        return (ChecksumError if "must have checksum" in text else InvalidArgument)(text)
    if text.startswith("CUDA: "):
        return CudaError(text)
    return Unavailable(text) if text.startswith("engine ") else error  # mk::Unavailable


@torch.library.register_fake("mooncake_kernels::copy_blocks")
def _copy_blocks_fake(
    src: Sequence[torch.Tensor],
    dst: Sequence[torch.Tensor],
    plan: torch.Tensor,
    src_blocks: torch.Tensor | None,
    dst_blocks: torch.Tensor | None,
    bad_id: int,
    max_sms: int,
) -> None:
    """Check what does not depend on data; the operator returns nothing."""
    torch._check(
        len(src) > 0 and len(dst) > 0, lambda: "copy_blocks: src and dst must not be empty"
    )
    for ids in (src_blocks, dst_blocks):
        torch._check(
            ids is None or (ids.dim() == 1 and ids.dtype in (torch.int32, torch.int64)),
            lambda: "copy_blocks: block ids must be a 1-d int32 or int64 tensor",
        )


@torch.library.register_fake("mooncake_kernels::signal_flag")
@torch.library.register_fake("mooncake_kernels::wait_flag")
def _flag_fake(step: torch.Tensor | None, *arguments: Any) -> None:
    """Check what does not depend on data; the operators return nothing."""
    torch._check(
        step is None or (step.numel() == 1 and step.dtype == torch.int64),
        lambda: "signal_flag, wait_flag: step must be one int64",
    )


@torch.library.register_fake("mooncake_kernels::transform_blocks")
@torch.library.register_fake("mooncake_kernels::transform_resolved")
@torch.library.register_fake("mooncake_kernels::checksum_blocks")
@torch.library.register_fake("mooncake_kernels::checksum_resolved")
@torch.library.register_fake("mooncake_kernels::append_kv")
@torch.library.register_fake("mooncake_kernels::copy_resolved")
@torch.library.register_fake("mooncake_kernels::resolve_copy_plan")
@torch.library.register_fake("mooncake_kernels::mask_rows")
@torch.library.register_fake("mooncake_kernels::mask_block_map")
@torch.library.register_fake("mooncake_kernels::mask_pack_rows")
@torch.library.register_fake("mooncake_kernels::mask_pack_rule")
def _no_result_fake(*arguments: Any) -> None:
    """Return nothing, like the operators."""


@torch.library.register_fake("mooncake_kernels::gpu_address")
@torch.library.register_fake("mooncake_kernels::set_stream_from_bytes")
@torch.library.register_fake("mooncake_kernels::copy_listed")
@torch.library.register_fake("mooncake_kernels::copy_batch")
def _copy_batch_fake(*arguments: Any) -> int:
    """Return a number, like the operators. They are not for compiled code."""
    return 0


@torch.library.register_fake("mooncake_kernels::paged_attention")
def _paged_attention_fake(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors of the same shapes as the operator's results."""
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.register_fake("mooncake_kernels::merge_attention")
def _merge_attention_fake(
    outs: torch.Tensor, lses: torch.Tensor, log2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors of the same shapes as the operator's results."""
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


@torch.library.register_fake("mooncake_kernels::pack_signs")
def _pack_signs_fake(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape as the operator's result."""
    return values.new_empty(values.shape[0], values.shape[1] // 8, dtype=torch.uint8)


@torch.library.register_fake("mooncake_kernels::hamming_match")
def _hamming_match_fake(
    queries: torch.Tensor, references: torch.Tensor, max_distance: int | None, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors of the same shapes as the operator's results."""
    index = queries.new_empty(queries.shape[0], dtype=torch.int64)
    return index, queries.new_empty(queries.shape[0], dtype=torch.int32)
