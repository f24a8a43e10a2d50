"""A GGUF file of llama.cpp: configuration, tensors of any quantisation, tokenizer."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize

from .config import ModelConfig, RopeScaling
from .errors import InvalidModel, UnsupportedModel

# llama.cpp's names, and what Hugging Face calls the same tensor.
GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
SCALING_FACTOR = "llama.rope.scaling.factor"

# Settings that change the arithmetic, and the values with which they have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.sliding_window": (None, 0),
    "attention.causal": (None, True),
    "attention.scale": (None, 0.0),
    "expert_count": (None, 0),
    "logit_scale": (None,),
    "residual_scale": (None,),
    "embedding_scale": (None,),
}


# Whatever comes of numbers that make no sense.
_NONSENSE = (
    ValueError, LookupError, ArithmeticError, TypeError, AttributeError, MemoryError,
    RecursionError,
)  # fmt: skip


class _BoundedReader(GGUFReader):
    """A reader that stops at the file's end: a header may announce 2**64 entries of a list."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        found = super()._get(offset, dtype, count, override_order)
        if len(found) != int(count):
            raise ValueError(f"it ends before byte {offset} and {int(count)} values of it")
        return found


class GgufFile:
    """Find tensors in a GGUF file by their Hugging Face names; the file is memory-mapped.

    Args:
        path: a GGUF file of architecture ``llama``.

    Raises:
        InvalidModel: the file is truncated, is not GGUF, or lacks a setting.
        UnsupportedModel: another architecture, or a setting that this engine does not compute.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.reader = _BoundedReader(path)
        except _NONSENSE as error:
            raise InvalidModel(
                f"load_model: {path} is truncated or not a GGUF file: {error}"
            ) from error
        tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        factors = tensors.pop(ROPE_FACTORS, None)
        self.rope_factors = None if factors is None else _dequantized(factors)
        self._tensors = {_hf_name(name): tensor for name, tensor in tensors.items()}
        self.names = self._tensors.keys()
        try:
            self.config = self._read_config()
        except _NONSENSE as error:
            if isinstance(error, InvalidModel | UnsupportedModel):
                raise
            raise InvalidModel(f"load_model: {path} has a damaged header: {error}") from error

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor as float32, q and k in the row order of Hugging Face."""
        tensor = _dequantized(self._tensors[name])
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            return unpermute_rope_rows(tensor, self.config.head_dim)
        return tensor

    def metadata(self, key: str, default: Any = None) -> Any:
        """Look up a value of the file's header.

        Raises:
            InvalidModel: it is damaged.
        """
        field = self.reader.get_field(key)
        try:
            return default if field is None else field.contents()
        except _NONSENSE as error:
            raise InvalidModel(f"load_model: GGUF key {key} is damaged: {error}") from error

    def _require(self, key: str) -> Any:
        value = self.metadata(key)
        if value is None:
            raise InvalidModel(f"load_model: GGUF key {key} is missing")
        return value

    def _read_config(self) -> ModelConfig:
        self._refuse_unsupported()
        num_heads = self._require("llama.attention.head_count")
        hidden_size = self._require("llama.embedding_length")
        head_dim = self.metadata("llama.attention.key_length", hidden_size // num_heads)
        for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
            if self.metadata(key, head_dim) != head_dim:
                raise UnsupportedModel(
                    f"load_model: {key} must equal the head size {head_dim}, "
                    f"got {self.metadata(key)}"
                )
        eos_keys = (f"tokenizer.ggml.{x}_token_id" for x in ("eos", "eot", "eom"))
        eos = [self.metadata(key) for key in eos_keys]
        return ModelConfig(
            num_layers=self._require("llama.block_count"),
            hidden_size=hidden_size,
            ffn_size=self._require("llama.feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=self.metadata("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            vocab_size=self._vocab_size(),
            max_position=self._require("llama.context_length"),
            rms_eps=self._require("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=self.metadata("llama.rope.freq_base", 10000.0),
            rope_scaling=self._rope_scaling(),
            tie_embeddings="lm_head.weight" not in self.names,
            eos_token_ids=tuple(dict.fromkeys(x for x in eos if x is not None)),
        )

    def _vocab_size(self) -> int:
        if "model.embed_tokens.weight" not in self.names:
            raise InvalidModel("load_model: tensor model.embed_tokens.weight is missing")
        return int(self._tensors["model.embed_tokens.weight"].shape[1])  # of [hidden, vocabulary]

    def _refuse_unsupported(self) -> None:
        architecture = self._require("general.architecture")
        if architecture != "llama":
            raise UnsupportedModel(
                f"load_model: GGUF architecture must be llama, got {architecture!r}"
            )
        for name, neutral in NEUTRAL.items():
            value = self.metadata(f"llama.{name}")
            if value not in neutral:
                raise UnsupportedModel(f"load_model: llama.{name}={value!r} is not supported")

    def _rope_scaling(self) -> RopeScaling | None:
        # As llama.cpp reads it: a factor alone means linear, and scale_linear is its older key.
        factor = self.metadata(SCALING_FACTOR, self.metadata("llama.rope.scale_linear"))
        kind = self.metadata("llama.rope.scaling.type", "linear" if factor else "none")
        if kind == "none":
            return None
        if kind == "linear":
            factor = self._require(SCALING_FACTOR) if factor is None else factor
            return RopeScaling(kind="linear", factor=factor)
        raise UnsupportedModel(
            f"load_model: llama.rope.scaling.type must be none or linear, got {kind!r}"
        )


def unpermute_rope_rows(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undo llama.cpp's order of q and k rows: it makes the pair (i, i + half) adjacent.

    Args:
        weight: ``[heads * head_dim, hidden_size]``, rows 2i and 2i + 1 of a head a pair.
        head_dim: rows of a head.

    Returns:
        The same shape, rows i and i + head_dim / 2 of a head a pair.
    """
    if weight.dim() != 2 or weight.shape[0] % head_dim:
        raise InvalidModel(
            f"load_model: attn_q and attn_k must be matrices of a multiple of {head_dim} rows, "
            f"got {list(weight.shape)}"
        )
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _hf_name(name: str) -> str:
    """Translate a tensor's name; one without a translation is kept, and refused later."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match and match[2] in LAYER_NAMES:
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"
    return name


def _dequantized(tensor: ReaderTensor) -> torch.Tensor:
    shape = tuple(int(n) for n in reversed(tensor.shape))  # GGUF counts dimensions from the inside
    try:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        return torch.from_numpy(values.reshape(shape))
    except NotImplementedError as error:
        raise UnsupportedModel(f"load_model: tensor {tensor.name}: {error}") from error
    except _NONSENSE as error:
        raise InvalidModel(f"load_model: tensor {tensor.name} is damaged: {error}") from error
