"""Text survives the round trip through tokens; chats use the model's own template."""

import json

import pytest
import tokenizers

from mooncake_serving.engine import Tokenizer, load_model
from mooncake_serving.engine.chat import render_chat

CHAT = [{"role": "user", "content": "hi"}]
TEXTS = ["", "the thing in 2121", " the\n\nthe ", "naïve ☃ 日本", "<|im_start|>in<|im_end|>"]


@pytest.fixture
def tokenizer(tiny_folder):
    return load_model(tiny_folder)[1]


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_and_tokenizer_json_tokenize_alike(tokenizer, gguf_writer, text):
    _, from_gguf = load_model(gguf_writer())
    assert from_gguf.encode(text) == tokenizer.encode(text)
    assert from_gguf.decode(from_gguf.encode(text), keep_special=True) == text


def test_merges_digits_and_control_tokens(tokenizer):
    one_each = tokenizer.encode("the the12<|im_end|>")
    texts = [tokenizer.tokenizer.id_to_token(token_id) for token_id in one_each]
    assert texts == ["the", "Ġthe", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(one_each) == "the the12"


def test_gpt2_and_llama_bpe_do_not_split_digits(gguf_writer):
    for pre in ("gpt-2", "llama-bpe"):
        _, tokenizer = load_model(gguf_writer(pre=pre))
        texts = [tokenizer.tokenizer.id_to_token(x) for x in tokenizer.encode("the12")]
        bos = ["<|im_start|>"] if pre == "llama-bpe" else []
        assert texts == [*bos, "the", "12"]


def changed(tokenizer, **rules):
    return Tokenizer(
        tokenizers.Tokenizer.from_str(json.dumps(json.loads(tokenizer.tokenizer.to_str()) | rules))
    )


def test_bytes_of_a_token_have_a_bound_where_no_text_is_dropped(tokenizer, gguf_writer):
    longest = len("<|endoftext|>")
    assert tokenizer.max_token_bytes == longest
    for pre in ("gpt-2", "llama-bpe"):
        assert load_model(gguf_writer(pre=pre))[1].max_token_bytes == longest
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
    }  # fmt: skip
    spaces = {"type": "Split", "pattern": {"String": " "}, "invert": False}
    for behavior, bound in (("Isolated", longest), ("Removed", None)):
        rules = [spaces | {"behavior": behavior}, byte_level]
        split = {"type": "Sequence", "pretokenizers": rules}
        assert changed(tokenizer, pre_tokenizer=split).max_token_bytes == bound
    assert changed(tokenizer, pre_tokenizer=None).max_token_bytes is None
    assert changed(tokenizer, normalizer={"type": "NFC"}).max_token_bytes is None
    stripping = [{
        "id": 0, "content": "<|endoftext|>", "single_word": False, "lstrip": True, "rstrip": False,
        "normalized": False, "special": True,
    }]  # fmt: skip
    assert changed(tokenizer, added_tokens=stripping).max_token_bytes is None


def test_stream_holds_back_partial_characters(tokenizer):
    stream = tokenizer.stream()
    pieces = [stream.push(token_id) for token_id in tokenizer.encode("a☃b<|im_end|>")]
    assert pieces == ["a", "", "", "☃", "b", ""]


@pytest.mark.parametrize("text", ["a☃b", "☃", "", "the naïve 日"])
def test_stream_cut_anywhere_equals_decode(tokenizer, text):
    """An answer that ends inside a character has its beginning replaced, and loses nothing else."""
    ids = tokenizer.encode(text)
    for end in range(len(ids) + 1):
        stream = tokenizer.stream()
        pieces = [stream.push(token_id) for token_id in ids[:end]]
        assert "".join(pieces) + stream.finish() == tokenizer.decode(ids[:end])
        assert stream.finish() == ""
    assert tokenizer.decode(tokenizer.encode("a☃")[:-1]) == "a\ufffd"


@pytest.mark.parametrize("bad", [-1, 2**32, "a", 1.5, True])
def test_invalid_token_ids_are_rejected(tokenizer, bad):
    with pytest.raises(ValueError, match=r"^decode: token_ids\[1\] must be "):
        tokenizer.decode([3, bad])
    with pytest.raises(ValueError, match=r"^push: token_ids\[0\] must be "):
        tokenizer.stream().push(bad)
    with pytest.raises(ValueError, match="^decode: token_ids must be integers, got 5"):
        tokenizer.decode(5)
    assert tokenizer.decode([10**7]) == ""  # the row of an embedding that is padded


def test_template_of_the_model_is_used(gguf_writer):
    _, tokenizer = load_model(gguf_writer())
    assert tokenizer.render_chat(CHAT) == "<|im_start|>user\nhi<|im_end|>\n"
    ids = tokenizer.encode_chat(CHAT)
    assert (ids[0], ids.count(2)) == (1, 1)


def test_chatml_replaces_a_missing_template(tokenizer):
    text = tokenizer.render_chat(CHAT)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(CHAT, reply=False) + "<|im_start|>assistant\n" == text


def test_chat_requires_a_template_or_chatml_markers():
    plain = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])))
    with pytest.raises(ValueError, match="no chat template and no ChatML markers"):
        plain.render_chat(CHAT)


@pytest.mark.parametrize("where", ["tokenizer_config.json", "named", "chat_template.jinja"])
def test_template_in_the_folder_is_found(folder_writer, where):
    folder = folder_writer()
    template = "{{ bos_token }}{{ messages[0].content }}"
    settings = {"bos_token": {"content": "<|im_start|>"}}
    if where == "chat_template.jinja":
        (folder / where).write_text(template)
    elif where == "named":
        settings["chat_template"] = [{"name": "default", "template": template}]
    else:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_model(folder)[1].render_chat(CHAT) == "<|im_start|>hi"


def test_templates_get_the_usual_helpers():
    text = render_chat("{{ messages | tojson }}{{ strftime_now('%%') }}", CHAT)
    assert text == '[{"role": "user", "content": "hi"}]%'


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'é' | tojson }}", '"é"'),
        ("{{ 'é' | tojson(ensure_ascii=True) }}", '"\\u00e9"'),
        (
            "{{ {'b': 1, 'a': [2]} | tojson(separators=(',', ':'), sort_keys=True) }}",
            '{"a":[2],"b":1}',
        ),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}", "1"),
        ("{{ tools is none and documents is none }}", "True"),
    ],
)
def test_template_environment_matches_hugging_face(template, text):
    assert render_chat(template, CHAT) == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ range(10**9) }}", "render_chat: Range too big"),
        ("{{ 1 / 0 }}", "render_chat: division by zero"),
        ("{{ messages[0]['content'] + 1 }}", "render_chat: can only concatenate str"),
        ("{% generation %}", "render_chat: .*endgeneration"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "render_chat: Expected an expression"),
        ("{{ messages.__class__.__mro__ }}", "render_chat: .*unsafe"),
        ("{{ messages.append(1) }}", "render_chat: .*not safely callable|unsafe"),
    ],
)
def test_misbehaving_template_raises_value_error(template, message):
    with pytest.raises(ValueError, match=message):
        render_chat(template, CHAT)


def test_bad_message_is_rejected(tokenizer):
    with pytest.raises(ValueError, match=r"messages\[1\] must have role and content"):
        tokenizer.render_chat([*CHAT, {"role": "user"}])
    with pytest.raises(ValueError, match="messages must not be empty"):
        tokenizer.render_chat([])
