"""fork(): the child has copies of its parent's handles, and disturbs nothing."""

import textwrap

import pytest

from .scripts import run_script

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


def run_with_a_forked_child(body: str) -> None:
    run_script(FORKED.format(body=textwrap.indent(textwrap.dedent(body), "    ")))


def test_closed_name_is_free_despite_a_forked_child():
    run_with_a_forked_child("""
        name = b.name
        b.close()
        try:
            a.open(name, deadline_s=20)
        except TransferError as error:
            assert error.cause == "connection refused", error
        else:
            raise AssertionError("someone answered")
        b = TransferEngine(name)
        a.open(name, deadline_s=20)
    """)


@pytest.mark.parametrize("closes", ["b.close()", "peer.close()"])
def test_peer_sees_close_despite_a_forked_child(closes):
    run_with_a_forked_child(f"""
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


@pytest.mark.parametrize("op", ["write", "read"])
def test_killed_peer_is_detected_despite_its_forked_child(op):
    """Its connection still stands, and so does its memory that is mapped here."""
    run_script(f"""
import signal
from mooncake_kernels import shared_memory
from mooncake_kernels.errors import TransferError
(answer, told), (order, go) = os.pipe(), os.pipe()
pid = os.fork()
if not pid:
    signal.alarm(50)
    with TransferEngine() as engine:
        region = engine.register(shared_memory(4096))
        os.write(told, f"{{engine.name}} {{region.address}}".encode())
        os.read(order, 1)  # the child shall have a copy of the connection
        child = os.fork()
        signal.alarm(50)
        if child:
            os.write(told, str(child).encode())
        signal.pause()
name, address = os.read(answer, 100).decode().split()
with TransferEngine(transports=["shm"]) as here:
    row = (here.register(memory[:4096]).address, int(address), 4096)
    with here.open(name) as other:
        here.{op}(other, [row]).wait()
        os.write(go, b"!")
        child = int(os.read(answer, 100))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        try:
            here.{op}(other, [row], deadline_s=0.5).wait()
        except TransferError as error:
            assert error.timed_out and error.num_bytes_done == 0, error
        else:
            raise AssertionError("it is dead")
        finally:
            os.kill(child, signal.SIGKILL)
a.close(), b.close()
""")


def test_region_copied_by_killed_peer_closes_despite_forked_child():
    run_script("""
import signal
from mooncake_kernels import shared_memory
answer, told = os.pipe()
with TransferEngine() as here:
    region = here.register(shared_memory(64 << 20))
    pid = os.fork()
    if not pid:
        signal.alarm(50)
        with TransferEngine(transports=["shm"]) as engine:
            own = engine.register(np.zeros(64 << 20, np.uint8))
            other = engine.open(here.name)
            tickets = [engine.write(other, [(own.address, region.address, 64 << 20)])
                       for _ in range(1000)]
            child = os.fork()
            signal.alarm(50)
            if child:
                os.write(told, str(child).encode())
            signal.pause()
    child = int(os.read(answer, 100))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        region.close()
    finally:
        os.kill(child, signal.SIGKILL)
a.close(), b.close()
""")


def test_forked_child_cannot_use_the_engine():
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
    "refuse_notifications": lambda: a.refuse_notifications(),
    "stats": lambda: a.stats(),
    "rejections": lambda: a.rejections(),
    "regions": lambda: a.regions(peer),
    "explain_path": lambda: a.explain_path(near, peer, far.address),
}
ticket = keep_busy(1000)  # all within the deadline of the last, also on a slow machine
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


def test_forked_child_does_not_mistake_its_copies_for_parents_engines():
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


def test_forked_children_of_busy_parent_create_their_own_engines():
    """Whatever its other threads were at when it forked."""
    run_script("""
import signal
engines = [TransferEngine(transports=["local"]) for _ in range(2)]
source, target = engines[0].register(memory[:4096]), engines[1].register(np.zeros(4096, np.uint8))
is_over = threading.Event()
def keep_opening():
    while not is_over.is_set():
        with engines[0].open(engines[1].name) as near_peer:
            engines[0].write(near_peer, [(source.address, target.address, 4096)]).wait()
threads = [threading.Thread(target=keep_opening) for _ in range(3)]
for thread in threads: thread.start()
for _ in range(50):
    pid = os.fork()
    if not pid:
        signal.alarm(50)
        TransferEngine()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
is_over.set()
for thread in threads: thread.join()
""")
