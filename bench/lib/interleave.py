"""Which objects a call moves: the next ones, so that those of the last are not in the cache."""


class Interleave:
    """Consecutive parts of ``count`` objects, ``each`` at a time, again and again."""

    def __init__(self, count: int, each: int = 1):
        self.parts = [range(start, start + each) for start in range(0, count, each)]
        self._next = -1

    def take(self) -> range:
        """Return the next part."""
        self._next = (self._next + 1) % len(self.parts)
        return self.parts[self._next]
