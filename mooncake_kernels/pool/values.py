"""Keys, a pool's reports about itself, and the arguments of its calls."""

import enum
import grp
import operator
import os
import pwd
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .. import _host
from .._arguments import as_integer, as_integers, as_utf8
from .._host import hash_name as hash_name
from .._host import hash_names as hash_names
from .._machine_root import MachineRoot
from ..buffers import with_buffers
from ..errors import InvalidArgument, shown

Key = tuple[int, int]  # hash, scope

END = 1 << 64
MAX_ID = (1 << 32) - 2  # the kernel takes the next one for none
THIS_MACHINE = MachineRoot()


class PutResult(enum.Enum):
    """The outcome of a put. The first values are those of csrc/store/pool.h."""

    STORED = 0
    EXISTS = 1  # an object has this key; objects do not change
    BEING_WRITTEN = 2  # by a live process
    FULL = 3  # evict, and retry
    OVER_QUOTA = 4  # of a Store's namespace; a pool has none


@dataclass(frozen=True)
class Evicted:
    """What an eviction removed.

    Attributes:
        keys: ``[n, 2]`` uint64 of the objects.
        num_bytes: that became reusable; an object with readers is freed only after the last one.
    """

    keys: np.ndarray
    num_bytes: int


@dataclass(frozen=True)
class PoolObjects:
    """All objects of a pool, in no order: the input of eviction policies.

    Attributes:
        keys: ``[n, 2]`` uint64.
        num_bytes: ``[n]`` uint64.
        recency: ``[n]`` uint64, the pool's clock at each object's last use; each use advances it by
            one.
        retention: ``[n]`` uint8: 0 normal, 1 soft, 2 hard.
        uses: ``[n]`` uint16, by all processes since each was stored; storing is the first.
        position: ``[n]`` uint16, the position in its prompt that its writer gave.
        ids: ``[n]`` uint64: unique among all objects that ever existed, also under the same key.
    """

    keys: np.ndarray
    num_bytes: np.ndarray
    recency: np.ndarray
    retention: np.ndarray
    uses: np.ndarray
    position: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True)
class PoolStats:
    """A snapshot of the pool's counters.

    Attributes:
        capacity_bytes: for objects, each rounded up to the pool's alignment.
        free_bytes: in no object.
        largest_free_bytes: the largest object that fits.
        num_free_spans: how many spans the free bytes form.
        max_objects: how many there can be.
        num_ready: objects that can be read.
        num_writing: objects being written.
        num_doomed: objects that were removed but still have readers.
        doomed_bytes: bytes of those.
        num_pins: current pins; an object counts once per pin.
        num_processes: that have the pool open, including dead ones not yet noticed.
        num_repairs: how often a process died while changing the pool.
    """

    capacity_bytes: int
    free_bytes: int
    largest_free_bytes: int
    num_free_spans: int
    max_objects: int
    num_ready: int
    num_writing: int
    num_doomed: int
    doomed_bytes: int
    num_pins: int
    num_processes: int
    num_repairs: int

    @property
    def fragmentation(self) -> float:
        """1 - largest / free: from 0 (the free bytes are one span) to almost 1."""
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0


@dataclass(frozen=True)
class PoolCounts:
    """Sums since the pool was made, of all its processes, dead or alive.

    Attributes:
        num_hits: objects that were read or pinned.
        num_misses: reads of objects that were not there.
        num_stored: objects that were stored.
        num_removed: objects that were removed on request, or because they were damaged.
        num_evicted: objects that were evicted to make room.
        read_bytes: bytes that were read: of a part its own, of a pinned object all.
        stored_bytes: size of the objects that were stored.
    """

    num_hits: int = 0
    num_misses: int = 0
    num_stored: int = 0
    num_removed: int = 0
    num_evicted: int = 0
    read_bytes: int = 0
    stored_bytes: int = 0

    @property
    def num_reads(self) -> int:
        return self.num_hits + self.num_misses

    @property
    def hit_rate(self) -> float | None:
        """Hits over reads; None before the first read."""
        return self.num_hits / self.num_reads if self.num_reads else None

    def __sub__(self, earlier: "PoolCounts") -> "PoolCounts":
        names = [field.name for field in fields(PoolCounts)]
        return PoolCounts(*(getattr(self, name) - getattr(earlier, name) for name in names))


