"""User scripts, each in a fork of one interpreter, since it takes seconds to import torch.

A fork ends as any interpreter does, and must exit cleanly.
"""

import atexit
import functools
import json
import subprocess
import sys
import tempfile

# Python 3.12 and later warn of each fork of a process with threads, as an engine's is.
PYTHON = [sys.executable, "-W", "ignore:This process:DeprecationWarning"]
LIMIT_S = 120  # of a script; nothing takes as long

PRELUDE = """
from mooncake_kernels import config
one_lane = config.override(transfer_lanes=1)  # see the fixture of that name
one_lane.__enter__()
memory = np.ones(1 << 20, np.uint8)
a, b = TransferEngine(transports=["tcp"]), TransferEngine()
near, far = a.register(memory), b.register(np.zeros(1 << 20, np.uint8))
peer = a.open(b.name)
row = (near.address, far.address, 1 << 20)
def keep_busy(count): return [a.write(peer, [row]) for _ in range(count)][-1]
"""

FORKING = f"""
import faulthandler, json, os, signal, sys, threading, time
import numpy as np
from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import TransferEngine
answers = os.fdopen(os.dup(1), "w")
while line := sys.stdin.readline():
    script, errors = json.loads(line)
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        faulthandler.register(signal.SIGALRM, chain=True)  # it hangs: where, and no longer
        signal.alarm({LIMIT_S})
        exec(script)
        break
    answers.write(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) + "\\n")
    answers.flush()
"""


@functools.cache
def _interpreter() -> subprocess.Popen:
    """The one that forks."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([*PYTHON, "-c", FORKING], stdin=pipe, stdout=pipe, text=True)
    atexit.register(process.kill)
    return process


def run_fork(script: str) -> tuple[int, str]:
    """Run a script; return its exit status, -n for signal n, and its error output."""
    process = _interpreter()
    with tempfile.NamedTemporaryFile("r") as errors:
        process.stdin.write(json.dumps([script, errors.name]) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline()), errors.read()


def run_script(script: str) -> None:
    """Run it after ``PRELUDE``; it must exit with 0 and print no errors."""
    assert run_fork(PRELUDE + script) == (0, "")
