"""Text to token ids and back, one string at a time or as tokens arrive; chats by their template."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream
from tokenizers.pre_tokenizers import ByteLevel

from mooncake_kernels.errors import InvalidArgument

from ..arguments import refuse
from .arguments import as_integers
from .chat import CHATML_TEMPLATE, render_chat

Message = Mapping[str, str]  # {"role": "user", "content": "..."}


class Tokenizer:
    """Wrap a `tokenizers` tokenizer together with the model's chat template.

    Args:
        tokenizer: the vocabulary and its rules.
        chat_template: Jinja source. None: ChatML, if the vocabulary has its two markers.
        bos_token: text of the token that begins a sequence, for the template.
        eos_token: text of the token that ends one, for the template.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.bos_token, self.eos_token = bos_token, eos_token

    @property
    def vocab_size(self) -> int:
        """Count the tokens, including added ones; a model's embedding may have more rows."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_token_bytes(self) -> int | None:
        """Return of how many bytes of text one token is at most; None: no bound is known.

        One is known of byte-level vocabularies whose rules neither change nor drop text.
        """
        rules = json.loads(self.tokenizer.to_str())
        is_known = (
            rules["normalizer"] is None
            and rules["truncation"] is None
            and not any(token["lstrip"] or token["rstrip"] for token in rules["added_tokens"])
            and rules["model"]["type"] == "BPE"
            and not rules["model"].get("continuing_subword_prefix")
            and not rules["model"].get("end_of_word_suffix")
            and _is_byte_level(rules["pre_tokenizer"])
        )
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        if not is_known or not vocabulary.keys() >= set(ByteLevel.alphabet()):
            return None
        return max(len(text.encode()) for text in vocabulary)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Split text into token ids; other threads run meanwhile.

        Text that looks like a control token (``<|im_end|>``) becomes that token.

        Args:
            text: the text.
            add_special: begin with the bos token if the model wants one.
        """
        # The call for one text keeps Python's lock.
        [encoding] = self.tokenizer.encode_batch([text], add_special_tokens=add_special)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Join token ids into text; control tokens are left out unless ``keep_special``.

        An id that the vocabulary lacks has no text: a model's embedding may have more rows.

        Raises:
            InvalidArgument: what is no token id.
        """
        return self.tokenizer.decode(
            as_token_ids("decode", token_ids), skip_special_tokens=not keep_special
        )

    def render_chat(self, messages: Sequence[Message], *, reply: bool = True) -> str:
        """Format messages as the model was trained to read them.

        Args:
            messages: each with ``role`` (system, user, assistant) and ``content``.
            reply: end with the opening of an assistant's turn, so that the model answers.

        Raises:
            InvalidArgument: no messages, a message that lacks a field, or one the template refuses;
                or the model has no template and does not know ChatML's markers.
        """
        for index, message in enumerate(messages):
            if not {"role", "content"} <= message.keys():
                raise InvalidArgument(
                    f"render_chat: messages[{index}] must have role and content, got {message!r}"
                )
        if not messages:
            raise InvalidArgument("render_chat: messages must not be empty, got []")
        return render_chat(
            self.chat_template or self._chatml(),
            messages,
            reply=reply,
            bos_token=self.bos_token or "",
            eos_token=self.eos_token or "",
        )

    def encode_chat(self, messages: Sequence[Message], *, reply: bool = True) -> list[int]:
        """Render messages and split them into token ids; the template itself writes any bos."""
        return self.encode(self.render_chat(messages, reply=reply), add_special=False)

    def stream(self) -> "TextStream":
        """Start decoding one sequence token by token."""
        return TextStream(self)

    def _chatml(self) -> str:
        if None in (self.tokenizer.token_to_id(x) for x in ("<|im_start|>", "<|im_end|>")):
            raise InvalidArgument(
                "render_chat: the model has no chat template and no ChatML markers"
            )
        return CHATML_TEMPLATE


class TextStream:
    """Decode tokens as they arrive, holding back a character until its last byte is there.

    ``finish`` after the last token returns the rest: together, the texts are what ``decode``
    returns.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._num_characters = 0  # returned so far

    def push(self, token_id: int) -> str:
        """Take one more token and return the text that is now certain, often a word or ''.

        Raises:
            InvalidArgument: it is no token id.
        """
        [token_id] = as_token_ids("push", [token_id])
        text = self._stream.step(self._tokenizer.tokenizer, token_id) or ""
        self._token_ids.append(token_id)
        self._num_characters += len(text)
        return text

    def finish(self) -> str:
        """Return the text that was held back, with U+FFFD for what is no character; often ''."""
        text = self._tokenizer.decode(self._token_ids)[self._num_characters :]
        self._num_characters += len(text)
        return text


def _is_byte_level(rule: Mapping[str, Any] | None) -> bool:
    """Tell whether a rule that splits text makes all of its bytes characters, and drops none."""
    if rule is None:
        return False
    rules = rule["pretokenizers"] if rule["type"] == "Sequence" else [rule]
    kinds = [one["type"] for one in rules]
    drops = any(one.get("behavior") == "Removed" for one in rules)
    return "ByteLevel" in kinds and {*kinds} <= {"ByteLevel", "Digits", "Split"} and not drops


def as_token_ids(op: str, token_ids: Iterable[int]) -> list[int]:
    """Return token ids as a list.

    Raises:
        InvalidArgument: they are no integers of 0 to 2**32 - 1.
    """
    listed = as_integers(op, "token_ids", token_ids)
    for index, token_id in enumerate(listed):
        if not 0 <= token_id < 1 << 32:
            refuse(op, f"token_ids[{index}]", "in [0, 2**32)", token_id)
    return listed