def object_key(name: str | bytes, scope: int | str = 0) -> Key:
    """Make the key of an object that has a name instead of a prefix hash.

    Args:
        name: any string; 128 bits of its XXH3 are the key.
        scope: as in ``object_keys``.

    Returns:
        ``(hash, scope)``.

    Raises:
        InvalidArgument: an argument is of another type, or out of range.
    """
    if not (type(name) is str or isinstance(name, str | bytes)):
        raise InvalidArgument(f"object_key: name must be a str or bytes, got {shown(name)}")
    try:
        low, high = _host.hash_name(name)
    except TypeError:
        raise InvalidArgument(
            f"object_key: name must be text that UTF-8 can hold, got {shown(name)}"
        ) from None
    return low, high ^ as_scope("object_key", scope)


def object_keys(hashes: Any, scope: int | str = 0) -> np.ndarray:
    """Make the keys of blocks from their prefix hashes.

    Equivalent to::

        for i in range(n):
            keys[i] = hashes[i], scope

    Args:
        hashes: ``[n]`` integers from 0 to 2**64 - 1, as ``block_hashes`` makes them.
        scope: whose blocks they are: tenant, model, layout, rank. A string is hashed by XXH3.

    Returns:
        ``[n, 2]`` uint64.

    Raises:
        InvalidArgument: an argument is not as above.
    """
    column = as_integers("object_keys", "hashes", hashes, "[n]")
    if column.ndim != 1:
        raise InvalidArgument(f"object_keys: hashes must be [n], got shape {column.shape}")
    keys = np.empty((len(column), 2), np.uint64)
    keys[:, 0] = column
    keys[:, 1] = as_scope("object_keys", scope)
    return keys


def named_keys(names: Sequence[str | bytes], scope: int | str = 0) -> np.ndarray:
    """Make the keys of objects with names: ``object_key`` of each, ``[n, 2]`` uint64.

    Raises:
        InvalidArgument: as in ``object_key``.
    """
    word = as_scope("named_keys", scope)
    try:
        if isinstance(names, str | bytes):
            raise TypeError  # a single name, not a sequence of letters
        return _host.hash_names(names, word)
    except (TypeError, UnicodeError):
        raise InvalidArgument(
            f"named_keys: names must be a sequence of str or bytes, got {shown(names)}"
        ) from None


def closed_pool(path: str) -> InvalidArgument:
    """The error of a call of a pool that was closed."""
    return InvalidArgument(f"ObjectPool: pool must be open, got the closed {shown(path)}")


class ClosedPool:
    """What an ``ObjectPool`` has in place of its native pool once it is closed: refuses all calls.

    Args:
        path: of the pool.
    """

    def __init__(self, path: str):
        self._path = path

    def __getattr__(self, name: str) -> Any:
        raise closed_pool(self._path)


def as_path(op: str, path: Any) -> str:
    """The name of a file, not empty."""
    try:
        name = os.fspath(path)
    except TypeError:
        name = None
    if not isinstance(name, str) or not name or "\0" in name:
        raise InvalidArgument(f"{op}: path must be the name of a file, got {shown(path)}")
    as_utf8(op, "path", name)
    return name


def file_system_of(path: str, root: MachineRoot = THIS_MACHINE) -> str | None:
    """Return its type, as in ``mount``; None if the kernel's table of mounts does not tell.

    Args:
        path: of the file.
        root: of the table.
    """
    try:
        device = os.stat(path).st_dev
    except OSError:
        return None
    for line in (root.text("/proc/self/mountinfo") or "").splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2:3] == [f"{os.major(device)}:{os.minor(device)}"]:
            return source.split()[0] if source else None
    return None


