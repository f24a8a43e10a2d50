"""User scripts, each run in a separate Python that must exit cleanly."""

import json
import subprocess
import sys
from pathlib import Path

# Python 3.12 and later warn of each fork of a process with threads, as an engine's is.
PYTHON = [sys.executable, "-W", "ignore:This process:DeprecationWarning"]

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
    """Run it after ``PRELUDE``; it must exit with 0 and print no errors."""
    run = subprocess.run(
        [*PYTHON, "-c", PRELUDE + script], capture_output=True, text=True, timeout=300
    )
    assert (run.returncode, run.stderr) == (0, "")


# To import torch takes seconds: each script has a fork of one interpreter, which ends as any does.
FORKING = """
import faulthandler, json, os, signal, sys, threading, time
import numpy as np
from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import TransferEngine
folder, scripts, statuses = sys.argv[1], json.load(sys.stdin), []
for number, script in enumerate(scripts):
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT), 2)
        faulthandler.dump_traceback_later(50)  # it hangs: where,
        signal.alarm(60)  # and no longer
        exec(script)
        break
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
else:
    json.dump(statuses, sys.stdout)
"""


def run_forks(scripts: list[str], folder: Path) -> list[tuple[int, str]]:
    """Run each script; return their exit statuses, -n for signal n, and their error output."""
    run = subprocess.run(
        [*PYTHON, "-c", FORKING, str(folder)],
        input=json.dumps(scripts),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert (run.returncode, run.stderr) == (0, "")
    complaints = [(folder / str(number)).read_text() for number in range(len(scripts))]
    return list(zip(json.loads(run.stdout), complaints, strict=True))
