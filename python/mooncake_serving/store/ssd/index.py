"""Where each object is: shared by readers and writers of a tier, under one short lock."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake_kernels.pool import Key

from .layout import PAGE, Record


@dataclass(eq=False, slots=True)
class Bucket:
    """A part of the file that is written from start to end, and then reused as a whole.

    Attributes:
        index: number of the bucket.
        offset: in the file.
        sequence: of its content, one more for each bucket that is begun; 0: it is free.
        epoch: of its content, a random number that distinguishes it from all earlier contents.
        run: of what is written now; a record that follows another and is of an earlier run was
            given up, by an error or a crash.
        records: what it holds, in order.
        end: where the next record goes: the end of the bucket if none may, for its head is damaged.
        is_sealed: whether it is known to have a footer.
        may_have_footer: whether it may have one, as after a write that failed: it is removed before
            something is appended, which it would hide.
        has_gaps: whether some of its pages could not be read: it is not written to until it is
            reused, and gets no footer, so that the next start checks them again.
        num_readers: reads of it that are in flight.
    """

    index: int
    offset: int
    sequence: int = 0
    epoch: int = 0
    run: int = 0
    records: list[Record] = field(default_factory=list)
    end: int = 0
    is_sealed: bool = False
    may_have_footer: bool = False
    has_gaps: bool = False
    num_readers: int = 0

    def clear(self) -> None:
        """Forget the content."""
        self.sequence, self.epoch, self.run = 0, 0, 0
        self.records, self.end = [], self.offset + PAGE
        self.is_sealed, self.may_have_footer, self.has_gaps = False, False, False


@dataclass(eq=False, slots=True)
class Entry:
    """An object on the disk.

    Attributes:
        bucket: the bucket it is in.
        record: its record there.
        is_stored: whether it was written.
        is_used: whether it was read since.
    """

    bucket: Bucket
    record: Record
    is_stored: bool = False
    is_used: bool = False


class Index:
    """Entries by key. Thread-safe; the lock is held for lookups, never for reads of the disk."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._live_bytes = 0
        self._dropped: set[Key] = set()
        self._watches: list[dict[Key, bool]] = []  # changed keys: was an object there before?
        self._lock = threading.Lock()
        self._unread = threading.Condition(self._lock)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    @property
    def live_bytes(self) -> int:
        """Size of all objects, as users count it."""
        return self._live_bytes

    def find(self, key: Key) -> Entry | None:
        return self._entries.get(key)

    def keys(self) -> list[Key]:
        with self._lock:
            return list(self._entries)

    def keys_by_use(self) -> list[Key]:
        """What was read since it was written, then the rest; of each the last written first."""
        with self._lock:
            entries = list(self._entries.items())[::-1]  # they were added as they were written
        return [key for key, entry in entries if entry.is_used] + [
            key for key, entry in entries if not entry.is_used
        ]

    def pin_each(self, keys: Sequence[Key], *, is_use: bool = True) -> list[Entry | None]:
        """Find objects, and pin their bytes until they are unpinned."""
        with self._lock:
            entries = [self._entries.get(key) for key in keys]
            for entry in entries:
                if entry is not None:
                    entry.is_used |= is_use
                    entry.bucket.num_readers += 1
        return entries

    def unpin_each(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            for entry in entries:
                entry.bucket.num_readers -= 1
            self._unread.notify_all()

    def wait_unread(self, bucket: Bucket, timeout_s: float | None) -> bool:
        """Wait until a bucket has no readers; none of its objects may still be in the index."""
        with self._lock:
            return self._unread.wait_for(lambda: bucket.num_readers == 0, timeout_s)

    def add(self, key: Key, entry: Entry) -> None:
        """Add an object; it replaces an older entry of the same bytes."""
        with self._lock:
            self._forget(key)
            self._dropped.discard(key)
            self._note(key, was_there=False)  # no effect if one was forgotten just now
            self._entries[key] = entry
            self._live_bytes += entry.record.num_bytes

    def remove(self, key: Key) -> bool:
        """Remove an object, as a record says; return whether it was there."""
        with self._lock:
            self._dropped.discard(key)
            return self._forget(key)

    def drop(self, key: Key, entry: Entry) -> bool:
        """Remove this entry of an object, whose record stays; return whether it was there."""
        with self._lock:
            if self._entries.get(key) is not entry:
                return False
            self._dropped.add(key)
            return self._forget(key)

    def was_dropped(self, key: Key) -> bool:
        """Whether the latest record of this key is of an object that was dropped."""
        return key in self._dropped

    def remove_bucket(self, bucket: Bucket) -> int:
        """Remove all objects of a bucket; return how many there were."""
        num_removed = 0
        with self._lock:
            for record in bucket.records:
                entry = self._entries.get(record.key)
                if entry is not None and entry.bucket is bucket:
                    num_removed += self._forget(record.key)
        return num_removed

    def clear(self) -> None:
        with self._lock:
            for key in self._entries if self._watches else ():
                self._note(key, was_there=True)
            self._entries.clear()
            self._dropped.clear()
            self._live_bytes = 0

    def watch(self) -> dict[Key, bool]:
        """Begin to collect changed keys, for ``take_changes``: first all that are there."""
        with self._lock:
            changed = dict.fromkeys(self._entries, False)
            self._watches.append(changed)
        return changed

    def take_changes(self, changed: dict[Key, bool]) -> tuple[list[Key], list[Key]]:
        """Return what was collected since the last call: the keys of objects that went and came."""
        with self._lock:
            removed = [key for key, was in changed.items() if was and key not in self._entries]
            stored = [key for key, was in changed.items() if not was and key in self._entries]
            changed.clear()
        return removed, stored

    def unwatch(self, changed: dict[Key, bool]) -> None:
        """End what ``watch`` began."""
        with self._lock:
            self._watches = [other for other in self._watches if other is not changed]

    def _note(self, key: Key, *, was_there: bool) -> None:
        for changed in self._watches:
            changed.setdefault(key, was_there)

    def _forget(self, key: Key) -> bool:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._note(key, was_there=True)
            self._live_bytes -= entry.record.num_bytes
        return entry is not None
