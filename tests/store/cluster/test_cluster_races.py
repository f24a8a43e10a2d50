"""Many threads on several hosts with pools too small: a read is correct, or finds nothing."""

import contextlib
import random
import sys
import time
from functools import partial

import numpy as np
import pytest

from mooncake_kernels.errors import Unavailable

from ...threads import in_threads
from ..support import WAIT_S, content, eventually
from .support import UNIT

NUM_KEYS = 60


def sized(key: int) -> np.ndarray:
    return content((key, 7), 1 + 173 * key)


def check(key: int, found: bytes | None) -> int:
    assert found is None or found == sized(key).tobytes()
    return found is not None


def work(host, seed: int, until: float, counts: list[int]) -> None:
    draw = random.Random(seed)
    cluster = host.cluster
    late = until + WAIT_S  # on a machine that has stood still: by then somebody has found something
    while time.monotonic() < until or (not counts[0] and time.monotonic() < late):
        key = draw.randrange(NUM_KEYS)
        keys = [draw.randrange(NUM_KEYS) for _ in range(8)]
        action = draw.choice(["put", "put_each", "get", "get_into_each", "view", "fetch", "remove"])
        if action == "put":
            cluster.put(key, sized(key))
        elif action == "put_each":
            cluster.put_each(keys, [sized(k) for k in keys])
        elif action == "get":
            counts[0] += check(key, cluster.get(key))
        elif action == "get_into_each":
            buffers = [np.zeros(1 + 173 * NUM_KEYS, np.uint8) for _ in keys]
            sizes = cluster.get_into_each(keys, buffers)
            for k, size, buffer in zip(keys, sizes.tolist(), buffers, strict=True):
                assert size in (-1, 1 + 173 * k)
                counts[0] += check(k, bytes(buffer[:size]) if size >= 0 else None)
        elif action == "remove" and draw.random() < 0.2:
            cluster.remove(key)
        elif host.store is not None and action == "view":
            with contextlib.suppress(Unavailable):  # no room: others read all that is here
                if (pinned := cluster.view(key)) is not None:
                    with pinned:
                        counts[0] += check(key, bytes(pinned.view))
        elif host.store is not None and action == "fetch":
            cluster.fetch(keys)


def unfinished(host) -> tuple[int, int, int]:
    stats = host.store.stats()
    return stats.num_pins, stats.num_writing, stats.num_doomed


@pytest.mark.parametrize("transports", [["tcp"], ["shm", "tcp"]])
def test_races_between_threads_of_several_hosts(hosts, transports, soak):
    made = hosts.several(3, 24 * UNIT, transports=transports)
    made.append(hosts.make("none", 0, transports=transports))
    seed = random.randrange(1 << 30)
    until = time.monotonic() + (120 if soak else 1)
    sys.stdout.write(f"seed {seed}\n")
    counts = [0]
    seeds = range(seed, seed + 2 * len(made))
    in_threads(
        *(partial(work, host, i, until, counts) for i, host in zip(seeds, made * 2, strict=True))
    )
    assert counts[0] > 0
    for host in made[:3]:
        eventually(lambda h=host: h.node.num_readers() == 0)
        # The last reader's answer comes before its pins are gone.
        eventually(lambda h=host: unfinished(h) == (0, 0, 0), unfinished(host))
    # No claim is left: all that is not there can be put.
    for key in range(NUM_KEYS):
        eventually(lambda k=key: made[0].cluster.put(k, sized(k)).name in ("STORED", "EXISTS"))
        # A key whose object was evicted is withdrawn after a reader has missed it.
        eventually(lambda k=key: check(k, made[3].cluster.get(k)) or not made[3].cluster.exists(k))
