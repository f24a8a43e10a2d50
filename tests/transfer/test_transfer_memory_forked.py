"""Registered memory that is truncated or protected afterwards: an error, at either end, no signal.

Each case is a forked process, so that a signal is its exit status.
"""

import pytest

from .scripts import run_fork

COMMON = """
import ctypes, mmap
from mooncake_kernels.buffers import shared_memory
from mooncake_kernels.errors import FailureKind

PAGE, SMALL, SIZE = 4096, 64 << 10, 6 << 20
libc = ctypes.CDLL(None, use_errno=True)

class Memory:
    # Its first half stays; the other is spoiled.
    def __init__(self, fill):
        self.fd = os.memfd_create("memory")
        os.ftruncate(self.fd, SIZE)
        self.bytes = np.frombuffer(mmap.mmap(self.fd, SIZE), np.uint8)
        self.bytes[:] = fill
        self.address = self.bytes.ctypes.data

    def spoil(self, how):
        if how == "truncated":
            return os.ftruncate(self.fd, SIZE // 2)
        rights = mmap.PROT_READ if how == "read-only" else 0
        at = ctypes.c_void_p(self.address + SIZE // 2)
        assert libc.mprotect(at, ctypes.c_size_t(SIZE // 2), rights) == 0

class Shared(Memory):
    # As the peer maps it.
    def __init__(self, fill):
        self.bytes = shared_memory(SIZE).numpy()
        self.bytes[:] = fill
        self.address = self.bytes.ctypes.data

def serve(kind, transport):
    # In a process of its own: a name, an address, and what spoils its memory.
    to_child, from_child = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.close(to_child[1])  # so that it ends with the other side, however that ends
        there = kind(1)
        engine = TransferEngine(transports=[transport])
        engine.register(there.bytes)
        os.write(from_child[1], f"{engine.name} {there.address}".encode())
        while how := os.read(to_child[0], 100).decode():
            there.spoil(how)
            os.write(from_child[1], b"done")
            if how == "end":
                break
        os._exit(0)
    os.close(to_child[0]), os.close(from_child[1])
    name, address = os.read(from_child[0], 1000).decode().split()

    def spoil(how):
        os.write(to_child[1], how.encode())
        os.read(from_child[0], 100)

    return name, int(address), spoil, pid

def fails(engine, direction, peer, near, far, num_bytes, **options):
    try:
        getattr(engine, direction)(peer, [(near, far, num_bytes)], **options).wait(30)
    except TransferError as error:
        assert error.kind is FailureKind.INACCESSIBLE, (error.kind, str(error))
        assert error.num_bytes_done < num_bytes and not error.delivered.any()
        return error.cause
    raise AssertionError(f"{direction} of {num_bytes} bytes succeeded")

def move(engine, direction, peer, near, far, num_bytes, **options):
    getattr(engine, direction)(peer, [(near, far, num_bytes)], **options).wait(30)

def check_spoiled(engine, peer, near, far, whose, how):
    # What is spoiled fails, whatever else it is a part of; what is not moves on as before.
    directions = ["write", "read"]
    if how == "read-only":
        directions = ["read" if whose == "local" else "write"]
    parts = [(SIZE // 2, SMALL), (SIZE // 2 - PAGE, 2 * PAGE), (SIZE // 2 - 1, 2), (1, SIZE - 1)]
    for direction in directions:
        for (begin, num_bytes), options in [
            *((part, {}) for part in parts), *((part, {"checksum": True}) for part in parts[1::2])
        ]:
            cause = fails(engine, direction, peer, near + begin, far + begin, num_bytes, **options)
            assert "memory is not accessible: " in cause, cause
            assert whose in cause or "checksum" in options, cause
            move(engine, direction, peer, near, far, SMALL, **options)
    for direction in ("write", "read"):
        move(engine, direction, peer, near, far, SIZE // 2, **options)
"""

NEAR = """
name, address, spoil, pid = serve({peer}, {transport!r})
here = Memory(5)
engine = TransferEngine(transports=[{transport!r}])
engine.register(here.bytes)
peer = engine.open(name)
assert peer.transport == {transport!r}
move(engine, "write", peer, here.address, address, SIZE)
move(engine, "read", peer, here.address, address, SIZE)
{spoil}
check_spoiled(engine, peer, here.address, address, {whose!r}, {how!r})
assert (here.bytes[: SIZE // 2] == 5).all()
{after}
engine.close()
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
"""

