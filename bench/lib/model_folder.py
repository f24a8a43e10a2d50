"""A Llama of random weights in a folder, as Hugging Face's models are: for our engine and others.

Its tokens are single letters or pairs of letters, so all answers are texts, of which an engine
holds nothing back.
"""

import json
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
from safetensors.torch import save_file

VOCABULARY, CONTEXT = 256, 8192


class Shape(NamedTuple):
    """What decides on the computation and the cache of a token."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int = 64


SMOLLM2 = Shape(30, 576, 1536, 9, 3)  # SmolLM2-135M, but for its vocabulary


def write_model(folder: Path, shape: Shape) -> None:
    """Write the files, which a later call with the same shape writes alike."""
    sizes = {
        "hidden_size": shape.hidden, "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT,
    }  # fmt: skip
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, **sizes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"model.{name}.weight": torch.ones(size)
        if len(size) == 1
        else 0.05 * torch.randn(size, generator=generator)
        for name, size in _sizes(shape).items()
    }
    save_file(weights, folder / "model.safetensors")
    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(a + b for a in letters for b in letters)][:VOCABULARY]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, []))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast"}  # else transformers looks for Llama's own
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def _sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the tensors' sizes by their names."""
    hidden, ffn = shape.hidden, shape.ffn
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCABULARY, hidden), "norm": (hidden,)}
    for layer in range(shape.layers):
        for name, size in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }.items():
            sizes[f"layers.{layer}.{name}"] = size
    return sizes
