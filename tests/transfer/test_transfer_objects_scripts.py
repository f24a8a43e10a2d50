"""Processes that fork or exit while they ask for objects."""

import pytest

from .scripts import run_script

FORKED = """
import mooncake_kernels as mk
import signal, time
from mooncake_kernels.errors import InvalidArgument
pool = mk.ObjectPool.create(64 << 20)
data = np.arange(32 << 20, dtype=np.uint32).view(np.uint8)[: 32 << 20]
pool.put_from((1, 1), data)
b.serve(pool, may_write=True)
got = np.zeros(32 << 20, np.uint8)
place = [(got.ctypes.data, got.nbytes)]
def read():
    got[:] = 0
    with a.read_objects(peer, [(1, 1)]) as reply:
        assert reply.receive([place], verify=True).all()
    assert (got == data).all()
def fork(work):
    pid = os.fork()
    if not pid:
        signal.alarm(50)
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def test_a_forked_child_disturbs_no_one():
    run_script(
        FORKED
        + """
reply = a.read_objects(peer, [(1, 1)])
def child():
    global reply
    try:
        reply.receive([place], verify=True)
    except InvalidArgument as error:
        assert f"process that made it, {os.getppid()}" in str(error), error
    else:
        raise AssertionError("it receives")
    reply.close()
    del reply
    peer.close(), a.close(), b.close()
fork(child)
assert reply.receive([place], verify=True).all()
assert (got == data).all()
reply = a.read_objects(peer, [(1, 1)])
fork(lambda: reply.close())
assert reply.receive([place], verify=True).all()
read()
until = time.monotonic() + 20  # who has sent it lets it go a little later
while pool.stats().num_pins and time.monotonic() < until: time.sleep(0.001)
assert pool.stats().num_pins == 0
a.close(), b.close()
"""
    )


def test_forked_child_cannot_request_objects():
    run_script(
        FORKED
        + """
read()
uses = {
    "serve": lambda: b.serve(pool),
    "read_objects": lambda: a.read_objects(peer, [(1, 1)]),
    "write_objects": lambda: a.write_objects(peer, [(2, 1)], [place]),
    "remove_objects": lambda: a.remove_objects(peer, [(1, 1)]),
}
def child():
    for op, use in uses.items():
        try:
            use()
        except InvalidArgument as error:
            assert str(error).startswith(f"{op}: "), error
            assert f"process that made it, {os.getppid()}, got {os.getpid()}" in str(error), error
        else:
            raise AssertionError(f"{op} did not raise")
fork(child)
read()
a.close(), b.close()
"""
    )


@pytest.mark.parametrize("use", ["receive([[]], verify=True)", "close()"])
def test_threads_race_to_consume_one_reply(use):
    run_script(
        FORKED
        + f"""
sys.setswitchinterval(1e-6)
barrier, replies = threading.Barrier(4), []
def work():
    for _ in range(500):
        barrier.wait()
        try:
            replies[-1].{use}
        except InvalidArgument:
            pass
        barrier.wait()
threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
for thread in threads: thread.start()
for _ in range(500):
    replies = [a.read_objects(peer, [(2, 1)])]
    barrier.wait(), barrier.wait()
for thread in threads: thread.join()
a.close(), b.close()
"""
    )


@pytest.mark.parametrize("closes", ["", "a.close()", "b.close()", "del pool", "peer.close()"])
def test_interpreter_exits_while_sending(closes):
    run_script(FORKED + "reply = a.read_objects(peer, [(1, 1)])\n" + closes)


def test_lost_tls_connection_raises_no_sigpipe(node):
    """In a program that left the signal as it is, OpenSSL's write in the caller's thread."""
    files = {name: str(getattr(node, name)) for name in ("certificate", "key", "ca")}
    run_script(
        f"files = {files}"
        + """
import mooncake_kernels as mk
import signal, time
from mooncake_kernels.errors import TransferError
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
tls = mk.transfer.Tls(**files)
data, lost = np.zeros(32 << 20, np.uint8), 0
for i in range(10):
    with mk.ObjectPool.create(64 << 20) as pool, TransferEngine(tls=tls) as there:
        there.serve(pool, may_write=True)
        with TransferEngine(transports=["tcp"], tls=tls) as here:
            server = here.open(there.name)
            def leave():
                time.sleep(0.002 * (i + 1))
                there.close()
            thread = threading.Thread(target=leave)
            thread.start()
            try:
                here.write_objects(server, [(1, i)], [[(data.ctypes.data, data.nbytes)]])
            except TransferError:
                lost += 1
            thread.join()
assert lost > 0
assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
a.close()
b.close()
"""
    )
