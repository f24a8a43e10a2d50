"""Statistics of a tier."""

import logging
from dataclasses import dataclass

from mooncake_kernels.pool import Key

log = logging.getLogger("mooncake_serving.store.ssd")


@dataclass(frozen=True)
class SsdStats:
    """Counts of one moment; those of events are since the tier was opened.

    Attributes:
        capacity_bytes: of the buckets.
        num_buckets: in total.
        num_free_buckets: that hold nothing.
        num_buckets_begun: since the file was made: divided by ``num_buckets`` it is how often each
            place was written.
        num_objects: that can be read.
        live_bytes: of these objects, without headers and padding.
        user_bytes: of the objects that were put.
        moved_bytes: of the objects that were moved when their bucket was freed.
        written_bytes: everything written to the disk, with headers, padding and footers.
        num_hits: reads of objects that were there.
        num_misses: reads of objects that were not.
        num_moved: objects that were moved.
        num_dropped: objects that were dropped with their bucket.
        num_damaged: objects that the disk could not read, or whose checksum did not match.
        num_write_errors: writes and syncs that failed.
        is_writable: whether puts are attempted; False for some time after an error.
        error: of the last write or sync, empty if it succeeded.
    """

    capacity_bytes: int
    num_buckets: int
    num_free_buckets: int
    num_buckets_begun: int
    num_objects: int
    live_bytes: int
    user_bytes: int
    moved_bytes: int
    written_bytes: int
    num_hits: int
    num_misses: int
    num_moved: int
    num_dropped: int
    num_damaged: int
    num_write_errors: int
    is_writable: bool
    error: str

    @property
    def write_amplification(self) -> float:
        """Bytes written to the disk for each byte put; 0.0 before the first."""
        return self.written_bytes / self.user_bytes if self.user_bytes else 0.0


@dataclass
class Counters:
    """Event counts, as in ``SsdStats``. Counts of reads may lose one in a race of threads."""

    user_bytes: int = 0
    moved_bytes: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_moved: int = 0
    num_dropped: int = 0
    num_damaged: int = 0

    def damaged(self, key: Key) -> None:
        """Count an object that is not what was put, and report it."""
        self.num_damaged += 1
        log.warning("object %#x, %#x is damaged: dropped", *key, extra={"key": key})
