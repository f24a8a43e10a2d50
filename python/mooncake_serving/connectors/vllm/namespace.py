"""Which engines can use each other's blocks: those with the same namespace."""

import hashlib
import json
import os
from typing import Any

from mooncake_kernels.errors import Unavailable

from .settings import Settings


def refuse_unnamed(config: Any, settings: Settings) -> None:
    """Refuse what blocks depend on and neither their hashes nor the namespace identifies.

    Args:
        config: a ``VllmConfig``.
        settings: of the connector; they may vouch for the names of LoRA adapters.

    Raises:
        Unavailable: there is such a thing.
    """
    if getattr(config.cache_config, "calculate_kv_scales", False):  # from the first step's tokens
        raise Unavailable(
            "StoreConnector: calculate_kv_scales must be off, for each engine has other scales, "
            "got True"
        )
    images = getattr(config.model_config, "multimodal_config", None)
    is_hashed = config.cache_config.enable_prefix_caching or getattr(
        images, "mm_processor_cache_gb", None
    )
    if images is not None and not is_hashed:  # a request's images are numbered then
        raise Unavailable(
            "StoreConnector: mm_processor_cache_gb must be above 0, or enable_prefix_caching on, "
            "for vLLM to tell images apart, got neither"
        )
    if config.lora_config is not None and not settings.adapters_by_name:
        raise Unavailable(
            "StoreConnector: adapters_by_name must be set with LoRA, whose adapters vLLM's hashes "
            "name without regard to their weights, got False"
        )


def namespace_of(config: Any, version: str, platform: str, form: Any) -> str:
    """Return everything that must be the same, since a block's hash identifies only its tokens.

    The scheduler's configuration is used: a worker's in another process is changed while the model
    is loaded.

    Args:
        config: a ``VllmConfig``.
        version: of vLLM.
        platform: by name.
        form: of the caches, and how workers divide them; ``str`` writes what JSON cannot.
    """
    model = config.model_config
    parts = {
        "vllm": version,
        "platform": platform,
        # Weights. The files of a folder, or the revision of a branch, are looked up once.
        "model": model.model,
        "revision": model.revision,
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "load_format": config.load_config.load_format,
        "max_model_len": model.max_model_len,  # some rotary embeddings differ for longer contexts
        # The layout of a block; an attention backend may have an order of its own.
        "form": form,
        "layout": config.cache_config.kv_cache_layout,
        "attention": [config.attention_config.backend, config.attention_config.backend_per_kind],
    }
    return json.dumps(parts | _values_of(config), sort_keys=True, default=str)


def identity_of(config: Any, name: str, platform: str) -> str:
    """Return what must be the same in two engines that hand requests over, at most 512 characters.

    They may differ in the layout and the size of blocks, and in how workers divide them.

    Args:
        config: a ``VllmConfig``.
        name: of the model, if the user gives one; "": the one in the configuration, its revision
            and commit.
        platform: by name.
    """
    model = config.model_config
    if not name:
        commit = getattr(model.hf_config, "_commit_hash", None)
        name = " ".join(str(part) for part in (model.model, model.revision, commit) if part)
    values = json.dumps(_values_of(config), sort_keys=True, default=str)
    digest = hashlib.sha256(f"{name} {values}".encode()).hexdigest()[:16]
    cache_dtype = config.cache_config.cache_dtype
    return f"{name[-300:]} ({model.dtype}, cache {cache_dtype}, {digest}) on {platform[-64:]}"


def _values_of(config: Any) -> dict[str, Any]:
    """Return what the numbers of a cache depend on, besides weights and tokens."""
    model, cache, draft = config.model_config, config.cache_config, config.speculative_config
    overrides, images = model.hf_overrides, getattr(model, "multimodal_config", None)
    described: dict[str, Any] = getattr(model.hf_config, "to_dict", dict)()
    return {
        "hf_overrides": getattr(overrides, "__qualname__", overrides),
        "hf_config": hashlib.sha256(
            json.dumps(described, sort_keys=True, default=str).encode()
        ).hexdigest(),
        "images": images
        and [
            getattr(images, option, None)
            for option in ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate")
        ],
        "dtype": model.dtype,
        "quantization": [model.quantization, model.quantization_config],
        "conv_layout": os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT"),
        "cache_dtype": [cache.cache_dtype, cache.kv_cache_dtype_skip_layers],
        "draft": draft and [draft.method, draft.model, draft.revision],
    }
