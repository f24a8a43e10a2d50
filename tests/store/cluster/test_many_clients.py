"""Many client processes of one node, at once: each is served, and the node stays as it was.

``--soak`` makes it 64 processes for two minutes; ``-rP`` prints each one's share and what the node
guards.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.pool import PutResult
from mooncake_serving.store.directory import connect

from ...transfer.resources import held, settled
from ..directory.conftest import patient  # noqa: F401
from ..support import eventually
from .processes import HostProcess
from .support import UNIT, Hosts, value

NUM_SHARED = 16
SIZE = 4 * UNIT


def work(host, number: int, seconds: float) -> tuple[int, list[str], int, float]:
    """Put, read, compare and remove its own object, and read shared ones: rounds, what was not as
    it must be, how often its own object was missed, and the slowest round.
    """
    own, content = f"client-{number}", value(number, SIZE)
    shared = [value(1000 + i, SIZE) for i in range(NUM_SHARED)]
    count, problems, num_missed, slowest_s = 0, [], 0, 0.0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()

        def check(what: str, is_good: bool, found, count=count) -> None:
            if not is_good:
                found = found if not isinstance(found, bytes) else "other bytes"
                problems.append(f"{what} of client {number}, round {count}: {found}")

        try:
            result = host.cluster.put(own, content)
            check("put", result is PutResult.STORED, result)
            found = host.cluster.get(own)
            check("get", found == content or found is None, found)
            num_missed += found is None
            which = (number + count) % NUM_SHARED
            found = host.cluster.get(f"shared-{which}")
            check("get shared", found == shared[which], found)
            was_there = host.cluster.remove(own)
            check("remove", was_there, was_there)
        except (TransferError, Unavailable) as error:
            problems.append(f"client {number}, round {count}: {error!r}")
        count += 1
        slowest_s = max(slowest_s, time.monotonic() - began)
    return count, problems, num_missed, slowest_s


def open_files() -> list[str]:
    links = Path("/proc/self/fd").iterdir()
    return [os.readlink(link) for link in links if os.path.lexists(link)]


def test_all_clients_of_a_node_are_served(redis, soak):
    num_clients, seconds = (64, 120.0) if soak else (3, 1.0)
    with connect(redis.url) as servers:
        hosts = Hosts(servers)
        node = hosts.make("node", 4 * num_clients * SIZE + (NUM_SHARED + 8) * SIZE)
        for i in range(NUM_SHARED):
            assert node.cluster.put(f"shared-{i}", value(1000 + i, SIZE)) is PutResult.STORED
        HostProcess(redis.url, "first", capacity_bytes=0).close()  # starts the fork server
        before = held()
        clients = [
            HostProcess(redis.url, f"client-{i}", capacity_bytes=0) for i in range(num_clients)
        ]
        for number, client in enumerate(clients):
            client.begin(work, number, seconds)
        trend = [held()]
        for _ in range(4):
            time.sleep(seconds / 4)
            trend.append(held())
        reports = [client.end() for client in clients]
        for client in clients:
            client.close()
        eventually(lambda: node.node.num_readers() == 0)
        stats = node.store.stats()
        assert (stats.num_pins, stats.num_writing, stats.num_ready) == (0, 0, NUM_SHARED)
        del clients, client
        is_settled, after = settled(before), held()
        counts = np.array([count for count, *_ in reports])
        share = counts.sum() ** 2 / (num_clients * (counts**2).sum())
        problems = [problem for _, some, *_ in reports for problem in some]
        # What is removed and put again while the node compares its pool may be missed meanwhile.
        num_missed = sum(missed for *_, missed, _ in reports)
        sys.stdout.write(
            f"{num_clients} clients, {seconds:g} s: {counts.sum() / seconds:.0f} rounds a second; "
            f"each {counts.min()} to {counts.max()}, median {np.median(counts):.0f}, Jain's index "
            f"{share:.3f}; the slowest {max(slowest for *_, slowest in reports):.2f} s; "
            f"{num_missed} missed; {len(problems)} problems\nbefore {before}\n"
        )
        sys.stdout.write("".join(f"then {one}\n" for one in trend) + f"after {after}\n")
        assert problems == [] and counts.min() > 0 and num_missed <= 1 + counts.sum() // 10_000
        assert is_settled, open_files()
        hosts.close()
