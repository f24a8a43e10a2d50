"""Directories whose time a test controls, keys, and what can be seen of a directory."""

import numpy as np

from mooncake_serving.store.directory import (
    Directory,
    EmbeddedDirectory,
    Holders,
    Member,
    RedisDirectory,
)

from ...metadata.support import eventually

LONG_S = 1000.0  # nothing that has so long to live dies in a test
SOON_S = 0.001


class EmbeddedWorld:
    """A directory in this process, by a clock that stands still until something is to expire."""

    def __init__(self):
        self.now = 0.0
        self.directory: Directory = EmbeddedDirectory(lambda: self.now)

    def wait(self, condition, what: str) -> None:
        """Let something expire that had only ``SOON_S`` left."""
        self.now += 2 * SOON_S
        assert condition(), what

    def close(self) -> None:
        self.directory.close()


class RedisWorld:
    """A directory in Redis, by the server's clock."""

    def __init__(self, url: str, cluster: str):
        self.directory: Directory = RedisDirectory(url, cluster)

    def wait(self, condition, what: str) -> None:
        eventually(condition, what)

    def close(self) -> None:
        self.directory.close()


def kill(world, member: Member) -> None:
    """Let a membership expire."""
    assert world.directory.renew(member, SOON_S)
    world.wait(lambda: member not in world.directory.members(), "the member does not die")


def keys(*numbers: int) -> np.ndarray:
    """Keys that contain zeros and all ones, bytes that some software treats specially."""
    first = np.array(numbers, np.uint64)
    return np.stack([first, ~first], axis=1)


def numbers(key_array: np.ndarray) -> list[int]:
    """The numbers of ``keys``."""
    np.testing.assert_array_equal(~key_array[:, 0], key_array[:, 1])
    return key_array[:, 0].tolist()


def all_of(directory: Directory, pool: str, count: int = 1000) -> set[int]:
    """What the directory lists for a pool."""
    found, cursor = set(), 0
    while True:
        cursor, page = directory.keys_of(pool, cursor, count)
        found.update(numbers(page))
        if cursor == 0:
            return found


def holders_of(directory: Directory, *numbers: int) -> list[list[str]]:
    """The names of the pools that have each object."""
    found = directory.holders(keys(*numbers))
    assert len(found) == len(numbers)
    return names_of(found)


def prefix_of(directory: Directory, *numbers: int) -> list[list[str]]:
    """The same for the first objects, up to one that no pool has."""
    return names_of(directory.match_prefix(keys(*numbers)))


def names_of(holders: Holders) -> list[list[str]]:
    assert all(isinstance(names, tuple) and list(names) == sorted(names) for names in holders)
    return list(map(list, holders))
