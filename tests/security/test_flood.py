"""Strangers who come without end: who has the right user or secret gets in each time."""

import contextlib

import pytest

from mooncake_kernels.transfer import TransferEngine

from ..transfer.secret import OURS
from ..transfer.support import WAIT_S, addressed, eventually, untouched
from .other_user import NOBODY, heard_from, needs_root, start

NUM_OPENS = 20
SIZE = 4096

# Keeps as many connections as it can, and makes a new one for each that is ended.
FLOOD = """
connect = within if arguments["within"] else over_tcp
mine = bytes.fromhex(arguments["beginning"])
ends, num_opened = [], 0
said("begun")
until = time.monotonic() + arguments["seconds"]
while time.monotonic() < until:
    while len(ends) < arguments["count"]:
        try:
            end = connect(arguments["name"])
            end.sendall(mine)
        except OSError:
            break
        end.setblocking(False)
        ends.append(end)
        num_opened += 1
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN | select.POLLHUP)
    for number, _ in poll.poll(5):
        [end] = [end for end in ends if end.fileno() == number]
        with contextlib.suppress(BlockingIOError):
            with contextlib.suppress(ConnectionResetError):
                if end.recv(1 << 10):
                    continue
            ends.remove(end)
            end.close()
said(num_opened)
"""


@contextlib.contextmanager
def flood(name: str, *, within: bool, beginning: bytes, count: int, user: int = NOBODY):
    """More connections than there are places, from a process of another user."""
    process = start(
        user,
        FLOOD,
        name=name,
        within=within,
        beginning=beginning.hex(),
        count=count,
        seconds=600,
    )
    try:
        assert heard_from(process) == "begun"
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until_full(engine: TransferEngine) -> None:
    """Until some have been turned away."""
    eventually(engine.rejections)


@needs_root
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("secret", [None, OURS])
@pytest.mark.parametrize("within", [False, True])
def test_open_succeeds_during_connection_flood(transport, secret, within):
    with TransferEngine(secret=secret) as far:
        region = far.register(untouched(SIZE))
        with flood(far.name, within=within, beginning=b"", count=300):
            wait_until_full(far)
            for _ in range(NUM_OPENS):
                with TransferEngine(transports=[transport], secret=secret) as near:
                    mine = near.register(addressed(SIZE))
                    with near.open(far.name, deadline_s=WAIT_S) as peer:
                        near.write(peer, [(mine.address, region.address, SIZE)]).wait()
        assert (region._buffer.owner == addressed(SIZE)).all()


@needs_root
def test_open_succeeds_during_flood_of_partial_hellos():
    """Of a ClientHello, or a Hello, the first byte: they are waited for longer."""
    with TransferEngine(secret=OURS) as far:
        for beginning in (b"\x16", b"M"):
            with flood(far.name, within=False, beginning=beginning, count=140):
                wait_until_full(far)
                for _ in range(NUM_OPENS):
                    with TransferEngine(transports=["tcp"], secret=OURS) as near:
                        near.open(far.name, deadline_s=WAIT_S).close()
