"""The text of an answer, as its tokens come: up to a stop string, which is not part of it."""

from collections.abc import Sequence

from mooncake_serving.engine import Tokenizer


class AnswerText:
    """Turns tokens into text, holding back what may be the beginning of a stop string.

    Args:
        tokenizer: of the model.
        stops: the strings.

    Attributes:
        is_stopped: whether one of them has come: nothing follows.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._stream = tokenizer.stream()
        self._stops = stops
        self._held = ""
        self.is_stopped = False

    def push(self, token_id: int) -> str:
        """Take one more token; returns the text that is now certain, often a word or ''."""
        return self._take(self._stream.push(token_id))

    def finish(self) -> str:
        """Return the text that was held back, after the last token."""
        text = self._take(self._stream.finish())
        held, self._held = self._held, ""
        return text + held

    def _take(self, text: str) -> str:
        if self.is_stopped:
            return ""
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            certain, self._held = self._held[: min(found)], ""
            return certain
        num_held = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        certain = self._held[: len(self._held) - num_held]
        self._held = self._held[len(certain) :]
        return certain


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the end of a text with which a stop string may begin."""
    most = min(len(text), len(stop) - 1)
    return next((count for count in range(most, 0, -1) if text.endswith(stop[:count])), 0)
