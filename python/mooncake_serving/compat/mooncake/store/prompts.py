"""Which value continues which, as far as batches show it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_NO_LINKS: "frozenset[Link] | set[Link]" = frozenset()


class Link:
    """A value: what it continues, and what continues it."""

    __slots__ = ("children", "name", "parent")

    def __init__(self, name: str):
        self.name = name
        self.parent: Link | None = None
        self.children = _NO_LINKS  # a set of its own once it has some: most have one, or none

    def follow(self, parent: "Link | None") -> None:
        """Continue another one from now on."""
        if self.parent is not None and isinstance(self.parent.children, set):
            self.parent.children.discard(self)
        self.parent = parent
        if parent is not None:
            if not isinstance(parent.children, set):
                parent.children = set()
            parent.children.add(self)

    def ancestors(self) -> Iterator["Link"]:
        """What it continues, from the next one to the first of its prompt."""
        link = self.parent
        while link is not None:
            yield link
            link = link.parent

    def leaves(self) -> Iterator["Link"]:
        """The ends of all that continues it; itself if nothing does."""
        left = [self]
        while left:
            link = left.pop()
            if not link.children:
                yield link
            left += link.children


class Learned(NamedTuple):
    """What a batch has shown.

    Attributes:
        first: its first value.
        last: its last value, which continues all the others.
        changed: the first value that was not known to continue the one before it, if any.
        has_gaps: whether others are known in between.
    """

    first: Link
    last: Link
    changed: Link | None
    has_gaps: bool


class Prompts:
    """Values by name: a forest, for prompts with the same beginning share values. Not thread-safe.

    Args:
        max_steps: how far is looked for a value, beyond a few steps for each of a batch.
    """

    def __init__(self, max_steps: int):
        self._max_steps = max_steps
        self._links: dict[str, Link] = {}  # the one that was learned first is the first

    def __len__(self) -> int:
        return len(self._links)

    def find(self, name: str) -> Link | None:
        return self._links.get(name)

    def names(self) -> list[str]:
        return [*self._links]

    def learn(self, names: Sequence[str]) -> Learned | None:
        """Learn that each of these continues the one before it, at once or after some others.

        Where that contradicts what was known, the new counts. None: it does so throughout, and
        these are not values of a prompt: they are forgotten.
        """
        links, steps, has_gaps = self._links, 0, False
        before: Link | None = None
        changed: Link | None = None
        for name in names:
            link = links.get(name)
            if link is None:
                link = links[name] = Link(name)
            if before is None or link.parent is before or link is before:
                before = link
                continue
            is_after = False
            for ancestor in link.ancestors():
                steps += 1
                if ancestor is before or steps > self._max_steps + 4 * len(names):
                    is_after = ancestor is before
                    break
            if not is_after:
                steps += self._move(link, before)
                changed = changed or link
            if steps > self._max_steps + 4 * len(names):
                self.forget(one for one in dict.fromkeys(names) if one in links)
                return None
            has_gaps |= is_after
            before = link
        assert before is not None
        return Learned(links[names[0]], before, changed, has_gaps)

    def forget(self, names: Iterable[str]) -> None:
        """Forget values: what continues one of them, continues what that continued."""
        for name in names:
            link = self._links.pop(name)
            for child in tuple(link.children):
                child.follow(link.parent)
            link.follow(None)

    @staticmethod
    def _move(link: Link, parent: Link) -> int:
        """Have it continue another one, which must not continue it any more; returns the steps."""
        below, steps = parent, 0
        for ancestor in parent.ancestors() if link.children else ():
            steps += 1
            if ancestor is link:
                below.follow(link.parent)
                break
            below = ancestor
        link.follow(parent)
        return steps
