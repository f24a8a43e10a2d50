"""The engine over the guest's NICs: two, then four; one dies under load, and so does a peer."""

import dataclasses
import os
import signal
import time

import numpy as np
import pytest

import mooncake_kernels as mk
from mooncake_kernels.topology import Topology

from ...waiting import eventually
from .links import noise, shell
from .test_failures import restore_neighbours

MIB = 1 << 20


def topology_of(*nics: int) -> Topology:
    system = Topology.discover().system
    names = [f"rxe{i}" for i in nics]
    return Topology(
        dataclasses.replace(system, nics=tuple(nic for nic in system.nics if nic.name in names))
    )


def engine(*nics: int) -> mk.TransferEngine:
    return mk.TransferEngine(transports=["rdma"], topology=topology_of(*nics))


def shuffled(num_bytes: int, block: int) -> list[tuple[int, int, int]]:
    """Every byte once, no neighbours."""
    places = np.random.default_rng(7).permutation(num_bytes // block)
    return [(block * i, block * int(p), block) for i, p in enumerate(places)]


def arranged(source: np.ndarray, block: int) -> np.ndarray:
    """What a target holds when these are written to it."""
    target = np.empty_like(source)
    for a, b, size in shuffled(len(source), block):
        target[b : b + size] = source[a : a + size]
    return target


class Moves:
    """Two engines with their memory."""

    def __init__(self, near: mk.TransferEngine, far: mk.TransferEngine, num_bytes: int):
        self.near, self.far = near, far
        self.here, self.there = noise(num_bytes), np.zeros(num_bytes, np.uint8)
        self.here_at = near.register(self.here).address
        self.there_at = far.register(self.there).address
        self.peer = near.open(far.name)

    def rows(self, block: int) -> list[tuple[int, int, int]]:
        rows = shuffled(len(self.here), block)
        return [(self.here_at + a, self.there_at + b, size) for a, b, size in rows]


@pytest.mark.parametrize(("near", "far"), [((0,), (1,)), ((0, 1), (2, 3)), ((0, 1, 2, 3), (3, 2))])
@pytest.mark.parametrize("block", [4096, 1000])
def test_bitwise(near, far, block):
    with engine(*near) as first, engine(*far) as second:
        moves = Moves(first, second, 2000 * block)
        assert moves.peer.transport == "rdma"
        ticket = first.write(moves.peer, moves.rows(block), notify=b"written")
        assert second.receive_notifications(60.0) == [(first.name, b"written")]
        expected = arranged(moves.here, block)
        np.testing.assert_array_equal(moves.there, expected)
        ticket.wait()
        source = moves.here.copy()
        moves.here[:] = 0
        first.read(moves.peer, moves.rows(block)).wait()
        np.testing.assert_array_equal(moves.here, source)


@pytest.mark.parametrize(("nics", "dying"), [(2, 1), (4, 2), (4, 0)])
def test_transfers_survive_a_nic_dying_under_load(nics, dying):
    """Each request is delivered, before, while and after one NIC, theirs or ours, is away."""
    half = nics // 2
    with engine(*range(half)) as first, engine(*range(half, nics)) as second:
        moves = Moves(first, second, 32 * MIB)
        expected = arranged(moves.here, 65536)

        def run() -> None:
            moves.there[:] = 0
            first.write(moves.peer, moves.rows(65536), deadline_s=120).wait()
            np.testing.assert_array_equal(moves.there, expected)

        run()
        ticket = first.write(moves.peer, moves.rows(65536), deadline_s=120)
        shell(f"ip link set eth{dying} down")
        try:
            if nics == 4:
                ticket.wait()
                np.testing.assert_array_equal(moves.there, expected)
                run()
            else:
                with pytest.raises(mk.TransferError):
                    ticket.wait()
        finally:
            shell(f"ip link set eth{dying} up")
            restore_neighbours(dying)
        name = f"rxe{dying}"
        eventually(
            lambda: next(d for d in mk.rdma.devices() if d.name == name).ports[0].state == "ACTIVE"
        )
        run()


def test_killed_peer_fails_the_transfer_forked():
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        far = engine(2, 3)
        memory = np.zeros(64 * MIB, np.uint8)
        region = far.register(memory)
        os.write(told, f"{far.name} {region.address}".encode())
        time.sleep(600)
    name, address = os.read(ready, 100).decode().split()
    with engine(0, 1) as near:
        source = noise(64 * MIB)
        region = near.register(source)
        with near.open(name) as peer:
            row = (region.address, int(address), 64 * MIB)
            near.write(peer, [(row[0], row[1], 4096)]).wait()
            ticket = near.write(peer, [row])
            time.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            with pytest.raises(mk.TransferError, match=r"refused|closed by peer|reset") as error:
                ticket.wait()
            assert error.value.num_bytes_done < 64 * MIB
