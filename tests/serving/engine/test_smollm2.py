"""The real model: it knows the capital of France, and agrees with transformers about the logits."""

import pytest
import torch

from mooncake_serving.engine import Batch, Chunk, Engine, PagedKVCache, SamplingParams

PROMPT = "The capital of France is"


@pytest.mark.parametrize("axes", ["kv block token head dim", "block layer kv head token dim"])
def test_smollm2_knows_the_capital_of_france(smollm2, axes):
    model, tokenizer = smollm2
    engine = Engine(model, PagedKVCache(model.config, 8, axes=axes), chunk_tokens=3)
    prompt = tokenizer.encode(PROMPT)
    assert len(prompt) == 5
    [answer] = engine.generate([prompt], SamplingParams(max_tokens=2))
    assert tokenizer.decode(answer.token_ids) == " Paris."


def test_chat_ends_at_eos(smollm2):
    model, tokenizer = smollm2
    chat = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
    prompt = tokenizer.encode_chat(chat)
    engine = Engine(model, PagedKVCache(model.config, 16))
    [answer] = engine.generate([prompt], SamplingParams(max_tokens=32))
    assert tokenizer.decode(answer.token_ids) == "The capital of France is Paris."
    assert answer.finish_reason == "stop"


def test_chatml_uses_the_default_system_prompt_of_the_model(smollm2):
    text = smollm2[1].render_chat([{"role": "user", "content": "hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_logits_match_transformers(smollm2):
    transformers = pytest.importorskip("transformers")
    model, tokenizer = smollm2
    config, weights = model.config, model.weights
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.rms_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=True,
        )
    )
    theirs.load_state_dict(state_dict_of(config, weights))
    tokens = tokenizer.encode("The life of a KV block begins in a prefill chunk. " * 6)
    with torch.no_grad():
        rounded = theirs.eval()(torch.tensor([tokens])).logits[0]
        exact = theirs.double()(torch.tensor([tokens])).logits[0]
    cache = PagedKVCache(config, 16)
    batch = Batch.build([Chunk(tokens, 0, list(range(16)))], 16)
    got = model.forward(batch, cache, all_logits=True)
    ours, other = (got - exact).abs(), (rounded - exact).abs()
    assert ours.square().mean() < 2**2 * other.square().mean()
    # The largest of some millions is a matter of luck: of the order in which a CPU adds.
    assert ours.max() < 5 * other.max()
    assert torch.equal(got.argmax(-1), rounded.argmax(-1))


def state_dict_of(config, weights):
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.norm,
        "lm_head.weight": weights.head,
    }
    kv_size = config.num_kv_heads * config.head_dim
    for index, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split([config.num_heads * config.head_dim, kv_size, kv_size])
        gate, up = layer.gate_up.chunk(2)
        parts = {
            "input_layernorm": layer.attention_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.attention_out,
            "post_attention_layernorm": layer.ffn_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        state |= {f"model.layers.{index}.{name}.weight": part for name, part in parts.items()}
    return state
