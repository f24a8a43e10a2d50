"""A cache's layers in strips, each of which is moved by itself, and in which order they leave."""

from collections.abc import Callable
from typing import NamedTuple

MAX_STRIPS = 8  # of a cache: what is left at the end of a prompt is one of them, of one chunk


def strips_of(num_layers: int) -> list[range]:
    """Divide layers into at most ``MAX_STRIPS`` strips, in order.

    The first one, which a prompt that is loaded waits for, may be smaller than the others.
    """
    size = -(-num_layers // MAX_STRIPS)
    stops = range(num_layers, 0, -size)
    return [range(max(0, stop - size), stop) for stop in reversed(stops)]


class Computed(NamedTuple):
    """What is computed of a prompt.

    Attributes:
        num_tokens: in all layers.
        ahead: tokens, at least as many, that are computed in the first strips.
        num_strips: these strips.
    """

    num_tokens: int = 0
    ahead: int = 0
    num_strips: int = 0


class Cursor(NamedTuple):
    """What was taken of a prompt: all before ``token``, and a part of a rectangle behind it.

    Attributes:
        token: tokens before it were taken in all layers.
        stop: up to which tokens are being taken strip by strip; 0: none are.
        strip: of those tokens the strips before it were taken.
        inner: and in this strip the tokens before it.
    """

    token: int
    stop: int = 0
    strip: int = 0
    inner: int = 0

    def next(
        self, computed: Computed, num_strips: int, tokens_of: Callable[[int], int]
    ) -> "tuple[range, range, Cursor] | None":
        """Return the tokens and strips to take next, and the cursor behind them; None if there are
        none yet.

        All layers at once where they are computed; otherwise the strips that are.

        Args:
            computed: what there is.
            num_strips: of the cache.
            tokens_of: how many tokens of that many strips are taken at once at most.
        """
        token, stop, strip, inner = self
        if not stop:
            if computed.num_tokens > token:
                end = min(computed.num_tokens, token + tokens_of(num_strips))
                return range(token, end), range(num_strips), Cursor(end)
            if computed.ahead <= token:
                return None
            stop, inner = computed.ahead, token
        have = computed.num_strips if computed.ahead >= stop else 0
        if computed.num_tokens >= stop:
            have = num_strips
        if have <= strip:
            return None
        strips = range(strip, have)
        if inner > token or tokens_of(len(strips)) < stop - token:
            strips = range(strip, strip + 1)
        end = min(stop, inner + tokens_of(len(strips)))
        if end < stop:
            behind = Cursor(token, stop, strip, end)
        elif strips.stop < num_strips:
            behind = Cursor(token, stop, strips.stop, token)
        else:
            behind = Cursor(stop)
        return range(inner, end), strips, behind


NOTHING, START = Computed(), Cursor(0)
