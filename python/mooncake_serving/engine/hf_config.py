"""Hugging Face ``config.json`` to ModelConfig: unsupported settings are refused, by name."""

from collections.abc import Mapping
from typing import Any

from .config import ModelConfig, RopeScaling
from .errors import InvalidModel, UnsupportedModel

# Mistral without a sliding window is, number for number, a Llama.
SUPPORTED_MODEL_TYPES = ("llama", "mistral")

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
        InvalidModel: a required setting is missing.
    """
    _refuse_unsupported(config)
    num_heads = _require(config, "num_attention_heads")
    hidden_size = _require(config, "hidden_size")
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    eos = (generation or {}).get("eos_token_id", config.get("eos_token_id"))
    return ModelConfig(
        num_layers=_require(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_size=_require(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        vocab_size=_require(config, "vocab_size"),
        max_position=_require(config, "max_position_embeddings"),
        rms_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(theta),
        rope_scaling=_rope_scaling(rope or config.get("rope_scaling") or {}),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_as_tuple(eos),
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModel(
            f"config.json: model_type must be one of {', '.join(SUPPORTED_MODEL_TYPES)}, "
            f"got {model_type!r}"
        )
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


def _as_tuple(ids: int | list[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
