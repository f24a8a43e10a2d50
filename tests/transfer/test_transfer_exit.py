"""The interpreter ends, in any way: nothing hangs, and no errors are printed."""

import itertools
import os
import random
import signal

import pytest

from .scripts import run_fork, run_script


@pytest.mark.parametrize(
    "script",
    [
        "keep_busy(5000)\nb.write(b.open(b.name), [row[1:2] * 2 + row[2:]])",
        "del memory, near, far, a\nb.receive_notifications()",
        "threading.Thread(target=keep_busy(1000).wait).start()",
        "keep_busy(5000)\npid = os.fork()\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else None)",
        "keep_busy(5000)\npid = os.fork()\nnear.close(), peer.close(), a.close()\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else None)",
    ],
    ids=["pending", "dropped", "waiting_thread", "forked", "forked_and_closed"],
)
def test_process_exits_cleanly_without_close(script):
    run_script(script)


@pytest.mark.parametrize("wait", ["b.receive_notifications(50)", "ticket.wait()", "a.close()"])
@pytest.mark.parametrize("closes", [True, False], ids=["closed_at_exit", "never_closed"])
def test_daemon_thread_waiting_at_interpreter_exit(wait, closes):
    run_script(f"""
import time
class Late:  # goes after the interpreter has begun to end, and lets other threads run meanwhile
    def __del__(self): time.sleep(0.1)
late = Late()
a._finalizer.atexit = b._finalizer.atexit = {closes}
ticket = keep_busy(5000)
def wait():
    try: {wait}
    except Exception: pass
threading.Thread(target=wait, daemon=True).start()
time.sleep(0.05)
""")


BUSY = """
memory = np.ones(8 << 20, np.uint8)
a, b = TransferEngine(transports=["{transport}"]), TransferEngine()
near, far = a.register(memory), b.register(np.zeros(8 << 20, np.uint8))
peer = a.open(b.name)
row = (near.address, far.address, 8 << 20)
def move():
    while True:
        a.write(peer, [row]).wait()
def move_until_closed():
    try: move()
    except (TransferError, InvalidArgument): pass
def later(call, *arguments):
    def wait():
        time.sleep({delay_s})
        call(*arguments)
    threading.Thread(target=wait, daemon=True).start()
"""
ENDS = {  # how a process ends in the middle of its transfers, and its exit status
    "in_flight": ("tickets = [a.write(peer, [row]) for _ in range(8)]", 0),
    "exit_in_a_thread": (
        "ticket = a.write(peer, [row])\n"
        "threading.Thread(target=lambda: (time.sleep({delay_s}), sys.exit(3))).start()",
        0,
    ),
    "exit_during_a_thread": (
        "threading.Thread(target=move_until_closed, daemon=True).start()\n"
        "time.sleep({delay_s})\nsys.exit(0)",
        0,
    ),
    "sigint": ("later(os.kill, os.getpid(), signal.SIGINT)\nmove()", -signal.SIGINT),
    "sigterm": ("later(os.kill, os.getpid(), signal.SIGTERM)\nmove()", -signal.SIGTERM),
    "sigterm_handled": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "later(os.kill, os.getpid(), signal.SIGTERM)\nmove()",
        0,
    ),
}


def test_forked_processes_exit_cleanly_mid_transfer(soak):
    """Over each transport, at random moments; those that a signal ends at most say so."""
    rng = random.Random(seed := int.from_bytes(os.urandom(4), "little"))
    cases = list(itertools.product(["local", "shm", "tcp"], ENDS)) * (20 if soak else 1)
    for transport, end in cases:
        last, expected = ENDS[end]
        script = (BUSY + last).replace("{transport}", transport)
        delay_s = rng.uniform(0, 0.05)
        status, complaint = run_fork(script.replace("{delay_s}", f"{delay_s:.6f}"))
        case = (seed, transport, end, complaint)
        assert status == expected, case
        if end == "sigint":
            assert complaint.startswith("Traceback") and complaint.count("Traceback") == 1, case
            assert complaint.rstrip().endswith("KeyboardInterrupt"), case
        else:
            assert complaint == "", case


LATE = """
class Late:  # goes after the interpreter has begun to end, and lets other threads run meanwhile
    is_ending = threading.Event()
    def __del__(self):
        self.is_ending.set()
        time.sleep(0.1)
late = Late()
engine = TransferEngine("127.0.0.1:0", transports=["tcp"])
def again_and_again(call):
    while True:
        try: call()
        except (InvalidArgument, TransferError): pass
def in_threads(call, count=4):
    for _ in range(count):
        threading.Thread(target=again_and_again, args=(call,), daemon=True).start()
"""
CALLS = {  # that end at once, most of them with an error
    "refused": "engine.open('127.0.0.1:1')",
    "closed": "(engine.close(), engine.open('127.0.0.1:1'))",
    "invalid": "engine.open('nonsense')",
    "hashes": "block_hashes(tokens, 16)",
}


@pytest.mark.parametrize("case", CALLS)
def test_daemon_threads_calling_during_interpreter_exit(case, soak):
    """Some of them want the GIL back while an error of C++ is on its way, or is handled."""
    setup = "from mooncake_kernels.hashing import block_hashes\ntokens = np.ones(4096, np.uint32)\n"
    for _ in range(40 if soak else 3):
        script = f"{setup}{LATE}in_threads(lambda: {CALLS[case]})\ntime.sleep(0.1)"
        assert run_fork(script) == (0, "")


@pytest.mark.parametrize("handled", [True, False])
def test_daemon_thread_raising_during_interpreter_exit(handled):
    """The constructor of an error is Python code, which can give the GIL away."""
    script = f"""
import mooncake_kernels.errors as errors
made = threading.Event()
class Slow(errors.TransferError):
    def __init__(self, *arguments):
        made.set()
        Late.is_ending.wait()
{LATE}
errors.TransferError = Slow
def fail():
    try: raise ValueError
    except ValueError: engine.open("127.0.0.1:1")
in_threads(fail if {handled} else lambda: engine.open("127.0.0.1:1"), 1)
assert made.wait(30)
"""
    assert run_fork(script) == (0, "")
