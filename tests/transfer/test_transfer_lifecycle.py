"""Everything ends: engines, peers and regions close at any time, and leave nothing behind."""

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import TransferEngine

from .support import WAIT_S, addressed, engine_pair, raw_server, stall, untouched

SIZE = 1 << 20
LONG = 64 << 20  # what takes a while to move


def cause_of(ticket) -> str:
    with pytest.raises(TransferError) as caught:
        ticket.wait()
    return caught.value.cause


def causes_of_the_failed(tickets) -> list[str]:
    """Of requests that were carried out one after the other, until something happened."""
    causes = []
    for ticket in tickets:
        try:
            ticket.wait()
            assert not causes, "it was carried out after one that failed"
        except TransferError as error:
            causes.append(error.cause)
    assert causes, "all were over before anything happened"
    return causes


@pytest.mark.parametrize("what", ["peer", "engine"])
def test_closing_fails_what_is_pending(what):
    with raw_server(stall) as name, TransferEngine() as engine:
        region, peer = engine.register(addressed(SIZE)), engine.open(name)
        tickets = [engine.write(peer, [(region.address, 1, SIZE)]) for _ in range(3)]
        {"peer": peer, "engine": engine}[what].close()
        assert [cause_of(ticket) for ticket in tickets] == [f"the {what} was closed"] * 3
        with pytest.raises(InvalidArgument, match=r"write: (the engine|peer must be open)"):
            engine.write(peer, [(region.address, 1, SIZE)])


def test_close_is_idempotent_and_in_any_order(pair):
    near, far = pair.regions(addressed(8), untouched(8))
    for _ in range(2):
        pair.peer.close()
        near.close()
    with far:
        pass
    for _ in range(2):
        pair.near.close()
        pair.far.close()
    far.close()
    pair.peer.close()
    for call in (lambda: pair.near.open(pair.far.name), lambda: pair.near.register(addressed(8))):
        with pytest.raises(InvalidArgument, match=r"the engine .* is closed"):
            call()


def test_every_thread_that_closes_finds_it_closed():
    for _ in range(10):
        with engine_pair("local") as pair, ThreadPoolExecutor(4) as threads:
            near, far = pair.regions(addressed(64 * SIZE), untouched(64 * SIZE))
            row = (near.address, far.address, 64 * SIZE)
            tickets = [pair.near.write(pair.peer, [row]) for _ in range(20)]

            def close(pair=pair, tickets=tickets):
                pair.near.close()
                return [ticket.done for ticket in tickets]

            time.sleep(0.005)
            closers = [threads.submit(close) for _ in range(4)]
            assert [closer.result(WAIT_S) for closer in closers] == [[True] * 20] * 4


@pytest.mark.usefixtures("one_lane")
def test_the_far_engine_closes(pair):
    near, far = pair.regions(addressed(LONG), untouched(LONG))
    row = (near.address, far.address, LONG)
    tickets = [pair.near.write(pair.peer, [row]) for _ in range(30)]
    time.sleep(0.02)
    pair.far.close()
    ends = {"connection refused", "the peer's engine was closed"}
    assert set(causes_of_the_failed(tickets)) <= {"connection closed by peer", *ends}
    assert cause_of(pair.near.write(pair.peer, [row])) in ends


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("closed", ["source", "target"])
@pytest.mark.usefixtures("one_lane")
def test_memory_is_left_alone_once_its_region_is_closed(pair, direction, closed):
    for i in range(8):
        source, target = addressed(LONG) & 0x7F, untouched(LONG) & 0x7F
        near, far = pair.regions(*((source, target) if direction == "write" else (target, source)))
        row = (near.address, far.address, LONG)
        tickets = [getattr(pair.near, direction)(pair.peer, [row]) for _ in range(30)]
        time.sleep(i * 2e-3)
        is_near = (closed == "source") == (direction == "write")
        (near if is_near else far).close()
        memory = source if closed == "source" else target
        memory[:] = 0xFF
        # The same address again: this must not revive what was queued.
        again = pair.near.register(memory) if is_near else far
        for cause in causes_of_the_failed(tickets):
            assert "region" in cause or (not is_near and cause == "connection closed by peer")
        if closed == "source":
            assert not (target == 0xFF).any(), "it was read"
        else:
            assert (target == 0xFF).all(), "it was written"
        for region in (near, far, again):
            region.close()


