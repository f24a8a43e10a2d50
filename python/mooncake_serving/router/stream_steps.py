"""How many steps an engine has taken for what has come of a stream."""

import re

from .call import Call

TOLD = re.compile(rb'"completion_tokens": ?([0-9]+)[^0-9]')
NO_OUTPUT = re.compile(rb'"choices": ?\[\]')  # an event that only tells the usage
DATA, DONE = b"data: ", b"data: [DONE]"


class StreamSteps:
    """Counts the events of a stream, and the tokens if they are told.

    An event may hold several tokens, such as those that speculative decoding has accepted, or that
    make one character. How many there were is told at the end, if the client asks for the usage
    (``stream_options.include_usage``).

    Attributes:
        is_told: whether the number of tokens will be told.
        num_events: with output, after the first part.
        num_tokens: of all events, as far as it was told.
    """

    def __init__(self, call: Call):
        options = call.body.get("stream_options")
        self.is_told = isinstance(options, dict) and options.get("include_usage") is True
        self.num_events = self.num_tokens = 0
        self._num_samples, self._num_first = call.num_samples, 0

    def begin(self, part: bytes) -> None:
        """Take the first part, from which on times are measured."""
        self._num_first, self.num_events = self.add(part), 0

    def add(self, part: bytes) -> int:
        """Take a part, and return how many events with output it has."""
        count = part.count(DATA) - part.count(DONE)
        if self.is_told and (told := TOLD.findall(part)):
            self.num_tokens = int(told[-1])
            count -= len(NO_OUTPUT.findall(part))
        self.num_events += count
        return count

    @property
    def per_event(self) -> float:
        """Steps an event; without a number of tokens, one for all samples of the request."""
        num_events = self.num_events + self._num_first
        tokens = self.num_tokens / num_events if self.num_tokens and num_events else 1.0
        return tokens / self._num_samples
