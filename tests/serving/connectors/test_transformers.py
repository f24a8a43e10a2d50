"""Prefixes of transformers' models in a store, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    DynamicCache,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_serving.connectors import transformers as ours
from mooncake_serving.connectors.transformers import PrefixStore
from tests.pages import run_block

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def llama(seed=0, **changes):
    torch.manual_seed(seed)
    config = LlamaConfig(**(SIZES | changes), name_or_path=f"tiny/{seed}")
    return LlamaForCausalLM(config).eval()


def prompt(length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 97, (1, length), generator=generator)


def generate(model, ids, cache=None):
    options = {} if cache is None else {"past_key_values": cache}
    return model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0, **options)


@pytest.fixture
def url(tmp_path):
    return f"shm:{tmp_path}/kv?size=16MiB"


@pytest.mark.parametrize(
    "model",
    [
        llama(),
        llama(dtype="bfloat16"),
        GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=16)).eval(),
    ],
    ids=["llama", "bfloat16", "gemma"],
)
def test_a_prefix_is_computed_once(url, model, monkeypatch):
    monkeypatch.setattr(ours, "STAGING_BYTES", 1 << 14)  # some rounds
    ids = prompt(150)
    expected = generate(model, ids)
    with PrefixStore(url, model, block_tokens=16) as prefixes:
        cache = prefixes.cache_for(ids)
        assert cache.num_loaded == cache.get_seq_length() == 0
        out = generate(model, ids, cache)
        assert torch.equal(out, expected)
        assert prefixes.save(cache, out) == 144  # of 150 + 8: whole blocks
        saved = [(layer.keys, layer.values) for layer in cache.layers]
    with PrefixStore(url, model, block_tokens=16) as prefixes:
        again = prefixes.cache_for(ids)
        assert again.num_loaded == again.get_seq_length() == 144
        for layer, (keys, values) in zip(again.layers, saved, strict=True):
            assert torch.equal(layer.keys, keys[..., :144, :])
            assert torch.equal(layer.values, values[..., :144, :])
        assert torch.equal(generate(model, ids, again), expected)
        assert prefixes.save(again, expected) == 144
        # Another prompt with the same beginning; one that ends where a block does.
        other = torch.cat([ids[:, :70], prompt(40, seed=2)], dim=1)
        assert prefixes.cache_for(other).num_loaded == 64
        assert prefixes.cache_for(ids[0, :64].tolist()).num_loaded == 48
        assert prefixes.cache_for([5]).num_loaded == 0
        assert not prefixes.store.failures


def test_generated_tokens_are_a_prefix_of_the_next_turn(url):
    model, ids = llama(), prompt(20)
    with PrefixStore(url, model, block_tokens=8) as prefixes:
        cache = prefixes.cache_for(ids)
        out = generate(model, ids, cache)
        assert prefixes.save(cache, out) == 24
        turn = torch.cat([out, prompt(5, seed=3)], dim=1)
        cache = prefixes.cache_for(turn)
        assert cache.num_loaded == 24
        assert torch.equal(generate(model, turn, cache), generate(model, turn))


def test_other_models_share_nothing(url):
    ids = prompt(40)
    base = llama()
    with PrefixStore(url, base, block_tokens=8) as prefixes:
        cache = prefixes.cache_for(ids)
        prefixes.save(cache, generate(base, ids, cache))
    for model, options in (
        (llama(seed=1), {}),
        (llama(dtype="bfloat16"), {}),
        (llama(rms_norm_eps=0.5), {}),
        (base, {"namespace": "other weights"}),
        (base, {"block_tokens": 4}),
    ):
        with PrefixStore(url, model, **({"block_tokens": 8} | options)) as prefixes:
            assert prefixes.cache_for(ids).num_loaded == 0
    with PrefixStore(url, llama(), block_tokens=8) as prefixes:
        assert prefixes.cache_for(ids).num_loaded == 32


def test_blocks_that_were_lost_or_damaged_are_computed(url, tmp_path):
    model, ids = llama(), prompt(50)
    expected = generate(model, ids)
    with PrefixStore(url, model, block_tokens=8) as prefixes:
        cache = prefixes.cache_for(ids)
        prefixes.save(cache, generate(model, ids, cache))
        names = prefixes._names(ids[0])
        prefixes.store.remove_each(names[3:4])
        cache = prefixes.cache_for(ids)
        assert cache.num_loaded == 24
        assert torch.equal(generate(model, ids, cache), expected)
        prefixes.save(cache, expected)
        assert prefixes.cache_for(ids).num_loaded == 48
        match = prefixes.store.match_prefix
        prefixes.store.match_prefix = lambda names: match(names)  # then one is evicted
        found = prefixes.store.match_prefix(names)
        prefixes.store.remove_each(names[1:2])
        prefixes.store.match_prefix = lambda names: min(found, len(names))
        cache = prefixes.cache_for(ids)
        assert cache.num_loaded == 8
        assert torch.equal(generate(model, ids, cache), expected)


def test_another_process_finds_it(url, tmp_path):
    model, ids = llama(), prompt(60)
    model.save_pretrained(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model").eval()
    with PrefixStore(url, model, block_tokens=8) as prefixes:
        cache = prefixes.cache_for(ids)
        out = generate(model, ids, cache)
        prefixes.save(cache, out)
    given = json.dumps([str(tmp_path / "model"), url, ids.tolist()])
    root = Path(__file__).parents[3]
    environ = os.environ | {"PYTHONPATH": f"{root}:{root / 'python'}"}
    done = subprocess.run(
        [sys.executable, __file__, given], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [56, out.tolist()]


def test_a_prompt_larger_than_the_store_is_computed(tmp_path):
    model, ids = llama(), prompt(400)
    with PrefixStore(f"shm:{tmp_path}/kv?size=64KiB", model, block_tokens=8) as prefixes:
        cache = prefixes.cache_for(ids)
        out = generate(model, ids, cache)
        kept = prefixes.save(cache, out)
        again = prefixes.cache_for(ids)
        assert again.num_loaded == kept < 200
        assert torch.equal(generate(model, ids, again), out)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda url: PrefixStore(url, "gpt2"), InvalidArgument,
         "model must be a PreTrainedModel, got str"),
        (lambda url: PrefixStore(url, llama(), block_tokens=0), InvalidArgument,
         "block_tokens must be an integer of at least 1, got 0"),
        (lambda url: PrefixStore(url, llama(), block_tokens=True), InvalidArgument,
         "block_tokens must be an integer of at least 1, got True"),
        (lambda url: PrefixStore("shm:kv", llama()), InvalidArgument, "url"),
        (lambda url: PrefixStore(url, llama(), block_tokens=1 << 18), InvalidArgument,
         r"PrefixStore: url must name a store with room for a page's \d+ bytes, got 16777216"),
        (lambda url: PrefixStore(url, MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8))),
         Unavailable, r"got DynamicSlidingWindowLayer in layer 0"),
        (lambda url: PrefixStore(url, T5ForConditionalGeneration(T5Config(
            vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2))),
         Unavailable, "must be decoder only"),
        (lambda url: PrefixStore(url, llama(rope_parameters={
            "rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})),
         Unavailable, "got rope_type 'dynamic'"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused(url, make, error, message):
    with pytest.raises(error, match=message):
        make(url)


def test_adapters_need_a_namespace(url):
    model = llama()
    model.peft_config = {"default": object()}
    with pytest.raises(InvalidArgument, match="namespace must name the adapters"):
        PrefixStore(url, model)
    PrefixStore(url, model, namespace="support-bot/3").close()


def test_other_ids_and_caches_are_refused(url):
    model, ids = llama(), prompt(20)
    with PrefixStore(url, model, block_tokens=8) as prefixes:
        for bad in ([[1, 2], [3, 4]], [], [1.5], torch.zeros(2, 3, 4, dtype=torch.long)):
            with pytest.raises(InvalidArgument, match=r"cache_for: ids must be integers \[num_tok"):
                prefixes.cache_for(bad)
        cache = prefixes.cache_for(ids)
        assert prefixes.save(cache, ids) == 0, "nothing was computed"
        out = generate(model, ids, cache)
        for bad in (prompt(29, seed=7), out[:, :22]):
            with pytest.raises(InvalidArgument, match="ids must begin with the 20 tokens"):
                prefixes.save(cache, bad)
        with pytest.raises(InvalidArgument, match="cache must be a StoreCache, .* DynamicCache"):
            prefixes.save(DynamicCache(), out)
        cache.batch_repeat_interleave(2)
        with pytest.raises(InvalidArgument, match="cache must be of one sequence, got 2"):
            prefixes.save(cache, out)


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    llama().save_pretrained(tmp_path / "model")
    replaced = {
        '"HuggingFaceTB/SmolLM2-135M-Instruct"': repr(str(tmp_path / "model")),
        "shm:/dev/shm/kv?size=1GiB": f"shm:{tmp_path}/kv?size=16MiB",
        "AutoTokenizer.from_pretrained(NAME)": "lambda text, return_tensors: "
        "{'input_ids': __import__('torch').arange(len(text))[None] % 97}",
        "tokenizer.decode(out[0])": "out.shape",
    }
    for num_loaded in (0, 192):
        run_block("serving/transformers", 0, {}, replaced)
        assert f"{num_loaded} tokens" in capsys.readouterr().out


if __name__ == "__main__":
    folder, url_, ids_ = json.loads(sys.argv[1])
    loaded = LlamaForCausalLM.from_pretrained(folder).eval()
    with PrefixStore(url_, loaded, block_tokens=8) as store:
        cache_ = store.cache_for(ids_)
        out_ = generate(loaded, torch.tensor(ids_), cache_)
        sys.stdout.write(json.dumps([cache_.num_loaded, out_.tolist()]))
