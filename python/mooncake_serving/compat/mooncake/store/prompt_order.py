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
from itertools import compress

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.store import Store
from mooncake_serving.store.keyspace import Keyspace

from .prompts import Prompts, RecentPrompts

log = logging.getLogger(__package__)

MAX_NAMES = 1 << 15  # that are known, of some 300 bytes each, in each of two ways
MAX_PROMPT = 1 << 14  # values of one batch that are taken for one
MAX_NOTES = 1024
DELAY_S = 0.05


class Use(enum.Enum):
    """What a batch has done to the times of last use of its values."""

    ABSENT = enum.auto()  # nothing: none of them is there
    NONE = enum.auto()
    SOME = enum.auto()
    TAIL_FIRST = enum.auto()  # of all that are there: the first is now the newest


Note = tuple[list[str], Use]  # a batch that has used values, or shown their order


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
        self._recent = RecentPrompts()  # and so not known to the others
        self._has_prompts = False
        self._is_learning = False  # from notes that are no longer among these
        self._notes: deque[Note | str] = deque()  # a name by itself: it was used
        self._lock = threading.Lock()
        self._work, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        store.before_eviction.append(self.restore)

    def note(self, names: list[str], use: Use) -> None:
        """Note a batch, whose names are valid, and stay as they are."""
        if 1 < len(names) <= MAX_PROMPT:
            self._has_prompts = True
            self._add((names, use))
        elif len(names) > 1:
            for first in range(0, len(names), MAX_PROMPT):
                self.note(names[first : first + MAX_PROMPT], use)
        elif names and use in (Use.SOME, Use.TAIL_FIRST):
            self.note_one(names[0])

    def note_one(self, name: str) -> None:
        """Note a use of a value by itself."""
        if self._has_prompts and (
            self._notes or self._is_learning or name in self._recent or name in self._prompts
        ):
            self._add(name)

    def restore(self) -> None:
        """Put in order what was used since the last time.

        Raises:
            TimeoutError: a stopped process holds the pool.
        """
        with self._lock:  # and when another thread has done it
            if not self._notes:
                return
            in_order: set[str] = set()
            self._is_learning = True
            try:
                ways = self._disordered()
            finally:
                self._is_learning = False
            for end in reversed(ways):
                if end not in in_order and len(way := ways[end] or self._prompts.way(end)) > 1:
                    in_order.update(way)
                    self._store.age_tail_first(self._keyspace.keys(way))
            self._recent.shorten(MAX_NAMES)
            if len(self._prompts) > MAX_NAMES:
                self._prune()

    def close(self) -> None:
        """Put everything in order, and end. Idempotent."""
        if os.getpid() != self._pid or self._closing.is_set():
            return  # the thread does not exist in a forked child
        self._closing.set()
        self._work.set()
        if self._thread is threading.current_thread():
            return  # the garbage collector ends the store, maybe in the middle of ``restore``
        if self._thread is not None:
            self._thread.join()
        self._restore_quietly()

    def _disordered(self) -> dict[str, Sequence[str]]:
        """Learn from what was noted, and return the ends of what that may have put out of order,
        each with its prompt if that is at hand.
        """
        ways: dict[str, Sequence[str]] = {}
        while self._notes:
            note = self._notes.popleft()
            if isinstance(note, str):
                if note in self._recent:
                    self._learn_recent()
                if note in self._prompts:
                    ways.setdefault(note, ())
                continue
            names, use = note
            is_used = use in (Use.SOME, Use.TAIL_FIRST)
            if (way := self._recent.way(names)) is not None:
                if is_used and not (use is Use.TAIL_FIRST and len(way) == len(names)):
                    ways[names[-1]] = way
            elif not self._prompts.knows_any(names) and self._recent.add(names):
                if use in (Use.SOME, Use.NONE):
                    ways[names[-1]] = names
            else:
                self._learn_recent()
                ways = self._learn(names, use, ways)
        return ways

    def _learn(
        self, names: list[str], use: Use, ways: dict[str, Sequence[str]]
    ) -> dict[str, Sequence[str]]:
        learned = self._prompts.learn(names)
        if learned is None or (learned.changed is not None and not learned.is_new):
            ways = dict.fromkeys(ways, ())  # they may be others now
        if learned is None:
            return ways
        if learned.changed is not None and (use is not Use.ABSENT or not learned.is_new):
            ways.update(dict.fromkeys(self._prompts.ends(learned.changed), ()))
        is_whole = learned.is_whole and not learned.has_gaps
        is_used = use in (Use.SOME, Use.TAIL_FIRST)
        if is_used and not (is_whole and use is Use.TAIL_FIRST):
            ways[names[-1]] = names if is_whole else ()
        return ways

    def _learn_recent(self) -> None:
        for names in self._recent.take():
            self._prompts.learn(names)

    def _prune(self) -> None:
        """Forget what is not in the pool any more, and then what was learned first."""
        names = self._prompts.names()
        there = self._store.pool.contains_each(self._keyspace.keys(names)).tolist()
        self._prompts.keep([*compress(names, there)][-MAX_NAMES // 2 :])

    def _add(self, note: Note | str) -> None:
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