def test_a_closed_region_is_not_found_any_more(pair):
    near, far = pair.regions(addressed(SIZE), untouched(SIZE))
    row = (near.address, far.address, SIZE)
    far.close()
    assert "is not inside a registered region" in cause_of(pair.near.write(pair.peer, [row]))
    near.close()
    with pytest.raises(InvalidArgument, match=r"local range .* is not inside a registered region"):
        pair.near.write(pair.peer, [row])


def test_registered_memory_is_kept_alive(pair):
    near = pair.near.register(addressed(SIZE))
    far = pair.far.register(untouched(SIZE))
    address = far.address
    del far
    gc.collect()
    pair.near.write(pair.peer, [(near.address, address, SIZE)]).wait()
    back = pair.near.register(untouched(SIZE))
    pair.near.read(pair.peer, [(back.address, address, SIZE)]).wait()
    np.testing.assert_array_equal(back._buffer.owner, addressed(SIZE))


def test_a_restarted_engine_is_not_taken_for_the_old_one(tcp_pair):
    near, _ = tcp_pair.regions(addressed(SIZE), untouched(SIZE))
    name = tcp_pair.far.name
    tcp_pair.far.close()
    with TransferEngine(name) as restarted:
        region = restarted.register(untouched(SIZE))
        row = (near.address, region.address, SIZE)
        cause = cause_of(tcp_pair.near.write(tcp_pair.peer, [row]))
        assert cause == "the peer was restarted; open it again"
        assert (region._buffer.owner == untouched(SIZE)).all()
        tcp_pair.near.write(tcp_pair.near.open(name), [row]).wait()
        assert (region._buffer.owner == addressed(SIZE)).all()


def test_an_unclosed_engine_warns_and_is_closed():
    engine = TransferEngine()
    name = engine.name
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del engine
        gc.collect()
    assert any(f"unclosed TransferEngine {name}" in str(w.message) for w in caught)
    TransferEngine(name).close()  # the port is free again


def test_closing_while_others_open_and_submit():
    for i in range(10):
        with TransferEngine() as far, ThreadPoolExecutor(4) as threads:
            near = TransferEngine(transports=["tcp"])
            region, target = near.register(addressed(SIZE)), far.register(untouched(SIZE))
            name, size = far.name, SIZE // 4

            def use_until_closed(at, near=near, name=name, size=size):
                with contextlib.suppress(TransferError, InvalidArgument):
                    while True:
                        near.write(near.open(name), [(*at, size)]).wait()

            starts = [(region.address + k * size, target.address + k * size) for k in range(4)]
            users = [threads.submit(use_until_closed, at) for at in starts]
            time.sleep(i * 3e-3)
            near.close()
            for user in users:
                user.result(WAIT_S)


def test_a_closed_peer_is_disconnected(tcp_pair):
    before = num_descriptors_and_threads()
    peer = tcp_pair.near.open(tcp_pair.far.name)
    peer.close()  # and kept
    most_threads = before[1]
    until = time.monotonic() + WAIT_S
    while num_descriptors_and_threads()[1] > most_threads and time.monotonic() < until:
        time.sleep(0.01)
    assert num_descriptors_and_threads()[1] <= most_threads, "the session is still there"


def num_descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_nothing_is_leaked(transport):
    def life():
        with engine_pair(transport) as pair:
            near, far = pair.regions(addressed(64), untouched(64))
            pair.near.write(pair.peer, [(near.address, far.address, 64)], notify=b"x").wait()

    life()
    before = num_descriptors_and_threads()
    for _ in range(100):
        life()
    assert num_descriptors_and_threads() == before


def test_connections_that_end_are_forgotten(tcp_pair):
    before = num_descriptors_and_threads()
    for _ in range(100):
        tcp_pair.near.open(tcp_pair.far.name).close()
    until = time.monotonic() + WAIT_S
    while num_descriptors_and_threads() != before and time.monotonic() < until:
        time.sleep(0.01)
    assert num_descriptors_and_threads() == before


PRELUDE = """
import numpy as np, os, sys, threading
os.environ["MOONCAKE_KERNELS_TRANSFER_LANES"] = "1"  # see one_lane
from mooncake_kernels.transfer import TransferEngine
memory = np.ones(1 << 20, np.uint8)
a, b = TransferEngine(transports=["tcp"]), TransferEngine()
near, far = a.register(memory), b.register(np.zeros(1 << 20, np.uint8))
peer = a.open(b.name)
row = (near.address, far.address, 1 << 20)
def keep_busy(count): return [a.write(peer, [row]) for _ in range(count)][-1]
"""


