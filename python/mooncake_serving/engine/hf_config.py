"""Hugging Face ``config.json`` to ModelConfig: unsupported settings are refused, by name."""

from collections.abc import Mapping
from typing import Any

from mooncake_kernels.errors import shown

from .config import ModelConfig, RopeScaling, is_integer
from .errors import InvalidModel, UnsupportedModel

# Mistral without a sliding window is, number for number, a Llama.
SUPPORTED_MODEL_TYPES = ("llama", "mistral")

# What transformers takes for settings that are absent, which is not what null means.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
}

# Settings that change the arithmetic, and the values with which they have no effect.
NEUTRAL = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "sliding_window": (None,),
    "hidden_act": (None, "silu"),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
}


def model_config_from_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Read a ModelConfig out of a parsed ``config.json``.

    Args:
        config: what ``config.json`` holds, in the style of transformers 4 (``rope_theta``,
            ``rope_scaling``) or 5 (``rope_parameters``).
        generation: what ``generation_config.json`` holds; its eos ids win over config's.

    Raises:
        UnsupportedModel: another architecture, or a setting that this engine does not compute.
        InvalidModel: a required setting is missing, or one is of another type or out of range.
    """
    config = _with_defaults(config)
    _refuse_unsupported(config)
    num_heads = _require_size(config, "num_attention_heads")
    hidden_size = _require_size(config, "hidden_size")
    rope = _optional(config, "rope_parameters", {}, dict)
    theta = _optional(rope, "rope_theta", _optional(config, "rope_theta", 10000.0))
    eos = (generation or {}).get("eos_token_id", config.get("eos_token_id"))
    return ModelConfig(
        num_layers=_require(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_size=_require(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_optional(config, "num_key_value_heads", num_heads),
        head_dim=_optional(config, "head_dim", hidden_size // num_heads),
        vocab_size=_require(config, "vocab_size"),
        max_position=_require(config, "max_position_embeddings"),
        rms_eps=_optional(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=_rope_scaling(rope or _optional(config, "rope_scaling", {}, dict)),
        tie_embeddings=_optional(config, "tie_word_embeddings", False),
        eos_token_ids=_as_tuple(eos),
    )


def _with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModel(
            f"config.json: model_type must be one of {', '.join(SUPPORTED_MODEL_TYPES)}, "
            f"got {model_type!r}"
        )
    return DEFAULTS[model_type] | dict(config)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for name, neutral in NEUTRAL.items():
        if config.get(name) not in neutral:
            raise UnsupportedModel(f"config.json: {name}={config[name]!r} is not supported")


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=_require(rope, "factor"))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=_require(rope, "factor"),
            low_freq_factor=_require(rope, "low_freq_factor"),
            high_freq_factor=_require(rope, "high_freq_factor"),
            original_max_position=_require(rope, "original_max_position_embeddings"),
        )
    raise UnsupportedModel(
        f"config.json: rope scaling must be default, linear or llama3, got {kind!r}"
    )


def _require(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise InvalidModel(f"config.json: {name} is missing")
    return config[name]


def _require_size(config: Mapping[str, Any], name: str) -> int:
    value = _require(config, name)
    if not is_integer(value) or value < 1:
        raise InvalidModel(f"config.json: {name} must be a positive integer, got {shown(value)}")
    return int(value)


def _optional(config: Mapping[str, Any], name: str, default: Any, kind: Any = object) -> Any:
    """Look up a setting that may be missing or null; ModelConfig checks it if ``kind`` does not."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise InvalidModel(f"config.json: {name} must be an object, got {shown(value)}")
    return value


def _as_tuple(ids: Any) -> tuple[Any, ...]:
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
