"""Which value continues which, as far as batches show it."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Learned(NamedTuple):
    """What a batch has shown.

    Attributes:
        changed: the first value that was not known to continue the one before it, if any.
        is_new: whether it was not known at all, nor those after it.
        has_gaps: whether others are known in between.
        is_whole: whether the batch begins with the first value of its prompt.
    """

    changed: str | None
    is_new: bool
    has_gaps: bool
    is_whole: bool


class Prompts:
    """Values by name: a forest, for prompts with the same beginning share values. Not thread-safe.

    Dictionaries of strings only, which the garbage collector need not look at.

    Args:
        max_steps: how far is looked for a value, beyond a few steps for each of a batch.
    """

    def __init__(self, max_steps: int):
        self._max_steps = max_steps
        # What each continues, "" where that is nothing; the one that was learned first is the
        # first. One that continues it; where several do, the others.
        self._before: dict[str, str] = {}
        self._after: dict[str, str] = {}
        self._others: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._before)

    def __contains__(self, name: str) -> bool:
        return name in self._before

    def knows_any(self, names: Iterable[str]) -> bool:
        return bool(self._before) and not self._before.keys().isdisjoint(names)

    def names(self) -> list[str]:
        return [*self._before]

    def way(self, name: str) -> list[str]:
        """Its prompt, from the first value to this one; nothing if it is not known."""
        way = [name] if name in self._before else []
        while way and (name := self._before[name]):
            way.append(name)
        return way[::-1]

    def ends(self, name: str) -> Iterator[str]:
        """The ends of all that continues it; itself if nothing does."""
        left = [name]
        while left:
            name = left.pop()
            if name not in self._after:
                yield name
            left += self._next(name)

    def learn(self, names: Sequence[str]) -> Learned | None:
        """Learn that each of these continues the one before it, at once or after some others.

        Where that contradicts what was known, the new counts. None: it does so throughout, and
        these are not values of a prompt: they are forgotten.
        """
        known = [*map(self._before.get, names)]
        is_whole = not known[0]
        same = 1  # values that are known in this order
        for (before, _), continued in zip(pairwise(names), known[1:], strict=True):
            if before != continued:
                break
            same += 1
        if same == len(names):
            return Learned(None, False, False, is_whole)
        if not any(one is not None for one in known[same:]) and len({*names}) == len(names):
            self._append(names, same)
            return Learned(names[same], True, False, is_whole)
        return self._learn_each(names)

    def forget(self, names: Iterable[str]) -> None:
        """Forget values: what continues one of them, continues what that continued."""
        for name in names:
            before = self._before[name]
            for after in self._next(name):
                self._follow(after, before)
            self._follow(name, "")
            del self._before[name]

    def keep(self, names: Sequence[str]) -> None:
        """Forget all others at once."""
        kept, old = {*names}, self._before
        self._before, self._after, self._others = {}, {}, {}
        for name in names:
            before = old[name]
            while before and before not in kept:
                before = old[before]
            self._follow(name, before)

    def _append(self, names: Sequence[str], known: int) -> None:
        """Learn that the first so many values are continued by new ones."""
        self._before.setdefault(names[0], "")
        self._follow(names[known], names[known - 1])
        self._before.update(zip(names[known + 1 :], names[known:], strict=False))
        self._after.update(pairwise(names[known:]))

    def _learn_each(self, names: Sequence[str]) -> Learned | None:
        most, steps, has_gaps = self._max_steps + 4 * len(names), 0, False
        before, changed = names[0], None
        self._before.setdefault(before, "")
        for name in names[1:]:
            if name == before or self._before.get(name) == before:
                before = name
                continue
            above, is_after = self._before.get(name), False
            while above and steps <= most and not is_after:
                steps += 1
                is_after, above = above == before, self._before[above]
            if not is_after:
                steps += self._move(name, before)
                changed = changed or name
            if steps > most:
                self.forget(one for one in {*names} if one in self._before)
                return None
            has_gaps |= is_after
            before = name
        return Learned(changed, False, has_gaps, not self._before[names[0]])

    def _move(self, name: str, before: str) -> int:
        """Have it continue another one, which must not continue it any more; returns the steps."""
        below, steps = before, 0
        while name in self._after and (above := self._before[below]):
            steps += 1
            if above == name:
                self._follow(below, self._before[name])
                break
            below = above
        self._follow(name, before)
        return steps

    def _follow(self, name: str, before: str) -> None:
        """Have it continue another one, or nothing, from now on."""
        if old := self._before.get(name):
            others = self._others.get(old)
            if self._after[old] != name:
                self._others[old].remove(name)
            elif others:
                self._after[old] = others.pop()
            else:
                del self._after[old]
        self._before[name] = before
        if before and self._after.setdefault(before, name) != name:
            self._others.setdefault(before, set()).add(name)

    def _next(self, name: str) -> list[str]:
        """What continues it."""
        first = self._after.get(name)
        return [] if first is None else [first, *self._others.get(name, ())]


class RecentPrompts:
    """Prompts as batches had them, from the first value on: while batches are whole, or begin or
    end with one of them, nothing need be known of each value. Not thread-safe.
    """

    def __init__(self) -> None:
        self._prompts: deque[list[str]] = deque()
        self._by_first: dict[str, list[str]] = {}  # the latest
        self._by_last: dict[str, list[str]] = {}
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def way(self, names: list[str]) -> list[str] | None:
        """The prompt up to the last of these, if they begin or end it; None: that is not clear."""
        count = len(names)
        prompt = self._by_last.get(names[-1])
        if prompt is not None and prompt[-count:] == names:
            return prompt
        prompt = self._by_first.get(names[0])
        return names if prompt is not None and prompt[:count] == names else None

    def add(self, names: list[str]) -> bool:
        """Take in a prompt that is new, or begins like the latest with its first value.

        Returns:
            False if that is not clear.
        """
        known = 0
        for one, other in zip(names, self._by_first.get(names[0], ()), strict=False):
            if one != other:
                break
            known += 1
        rest = names[known:]
        if not self._names.isdisjoint(rest) or len({*rest}) < len(rest):
            return False
        self._prompts.append(names)
        self._by_first[names[0]] = self._by_last[names[-1]] = names
        self._names.update(rest)
        return True

    def take(self) -> list[list[str]]:
        """All of them, which are forgotten here."""
        prompts = [*self._prompts]
        for kept in (self._prompts, self._by_first, self._by_last, self._names):
            kept.clear()
        return prompts

    def shorten(self, most: int) -> None:
        """Forget the oldest, until so many values are left."""
        while len(self._names) > most:
            names = self._prompts.popleft()
            self._names.difference_update(names)
            for places, name in ((self._by_first, names[0]), (self._by_last, names[-1])):
                if places.get(name) is names:
                    del places[name]