def run_script(script: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PRELUDE + script], capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    "script",
    [
        "keep_busy(5000)\nb.write(b.open(b.name), [row[1:2] * 2 + row[2:]])",
        "del memory, near, far, a\nb.receive_notifications()",
        "threading.Thread(target=keep_busy(3000).wait).start()",
        "keep_busy(5000)\npid = os.fork()\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else None)",
        "keep_busy(5000)\npid = os.fork()\nnear.close(), peer.close(), a.close()\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else None)",
    ],
    ids=["pending", "dropped", "waiting_thread", "forked", "forked_and_closed"],
)
def test_a_process_that_closes_nothing_exits_cleanly(script):
    run_script(script)


@pytest.mark.parametrize("wait", ["b.receive_notifications(50)", "ticket.wait()", "a.close()"])
@pytest.mark.parametrize("closes", [True, False], ids=["closed_at_exit", "never_closed"])
def test_a_daemon_thread_may_wait_while_the_interpreter_ends(wait, closes):
    run_script(f"""
import time
class Late:  # goes after the interpreter has begun to end, and lets other threads run meanwhile
    def __del__(self): time.sleep(0.5)
late = Late()
a._finalizer.atexit = b._finalizer.atexit = {closes}
ticket = keep_busy(5000)
def wait():
    try: {wait}
    except Exception: pass
threading.Thread(target=wait, daemon=True).start()
time.sleep(0.05)
""")


FORKED = """
import signal, time
from mooncake_kernels.errors import InvalidArgument, TransferError
pid = os.fork()
if not pid:
    signal.alarm(50)
    time.sleep(50)
try:
{body}
finally:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
a.close(), b.close()
"""


def run_beside_a_forked_child(body: str) -> None:
    run_script(FORKED.format(body=textwrap.indent(textwrap.dedent(body), "    ")))


def test_a_name_is_free_once_closed_though_a_forked_child_lives():
    run_beside_a_forked_child("""
        name = b.name
        b.close()
        try:
            a.open(name, deadline_s=4)
        except TransferError as error:
            assert error.cause == "connection refused", error
        else:
            raise AssertionError("someone answered")
        b = TransferEngine(name)
        a.open(name, deadline_s=4)
    """)


@pytest.mark.parametrize("closes", ["b.close()", "peer.close()"])
def test_the_other_side_learns_of_a_close_though_a_forked_child_lives(closes):
    run_beside_a_forked_child(f"""
        def num_connections():  # a line each; 01 is ESTABLISHED
            port = "%04X" % int(b.name.rsplit(":", 1)[1])
            lines = [line.split() for line in open("/proc/self/net/tcp")][1:]
            return sum(port in line[1] + line[2] and line[3] == "01" for line in lines)
        assert num_connections() == 2
        {closes}
        until = time.monotonic() + 20
        while num_connections() and time.monotonic() < until:
            time.sleep(0.01)
        assert num_connections() == 0
    """)


def test_a_forked_child_is_told_that_it_cannot_use_the_engine():
    run_script("""
import asyncio, signal
from mooncake_kernels.errors import InvalidArgument
async def wait(ticket): await ticket
uses = {
    "wait": lambda: ticket.wait(),
    "done": lambda: ticket.done,
    "cancel": lambda: ticket.cancel(),
    "await": lambda: asyncio.run(wait(ticket)),
    "write": lambda: a.write(peer, [row]),
    "read": lambda: a.read(peer, [row]),
    "open": lambda: a.open(b.name),
    "register": lambda: a.register(bytearray(8)),
    "receive_notifications": lambda: a.receive_notifications(50),
    "stats": lambda: a.stats(),
}
ticket = keep_busy(5000)
pid = os.fork()
if not pid:
    signal.alarm(50)
    for op, use in uses.items():
        try:
            use()
        except InvalidArgument as error:
            assert str(error).startswith(f"{op}: "), error
            assert f"process that made it, {os.getppid()}, got {os.getpid()}" in str(error), error
        else:
            raise AssertionError(f"{op} did not raise")
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert not ticket.done or ticket.wait() is None, "the child has ended it"
a.write(peer, [row]).wait()
a.close(), b.close()
""")


def test_a_forked_child_does_not_take_its_copies_for_its_parent_s_engines():
    run_script("""
import signal
pid = os.fork()
if not pid:
    signal.alarm(50)
    with TransferEngine() as child:
        with child.open(b.name) as peer:
            assert peer.transport == "shm", peer.transport
            own = child.register(np.full(1 << 20, 7, np.uint8))
            child.write(peer, [(own.address, far.address, 1 << 20)]).wait()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
a.read(peer, [row]).wait()
assert (memory == 7).all(), "it was written into the child's copy"
a.close(), b.close()
""")
