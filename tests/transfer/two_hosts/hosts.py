"""Two hosts: this process, and a forked one with its own network; a cable joins them.

This process must have a network namespace to itself, and be root in it: test_two_hosts.py sees to
that. The cable is a veth pair, called ``wire`` at both ends.
"""

import contextlib
import ctypes
import mmap
import multiprocessing
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from mooncake_kernels.transfer import Peer, Region, TransferEngine

from ..support import UNTOUCHED, WAIT_S, addressed

NEAR, FAR = "10.78.0.1", "10.78.0.2"
SIZE = 4 << 20
CLONE_NEWNET = 0x40000000


def shell(command: str) -> None:
    subprocess.run(command.split(), check=True)


@dataclass
class Hosts:
    """The far host as the near one sees it.

    Attributes:
        pid: of the far host's only process.
        name: of its engine.
        address: of the memory that it offers.
        memory: the same memory, past the network: the two processes share its pages.
    """

    pid: int
    name: str
    address: int
    memory: np.ndarray

    def near(self, command: str) -> None:
        """Run a command of ip, tc or ss on this host."""
        shell(command)

    def far(self, command: str) -> None:
        """Run one on the other."""
        shell(f"nsenter --target {self.pid} --net {command}")

    def both(self, command: str) -> None:
        self.near(command)
        self.far(command)


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    pages = mmap.mmap(-1, SIZE)  # shared with the fork
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=be_far, args=(ours, theirs, pages), daemon=True)
    process.start()
    theirs.close()
    try:
        told(ours)
        shell(f"ip link add wire type veth peer name wire netns {process.pid}")
        hosts = Hosts(process.pid, "", 0, np.frombuffer(pages, np.uint8))
        for host, address in ((hosts.near, NEAR), (hosts.far, FAR)):
            host("ip link set lo up")
            host(f"ip addr add {address}/24 dev wire")
            host("ip link set wire up")
        ours.send("there is a network")
        hosts.name, hosts.address = told(ours)
        yield hosts
        ours.close()
        process.join(WAIT_S)
        assert process.exitcode == 0, "the far engine does not close"
    finally:
        process.kill()
        process.join(WAIT_S)
        subprocess.run(["ip", "link", "del", "wire"], capture_output=True)  # if it is left


def told(pipe: Connection):
    assert pipe.poll(WAIT_S), "the far host does not answer"
    return pipe.recv()


def be_far(theirs: Connection, pipe: Connection, pages: mmap.mmap) -> None:
    """The main loop of the far host: offer memory until the near one hangs up."""
    theirs.close()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    pipe.send("alone")
    pipe.recv()
    with TransferEngine(f"{FAR}:0") as engine:
        region = engine.register(np.frombuffer(pages, np.uint8))
        pipe.send((engine.name, region.address))
        with contextlib.suppress(EOFError):
            pipe.recv()


@dataclass
class Transfers:
    """Transfers from the near host of all the far one offers, either way, with known bytes."""

    hosts: Hosts
    engine: TransferEngine
    region: Region
    peer: Peer

    def sides(self, direction: str) -> tuple[np.ndarray, np.ndarray]:
        """Source and target."""
        here, there = self.region._buffer.owner, self.hosts.memory
        return (here, there) if direction == "write" else (there, here)

    def start(self, direction: str, key: int = 0, **options):
        """Fill the source from ``key``, clear the target, and begin."""
        source, target = self.sides(direction)
        source[:] = content(key)
        target[:] = UNTOUCHED
        row = (self.region.address, self.hosts.address, SIZE)
        return getattr(self.engine, direction)(self.peer, [row], **options)

    def check(self, direction: str, key: int = 0) -> None:
        for side in self.sides(direction):
            np.testing.assert_array_equal(side, content(key))

    def check_partly(self, direction: str, key: int, num_bytes_done: int) -> None:
        """After a failed transfer: each byte is old or new, and enough of them are new."""
        source, target = self.sides(direction)
        target = target.copy()  # the far engine may still be writing
        arrived = target == content(key)
        assert (arrived | (target == UNTOUCHED)).all()
        assert num_bytes_done <= arrived.sum()
        np.testing.assert_array_equal(source, content(key))

    def begun(self, direction: str) -> bool:
        _, target = self.sides(direction)
        return bool((target[:4096] != UNTOUCHED).any())


def content(key: int) -> np.ndarray:
    return addressed(SIZE) ^ np.uint8(key)


@contextlib.contextmanager
def transfers(hosts: Hosts) -> Iterator[Transfers]:
    with TransferEngine(f"{NEAR}:0") as engine:
        region = engine.register(np.zeros(SIZE, np.uint8))
        peer = engine.open(hosts.name, deadline_s=WAIT_S)
        assert peer.transport == "tcp"
        yield Transfers(hosts, engine, region, peer)
