"""Many client processes of one engine, at once: each is served, and the server stays as it was.

``--soak`` makes it 64 processes for a minute; ``-rP`` prints each one's share and what the server
holds.
"""

import multiprocessing
import sys
import time
from multiprocessing import forkserver
from multiprocessing.connection import Connection

import numpy as np
import pytest

from mooncake_kernels.pool import ObjectPool, object_keys
from mooncake_kernels.transfer import TransferEngine

from .resources import held, settled
from .support import START_S

SIZE = 1 << 16
DEADLINE_S = 60.0


def work(pipe: Connection, transport: str, name: str, address: int, number: int) -> None:
    """Write, read and compare its own range and its own object until told to end; report."""
    with TransferEngine(transports=[transport]) as engine, engine.open(name) as peer:
        mine, got = np.full(SIZE, number % 251, np.uint8), np.zeros(SIZE, np.uint8)
        mine[:8] = np.array([number], np.uint64).view(np.uint8)
        start, key = address + number * SIZE, object_keys([number], "clients")
        for memory in (mine, got):
            engine.register(memory)
        place, into = [[(mine.ctypes.data, SIZE)]], [[(got.ctypes.data, SIZE)]]
        pipe.send(None)
        pipe.recv()
        count, num_wrong, slowest_s = 0, 0, 0.0
        while not pipe.poll():
            began = time.monotonic()
            got[:] = 0
            if count % 4 == 3:
                engine.remove_objects(peer, key)
                engine.write_objects(peer, key, place)
                num_bytes = int(engine.read_objects_into(peer, key, into)[0])
                num_wrong += num_bytes != SIZE
            else:
                engine.write(peer, [(place[0][0][0], start, SIZE)], deadline_s=DEADLINE_S).wait()
                engine.read(peer, [(into[0][0][0], start, SIZE)], deadline_s=DEADLINE_S).wait()
            num_wrong += not np.array_equal(mine, got)
            count += 1
            slowest_s = max(slowest_s, time.monotonic() - began)
        pipe.send((count, num_wrong, slowest_s))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_all_forked_clients_of_an_engine_are_served(transport, soak):
    num_clients, seconds = (64, 60.0) if soak else (4, 0.2)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    forkserver.ensure_running()
    with TransferEngine(transports=[transport]) as server:
        memory = np.zeros(num_clients * SIZE, np.uint8)
        region = server.register(memory)
        pool = ObjectPool.create(2 * num_clients * SIZE, num_objects=2 * num_clients)
        server.serve(pool, may_write=True)
        pipes, clients = [], []
        before = held()
        for number in range(num_clients):
            pipe, theirs = context.Pipe()
            arguments = (theirs, transport, server.name, region.address, number)
            clients.append(context.Process(target=work, args=arguments, daemon=True))
            clients[-1].start()
            theirs.close()
            pipes.append(pipe)
        for pipe in pipes:
            assert pipe.poll(START_S), "a client did not start"
            pipe.recv()
        for pipe in pipes:
            pipe.send(None)
        trend = [held()]
        for _ in range(4):
            time.sleep(seconds / 4)
            trend.append(held())
        for pipe in pipes:
            pipe.send(None)
        reports = []
        for number, pipe in enumerate(pipes):
            assert pipe.poll(2 * DEADLINE_S), f"client {number} hangs"
            reports.append(pipe.recv())  # EOFError: it has failed
        for client, pipe in zip(clients, pipes, strict=True):
            client.join()
            client.close()
            pipe.close()
        assert settled(before)
        after = held()
        counts = np.array([count for count, *_ in reports])
        share = counts.sum() ** 2 / (num_clients * (counts**2).sum())
        slowest_s = max(slowest for *_, slowest in reports)
        sys.stdout.write(
            f"{transport}: {num_clients} clients, {seconds:g} s: {counts.sum() / seconds:.0f} "
            f"rounds a second; each {counts.min()} to {counts.max()}, median "
            f"{np.median(counts):.0f}, Jain's index {share:.3f}; the slowest round "
            f"{slowest_s:.2f} s\nbefore {before}\n"
        )
        sys.stdout.write("".join(f"then {one}\n" for one in trend) + f"after {after}\n")
        assert sum(num_wrong for _, num_wrong, _ in reports) == 0
        assert counts.min() > 0, "one was not served at all"
        stats = pool.stats()
        assert (stats.num_pins, stats.num_writing) == (0, 0)
        assert after.num_descriptors <= before.num_descriptors
    pool.close()
