"""LRU evicts the values of a prompt from tail to head: after batches, parts of them, single calls.

The API does not say what a prompt is. What comes in one batch is taken for one, its head first, as
engines name their blocks: each value continues the one before it.

A value must not be evicted before what continues it, so it must not be used less recently. After
calls have used some, the times of last use on the way from each of them up to its first value are
exchanged, so that the first is the newest (``Store.order_prompt``). If each value was newer than
what continues it, none on the way gets older by this than it was before those calls: so what
branches off stays in order as well. Where a batch shows something new, all that continues it is put
in order.
"""

import enum
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.store import Store
from mooncake_serving.store.keyspace import Keyspace

from .prompts import Link, Prompts

log = logging.getLogger(__package__)

MAX_NAMES = 1 << 16  # that are known, of some 300 bytes each
MAX_PROMPT = 1 << 14  # values of one batch that are taken for one
MAX_NOTES = 1024
DELAY_S = 0.05


class Use(enum.Enum):
    """What a batch has done to the times of last use of its values."""

    NONE = enum.auto()
    SOME = enum.auto()
    TAIL_FIRST = enum.auto()  # of all that are there: the first is now the newest


class Note(NamedTuple):
    """A call that has used values, or shown their order."""

    names: Sequence[str]
    use: Use


class PromptOrder:
    """Keeps the values of prompts in order, in the pool of a store. Thread-safe.

    Calls are noted, which takes a microsecond at most, and dealt with before this store evicts
    anything, by a thread soon after, and in the end. Until then another process that evicts finds
    the order in which they were used.

    Args:
        store: of the pool.
        keyspace: of the values' names.
    """

    def __init__(self, store: Store, keyspace: Keyspace):
        self._store, self._keyspace = store, keyspace
        self._prompts = Prompts(MAX_PROMPT)
        self._notes: deque[Note] = deque()
        self._lock = threading.Lock()
        self._work, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        store.before_eviction.append(self.restore)

    def note(self, names: Sequence[str], use: Use) -> None:
        """Note a batch, whose names are valid."""
        if len(names) > 1:
            for first in range(0, len(names), MAX_PROMPT):
                self._add(Note([*names[first : first + MAX_PROMPT]], use))
        elif len(names) and use is not Use.NONE:
            self.note_one(names[0])

    def note_one(self, name: str) -> None:
        """Note a use of a value by itself."""
        if self._notes or len(self._prompts):
            self._add(Note((name,), Use.SOME))

    def restore(self) -> None:
        """Put in order what was used since the last time.

        Raises:
            TimeoutError: a stopped process holds the pool.
        """
        with self._lock:
            in_order: set[Link] = set()
            for link in reversed(self._disordered()):
                if link not in in_order:
                    way = [link, *link.ancestors()]
                    in_order.update(way)
                    names = [one.name for one in reversed(way)]
                    self._store.age_tail_first(self._keyspace.keys(names))
            if len(self._prompts) > MAX_NAMES:
                self._prune()

    def close(self) -> None:
        """Put everything in order, and end. Idempotent."""
        if os.getpid() != self._pid or self._closing.is_set():
            return  # the thread does not exist in a forked child
        self._closing.set()
        self._work.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._restore_quietly()

    def _disordered(self) -> list[Link]:
        """Learn from what was noted, and return the ends of what that may have put out of order."""
        ends: dict[Link, None] = {}
        while self._notes:
            names, use = self._notes.popleft()
            if len(names) == 1:
                link = self._prompts.find(names[0])
                if link is not None and link.parent is not None:
                    ends[link] = None
                continue
            learned = self._prompts.learn(names)
            if learned is None:
                continue
            if learned.changed is not None:
                ends.update(dict.fromkeys(learned.changed.leaves()))
            is_right = use is Use.TAIL_FIRST and learned.first.parent is None
            if use is not Use.NONE and (learned.has_gaps or not is_right):
                ends[learned.last] = None
        return [link for link in ends if self._prompts.find(link.name) is link]

    def _prune(self) -> None:
        """Forget what is not in the pool any more, and then what was learned first."""
        names = self._prompts.names()
        there = self._store.pool.contains_each(self._keyspace.keys(names)).tolist()
        self._prompts.forget(
            name for name, is_there in zip(names, there, strict=True) if not is_there
        )
        self._prompts.forget(self._prompts.names()[: -MAX_NAMES // 2])

    def _add(self, note: Note) -> None:
        self._notes.append(note)
        if len(self._notes) > MAX_NOTES:
            self._restore_quietly()
        elif not self._work.is_set():
            self._work.set()
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="mk-prompt-order", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._work.wait()
            self._closing.wait(DELAY_S)
            self._work.clear()
            self._restore_quietly()

    def _restore_quietly(self) -> None:
        try:
            self.restore()
        except (InvalidArgument, OSError) as error:  # the pool was closed, or is held
            log.warning("the values of prompts could not be put in order: %s", error)