KEEPS_ITS_CONNECTION = """
def reconnects():
    return sum(path["num_reconnects"] for path in engine.stats()["paths"][name].values())

before, begin = reconnects(), SIZE // 2 - (512 << 10)
for _ in range(20):  # over one connection: what fails ends others that have a part of it
    fails(engine, "write", peer, here.address + begin, address + begin, 1 << 20)
# Those that ended before may still be coming back, one for each lane.
assert reconnects() - before < 8, (before, reconnects())
"""

IN_PROCESS = """
here, there = Memory(5), Memory(1)
engine, other = TransferEngine(transports=["local"]), TransferEngine()
engine.register(here.bytes), other.register(there.bytes)
with engine, other, engine.open(other.name) as peer:
    move(engine, "write", peer, here.address, there.address, SIZE)
    {side}.spoil({how!r})
    check_spoiled(engine, peer, here.address, there.address, {whose!r}, {how!r})
    assert (there.bytes[: SIZE // 2] == 5).all()
"""

ON_DISK = """
here = Memory(5)
path = "{path}"
with open(path, "wb") as made:
    made.truncate(2 * SIZE)
engine = TransferEngine(transports=["file"])
engine.register(here.bytes)
with engine, engine.open("file:" + path) as peer:
    move(engine, "write", peer, here.address, {shift}, SIZE)
    here.spoil({how!r})
    for direction in ("write", "read") if {how!r} != "read-only" else ("read",):
        for begin, num_bytes in [(SIZE // 2, SMALL), (SIZE // 2 - PAGE, 2 * PAGE), (0, SIZE)]:
            at = here.address + begin + {shift}, begin, num_bytes - 2 * {shift}
            error = fails(engine, direction, peer, *at)
            move(engine, direction, peer, here.address + {shift}, 0, SMALL)
"""


every_way = pytest.mark.parametrize("how", ["truncated", "protected", "read-only"])


def run(script: str, **named: str) -> None:
    assert run_fork(COMMON + script.format(**named)) == (0, "")


@every_way
@pytest.mark.parametrize(
    ("transport", "peer"), [("tcp", "Memory"), ("shm", "Memory"), ("shm", "Shared")]
)
def test_local_memory(transport, peer, how):
    """Of which the peer knows nothing."""
    spoil = f"here.spoil({how!r})"
    run(NEAR, transport=transport, peer=peer, how=how, spoil=spoil, whose="local", after="")


@every_way
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_peer_memory(transport, how):
    """The peer survives it, and says what it is."""
    spoil, after = f"spoil({how!r})", KEEPS_ITS_CONNECTION if transport == "tcp" else ""
    whose = "the peer's"
    run(NEAR, transport=transport, peer="Memory", how=how, spoil=spoil, whose=whose, after=after)


@every_way
@pytest.mark.parametrize(("side", "whose"), [("here", "local"), ("there", "the peer's")])
def test_memory_within_one_process(side, whose, how):
    run(IN_PROCESS, side=side, how=how, whose=whose)


@every_way
@pytest.mark.parametrize("shift", [0, 1])
def test_memory_for_a_file(shift, how, tmp_path):
    """Also what has to be copied, as it is not aligned."""
    run(ON_DISK, shift=shift, how=how, path=tmp_path / "file")


CRASH = """
import faulthandler
{before}
here, there = Memory(5), Memory(1)
engine, other = TransferEngine(transports=["local"]), TransferEngine()
engine.register(here.bytes), other.register(there.bytes)
peer = engine.open(other.name)
move(engine, "write", peer, here.address, there.address, SIZE)
{after}
here.spoil("protected")
fails(engine, "write", peer, here.address, there.address, SIZE)
{end}
"""


def test_unrelated_faults_reach_faulthandler():
    """Which was there first, or comes later: then it prints its traceback, and no more."""
    end = "ctypes.string_at(16)"
    enable = "faulthandler.enable(open(2, 'w', closefd=False))"

    def end_of(before: str, after: str, last: str) -> tuple[int, str]:
        return run_fork(COMMON + CRASH.format(before=before, after=after, end=last))

    assert end_of(enable, "", "") == (0, "")
    status, error = end_of(enable, "", end)
    assert status == -11 and error.startswith("Fatal Python error: Segmentation fault")
    assert end_of("", "", end) == (-11, "")
    status, error = end_of("", enable, "")
    assert status == 0 and error.startswith("Fatal Python error: Segmentation fault")