def as_scope(op: str, scope: Any) -> int:
    """One 64-bit word, also for a string."""
    if type(scope) is int and 0 <= scope < END:
        return scope
    if isinstance(scope, str):
        return _host.hash_name(as_utf8(op, "scope", scope))[0]
    try:
        word = operator.index(scope)
    except TypeError:
        word = -1
    if not 0 <= word < END:
        raise InvalidArgument(
            f"{op}: scope must be a str or an integer from 0 to 2**64 - 1, got {shown(scope)}"
        )
    return word


def as_key(op: str, key: Any) -> Key:
    """Two words."""
    try:
        first, second = map(operator.index, key)
    except (TypeError, ValueError):
        pass
    else:
        if 0 <= first < END and 0 <= second < END:
            return first, second
    raise InvalidArgument(
        f"{op}: key must be two integers from 0 to 2**64 - 1, got {shown(key)}"
    ) from None


def as_keys(op: str, keys: Any) -> np.ndarray:
    """``[n, 2]`` uint64, packed; such an array is not copied."""
    if type(keys) is np.ndarray and keys.dtype == np.uint64 and keys.shape[1:] == (2,):
        return np.ascontiguousarray(keys)
    if isinstance(keys, Sequence) and not len(keys):
        return np.empty((0, 2), np.uint64)
    array = as_integers(op, "keys", keys, "[n, 2]")
    if array.ndim != 2 or array.shape[1] != 2:
        raise InvalidArgument(f"{op}: keys must be [n, 2] integers, got shape {array.shape}")
    return np.ascontiguousarray(array)


def as_user(op: str, owner: Any) -> int | None:
    """The id of a user, given by it or by name."""
    return _as_id(op, "owner", owner, lambda name: pwd.getpwnam(name).pw_uid)


def as_group(op: str, group: Any) -> int | None:
    """The id of a group, given by it or by name."""
    return _as_id(op, "group", group, lambda name: grp.getgrnam(name).gr_gid)


def _as_id(op: str, name: str, value: Any, find: Callable[[str], int]) -> int | None:
    if value is None:
        return None
    if not isinstance(value, str):
        return as_integer(op, name, value, 0, MAX_ID)
    try:
        return find(value)
    except (KeyError, ValueError):
        raise InvalidArgument(
            f"{op}: {name} must be an id or a name that this machine knows, got {value!r:.80}"
        ) from None


def checksum_of(*buffers: Any) -> int:
    """Return the checksum of an object that consists of these buffers, see
    ``PinnedObject.checksum``.

    Args:
        *buffers: packed memory, the consecutive parts of the object.

    Returns:
        XXH3-64 of all the bytes; 1 where that is 0.

    Raises:
        InvalidArgument: a buffer is not as above.
    """
    return with_buffers("checksum_of", buffers, False, _host.checksum)


def as_headed(
    op: str, num_objects: int, heads: Any, addresses: Any, sizes: Any
) -> tuple[list[bytes], np.ndarray, np.ndarray]:
    """The heads of objects, and two tables ``[n, w]`` of the places of what follows them."""
    listed = list(heads)
    if len(listed) != num_objects or not set(map(type, listed)) <= {bytes}:
        raise InvalidArgument(f"{op}: heads must be bytes for each key, got {shown(heads)}")
    starts = as_integers(op, "addresses", addresses, "[n, w]")
    counts = as_integers(op, "sizes", sizes, "[n, w]")
    if starts.shape != counts.shape or starts.ndim != 2 or len(starts) != num_objects:
        raise InvalidArgument(
            f"{op}: addresses and sizes must be [n, w] for {num_objects} keys, got shapes "
            f"{starts.shape} and {counts.shape}"
        )
    return listed, starts, counts


def as_offset(offset: Any) -> int:
    return as_integer("get_into", "offset", offset, 0, END - 1)
