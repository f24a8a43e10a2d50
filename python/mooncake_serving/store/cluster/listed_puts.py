"""Puts objects into the own pool in one round trip to the directory.

They are copied first. Then the directory lists those that nobody else has or writes, and these
become visible. So what somebody has is copied in vain: it is for few bytes, and for objects that
are probably new. Nothing is evicted in vain. The rest is left to puts under claims.
"""

from collections.abc import Sequence

import numpy as np

from mooncake_kernels.buffers import Buffer, copy_into
from mooncake_kernels.errors import Unavailable
from mooncake_kernels.pool import ObjectPut, PutResult
from mooncake_kernels.transfer import RedisPublisher

from ..store import Store
from .directory_entries import DirectoryEntries
from .object_rpc import UNSURE, NewResult
from .retention import put_arguments


def put_listed(
    store: Store,
    publisher: RedisPublisher,
    entries: DirectoryEntries,
    keys: np.ndarray,
    objects: Sequence[Sequence[Buffer]],
    options: np.ndarray,
) -> list[NewResult] | None:
    """Put n objects that the directory then lists.

    Args:
        store: whose pool, in host memory, takes them.
        publisher: of the pool.
        entries: of the pool.
        keys: ``[n, 2]``.
        objects: the parts of each, in order.
        options: ``[n]`` of ``PUT_OPTIONS``.

    Returns:
        For each ``STORED``; ``EXISTS`` here; None: it is to be put another way; ``UNSURE``:
        likewise, and it may be listed. None instead of a list: all are, since there is no room.

    Raises:
        Unavailable: the directory does not answer; objects may be listed, and are not stored.
        Whatever a put does; some may be stored.
    """
    results: list[NewResult] = [
        PutResult.EXISTS if is_here else None for is_here in store.has_keys(keys).tolist()
    ]
    puts: dict[int, ObjectPut] = {}
    try:
        for i, (first, second) in enumerate(keys.tolist()):
            if results[i] is not None:
                continue
            num_bytes = sum(part.num_bytes for part in objects[i])
            begun = store.begin_unless_full((first, second), num_bytes, **put_arguments(options[i]))
            if isinstance(begun, ObjectPut):
                puts[i] = begun
            elif begun is PutResult.FULL:
                return None
            elif begun is PutResult.EXISTS:
                results[i] = begun
        for i, put in puts.items():
            copy_into(put.buffer, objects[i])
        if puts:
            _list_and_commit(publisher, entries, keys, puts, results)
    finally:
        for put in puts.values():
            put.abort()
    return results


def _list_and_commit(
    publisher: RedisPublisher,
    entries: DirectoryEntries,
    keys: np.ndarray,
    puts: dict[int, ObjectPut],
    results: list[NewResult],
) -> None:
    asked = list(puts)
    try:
        listed = publisher.publish(keys[asked])
        if listed is None:
            entries.is_stale = True
            if publisher.is_late:  # so would be the answer to a claim
                raise Unavailable("put: the directory does not answer in time")
            for i in asked:
                results[i] = UNSURE
            return
        for i, is_listed in zip(asked, listed.tolist(), strict=True):
            if is_listed:
                puts[i].commit()
                results[i] = PutResult.STORED
    except BaseException:
        entries.is_stale = True  # what it lists may not be there
        raise
    stored = [i for i in asked if results[i] is PutResult.STORED]
    entries.note_listed(keys[stored], np.array([puts[i].id for i in stored], np.uint64))
