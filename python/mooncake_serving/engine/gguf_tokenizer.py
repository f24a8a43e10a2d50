"""The tokenizer inside a GGUF file: byte-level BPE, rebuilt from the header's lists."""

from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as BpeTokenizer

from mooncake_kernels.errors import shown

from .config import is_integer
from .errors import InvalidModel, UnsupportedModel, damaged_if_it_fails
from .gguf_weights import GgufFile
from .tokenizer import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # llama.cpp's token types

# How Llama 3 splits text before merging (the pattern of its published tokenizer.json).
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PRE_TOKENIZERS = {
    "gpt-2": "gpt2",
    "gpt2": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
}


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Build the tokenizer of a GGUF file, with its chat template if it has one.

    Raises:
        UnsupportedModel: not a byte-level BPE, or split into words by an unknown rule.
        InvalidModel: the lists are missing or contradict each other.
    """
    kind, pre = (file.metadata(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind != "gpt2":
        raise UnsupportedModel(f"load_model: tokenizer.ggml.model must be gpt2, got {kind!r}")
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"load_model: tokenizer.ggml.pre must be one of {', '.join(PRE_TOKENIZERS)}, "
            f"got {pre!r}"
        )
    texts, types = _list(file, "tokens", str), _list(file, "token_type", int)
    if len(types) != len(texts):
        raise InvalidModel(
            f"load_model: tokenizer.ggml.token_type must have {len(texts)} entries, "
            f"got {len(types)}"
        )
    style = PRE_TOKENIZERS[pre]
    bpe = _bpe(texts, _list(file, "merges", str), ignore_merges=style == "llama3")
    bpe.pre_tokenizer = _pre_tokenizer(style)
    bpe.decoder = decoders.ByteLevel()
    with damaged_if_it_fails("the GGUF vocabulary"):
        bpe.add_special_tokens(_added(texts, types, CONTROL))
        bpe.add_tokens(_added(texts, types, USER_DEFINED))

    bos, eos = (_token(file, texts, key) for key in ("bos", "eos"))
    add_bos = file.metadata("tokenizer.ggml.add_bos_token", style == "llama3")
    if add_bos and bos is not None:
        bpe.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, texts.index(bos))]
        )
    template = file.metadata("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise InvalidModel(
            f"load_model: GGUF key tokenizer.chat_template must be text, got {shown(template)}"
        )
    return Tokenizer(bpe, chat_template=template, bos_token=bos, eos_token=eos)


def _bpe(texts: list[str], merges: list[str], *, ignore_merges: bool) -> BpeTokenizer:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {text: token_id for token_id, text in enumerate(texts)}
    with damaged_if_it_fails("the GGUF vocabulary"):
        return BpeTokenizer(models.BPE(vocabulary, pairs, ignore_merges=ignore_merges))


def _pre_tokenizer(style: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style != "llama3")
    if style == "digits":  # a number is split into its digits
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if style == "llama3":
        words = pre_tokenizers.Split(Regex(LLAMA3_WORDS), behavior="isolated")
        return pre_tokenizers.Sequence([words, byte_level])
    return byte_level


def _added(texts: list[str], types: list[int], wanted: int) -> list[AddedToken]:
    return [
        AddedToken(text, special=wanted == CONTROL, normalized=False)
        for text, kind in zip(texts, types, strict=True)
        if kind == wanted
    ]


def _list(file: GgufFile, key: str, kind: type) -> list[Any]:
    values = file.metadata(f"tokenizer.ggml.{key}")
    if not isinstance(values, list):
        raise InvalidModel(f"load_model: GGUF key tokenizer.ggml.{key} is missing")
    wrong = next((value for value in values if type(value) is not kind), None)
    if wrong is not None:
        raise InvalidModel(
            f"load_model: GGUF key tokenizer.ggml.{key} must be a list of {kind.__name__}, "
            f"got one with {shown(wrong)}"
        )
    return values


def _token(file: GgufFile, texts: list[str], which: str) -> str | None:
    token_id = file.metadata(f"tokenizer.ggml.{which}_token_id")
    if token_id is None:
        return None
    if not is_integer(token_id) or not 0 <= token_id < len(texts):
        raise InvalidModel(
            f"load_model: tokenizer.ggml.{which}_token_id must be below {len(texts)}, "
            f"got {shown(token_id)}"
        )
    return str(texts[token_id])
