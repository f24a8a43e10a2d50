"""Large payloads are lent to the kernel, which may send their memory later.

Between two addresses of this machine, which count as two machines; tests/transfer/two_hosts has
real ones. What a peer does not read stays lent.
"""

import contextlib
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mooncake_kernels.transfer import TransferEngine

from .files import ROOT, environment
from .handshake import Hello, begin, receive_exactly
from .lent import lends, needs_lending
from .objects import LARGE, content, place, serving
from .support import ACK, HEADER, RANGE, READ, WAIT_S, addressed, connect, eventually, untouched

ELSEWHERE = "127.0.0.2:0"
BUFFERED = 512 << 10  # fits what a socket may have unsent, but not what its peer may have unread


@pytest.fixture
def engine():
    with TransferEngine(ELSEWHERE) as engine:
        yield engine


def rest(connection) -> np.ndarray:
    """What still arrives until the connection ends."""
    data = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 20):
            data += part
    return np.frombuffer(data, np.uint8)


@needs_lending
@pytest.mark.parametrize("num_bytes", [BUFFERED, LARGE])
@pytest.mark.parametrize("ends", ["region", "engine", "fence"])
def test_reused_memory_is_not_sent(engine, ends, num_bytes):
    memory = addressed(num_bytes).copy()
    region = engine.register(memory)
    with connect(engine.name) as connection:
        hello = Hello()
        begin(connection, hello=hello)
        row = RANGE.pack(region.address, num_bytes)
        connection.sendall(HEADER.pack(READ, 1, 1, 0, num_bytes) + row)
        assert ACK.unpack(receive_exactly(connection, ACK.size)) == (0, 0, 1, num_bytes)
        eventually(lends)
        if ends == "region":
            region.close()
        elif ends == "engine":
            engine.close()
        else:  # the peer connects anew, which ends its earlier connection
            with connect(engine.name) as other:
                begin(other, hello=replace(hello, epoch=2))
        memory[:] ^= 0xFF
        data = rest(connection)
    eventually(lambda: not lends())
    assert 0 < len(data) < num_bytes
    assert (data == addressed(num_bytes)[: len(data)]).all()


@pytest.mark.parametrize("direction", ["write", "read"])
def test_bytes_arrive(engine, direction):
    source, target = addressed(LARGE), untouched(LARGE)
    near, far = (source, target) if direction == "write" else (target, source)
    with TransferEngine(transports=["tcp"]) as other:
        mine, theirs = other.register(near), engine.register(far)
        peer = other.open(engine.name)
        for _ in range(3):
            target[:] = 0
            getattr(other, direction)(peer, [(mine.address, theirs.address, LARGE)]).wait(WAIT_S)
            np.testing.assert_array_equal(target, source)


@needs_lending
@pytest.mark.parametrize("num_bytes", [BUFFERED, LARGE])
def test_objects_arrive_and_are_pinned_until_then(num_bytes):
    with serving(4 * num_bytes, far={"name": ELSEWHERE}) as here:
        data = here.put(1, num_bytes)
        with here.ask(1) as reply:
            eventually(lends)
            time.sleep(0.1)
            assert here.pool.stats().num_pins == 1
            got = untouched(num_bytes)
            assert reply.receive([place(got)], verify=True).all()
        np.testing.assert_array_equal(got, data)
        written = content(2, num_bytes)
        assert here.write({2: written}) == [1]
        assert here.stored(2) == written.tobytes()
        eventually(here.is_at_rest)


def test_without_locked_memory():
    """Then all is copied: a container may forbid it. Without io_uring, see the transport file."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "bytes_arrive"]
    result = subprocess.run(
        [sys.executable, "-m", "tests.transfer.lent", *command, Path(__file__)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed" in result.stdout
