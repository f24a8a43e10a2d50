"""Stop strings: what is sent, and what is held back."""

import pytest

from mooncake_serving.engine import load_model
from mooncake_serving.serve.answer_text import AnswerText


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return load_model(tiny_folder)[1]


def parts_of(tokenizer, text: str, *stops: str) -> tuple[list[str], bool]:
    answer = AnswerText(tokenizer, stops)
    parts = [answer.push(token) for token in tokenizer.encode(text)]
    return [*parts, answer.finish()], answer.is_stopped


@pytest.mark.parametrize(
    ("text", "stops", "expected", "is_stopped"),
    [
        ("abcdef", (), "abcdef", False),
        ("abcdef", ("cd",), "ab", True),
        ("abcdef", ("ef",), "abcd", True),
        ("abcdef", ("xx", "de", "cd"), "ab", True),
        ("abcabd", ("abd",), "abc", True),
        ("abcab", ("abd",), "abcab", False),
        ("aaab", ("aab",), "a", True),
        ("a b\nc", ("\n",), "a b", True),
        ("añb", ("ñ",), "a", True),
        ("abc", ("a",), "", True),
    ],
)
def test_text_ends_before_the_first_stop(tokenizer, text, stops, expected, is_stopped):
    parts, stopped = parts_of(tokenizer, text, *stops)
    assert ("".join(parts), stopped) == (expected, is_stopped)


def test_only_what_may_begin_a_stop_is_held_back(tokenizer):
    parts, _ = parts_of(tokenizer, "xyaabz", "aac")
    assert parts == ["x", "y", "", "", "aab", "z", ""]


def test_half_a_character_waits_for_its_other_half(tokenizer):
    parts, _ = parts_of(tokenizer, "ñ")
    assert parts == ["", "ñ", ""]
