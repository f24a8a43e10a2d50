"""LRU evicts the values of a prompt from tail to head: after batches, parts of them, single calls.

The API does not say what a prompt is. The keys of one batch are taken for one, its head first, as
engines name their blocks: each value continues the one before it.

A value must not be evicted before what continues it, so it must not be used less recently. After a
call has used some, the times of last use from the first value of the prompt to the last that was
used are exchanged, so that the first is the newest (``Store.order_prompt``). If each value was
newer than what continues it, none gets older by this than it was before the call: prompts that
branch off stay in order as well.
"""

import logging
import os
import threading
from itertools import compress

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.store import Store

log = logging.getLogger(__package__)

MAX_NAMES = 1 << 15  # that are known, of some 200 bytes each
MAX_PROMPT = 1 << 14  # values of one batch that are taken for one prompt
MAX_LATE = 64


class PromptOrder:
    """Keeps the values of prompts in the pool of a store in order. Thread-safe.

    A batch is put in order when it ends; values that are used by themselves with the next batch,
    with the 64th of them, before this store evicts anything, and by ``close``.
    """

    def __init__(self, store: Store):
        self._store = store
        # What each value continues, "" where that is nothing: the prompts form a forest, for some
        # share their first values. Strings only, which the garbage collector need not look at.
        self._before: dict[str, str] = {}
        self._last: list[str] = []  # the prompt up to the end of the latest batch
        self._late: dict[str, None] = {}  # used by themselves, and not put in order yet
        self._lock = threading.RLock()  # the garbage collector may close the store at any point
        self._pid = os.getpid()
        store.before_eviction.append(self.catch_up)

    def shown(self, names: list[str], are_there: list[bool]) -> None:
        """Learn from a batch that was looked up."""
        for prompt, found in zip(_prompts_in(names), _prompts_in(are_there), strict=True):
            with self._lock:
                self.catch_up()
                if any(found[self._learn(prompt) :]):
                    self._order(self._last)

    def used(self, names: list[str], *, is_tail_first: bool = False) -> None:
        """Put a batch in order, whose names are valid; ``is_tail_first``: by itself it is."""
        if len(names) == 1:
            self.used_one(names[0])
        for prompt in _prompts_in(names):
            with self._lock:
                self.catch_up()
                self._learn(prompt)
                if not (is_tail_first and len(self._last) == len(prompt)):
                    self._order(self._last)

    def used_one(self, name: str) -> None:
        """Note that a value was used by itself."""
        if name in self._before:
            with self._lock:
                self._late.pop(name, None)
                self._late[name] = None
            if len(self._late) >= MAX_LATE:
                self.catch_up()

    def catch_up(self) -> None:
        """Put in order what was used by itself."""
        if not self._late:
            return
        in_order: set[str] = set()
        with self._lock:
            late, self._late = self._late, {}
            for name in reversed(late):
                if name not in in_order:
                    prompt = self.prompt_to(name)
                    in_order.update(prompt)
                    self._order(prompt)

    def prompt_to(self, name: str) -> list[str]:
        """A prompt from its first value to this one."""
        prompt: dict[str, None] = {}  # keys that belong to no prompt may form a circle
        while name and name not in prompt:
            prompt[name] = None
            name = self._before.get(name, "")
        return [*reversed(prompt)]

    def close(self) -> None:
        """Put everything in order."""
        # In a forked child, and if the garbage collector ends the store, others may have the lock.
        if os.getpid() == self._pid and self._lock.acquire(blocking=False):
            self.catch_up()
            self._lock.release()

    def _learn(self, names: list[str]) -> int:
        """Learn that each value continues the one before it, at once or after some others.

        Where that contradicts what was known, the latest counts. Returns how many of the first were
        known in this order.
        """
        if self._last[-len(names) :] == names:
            return len(names)
        known = [*map(self._before.get, names)]
        old, has_gaps = len(names) - known.count(None), False
        if None in known[:old] or known[1:old] != names[: max(old - 1, 0)]:
            old = max(i for i, before in enumerate(known, 1) if before is not None)
            rest = iter(self.prompt_to(names[old - 1]))
            has_gaps = all(name in rest for name in names[:old])
            if not has_gaps:
                old = 0
                if not {*names}.isdisjoint(self.prompt_to(known[0] or "")):
                    self._before[names[0]] = ""
        if old < len(names):
            self._before.setdefault(names[0], "")
            first = max(old, 1)
            self._before.update(zip(names[first:], names[first - 1 :], strict=False))
        is_whole = self._before[names[0]] == "" and not has_gaps
        self._last = names if is_whole else self.prompt_to(names[-1])
        if len(self._before) > MAX_NAMES:
            self._forget()
        return old

    def _forget(self) -> None:
        """Forget what is not in the pool, unless it is new, and then what was learned first."""
        names, num_new = [*self._before], MAX_NAMES // 4
        there = self._store.pool.contains_each(self._store.keyspace.keys(names)).tolist()
        there[-num_new:] = [True] * num_new
        kept = [*compress(names, there)][-MAX_NAMES // 2 :]
        self._before = {name: self._before[name] for name in kept}

    def _order(self, prompt: list[str]) -> None:
        try:
            self._store.order_prompt(prompt)
        except (InvalidArgument, OSError) as error:  # the pool was closed, or is held
            log.warning("the values of a prompt could not be put in order: %s", error)


def _prompts_in(batch: list) -> list[list]:
    """The parts of a batch that are taken for prompts."""
    if len(batch) <= MAX_PROMPT:
        return [batch] if len(batch) > 1 else []
    return [batch[i : i + MAX_PROMPT] for i in range(0, len(batch), MAX_PROMPT)]
