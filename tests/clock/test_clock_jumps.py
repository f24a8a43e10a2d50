"""Durations are measured by the monotonic clock: the wall clock may jump by an hour, or a day."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .shifted import JUMPS_S, ShiftedClock

ROOT = Path(__file__).parent.parent.parent
WALL_CLOCK = re.compile(
    r"time\.time\(|time\.time_ns\(|datetime\.(now|utcnow)|system_clock|CLOCK_REALTIME|gettimeofday"
    r"|pthread_(cond|mutex)_timed|sem_timedwait|\btime\((nullptr|NULL|0)\)|asctime\(|localtime\("
)
# What they say the time for.
MAY_USE_IT = {
    "csrc/store/robust_mutex.cc": "under ThreadSanitizer only",
    "mooncake_kernels/kv/calibrate.py": "the date of a calibration",
    "python/mooncake_serving/router/decisions.py": "when a decision was made",
    "python/mooncake_serving/router/hot_copies.py": "when a copy was begun",
    "python/mooncake_serving/engine/chat.py": "the date in a prompt",
    "python/mooncake_serving/serve/answers.py": "when an answer was begun",
    "python/mooncake_serving/serve/app.py": "when a model was loaded",
    "python/mooncake_serving/compat/mooncake/store/replicas.py": "when a task was begun",
    "python/mooncake_serving/store/events/messages.py": "when a batch of events was sent",
    "python/mooncake_serving/store/events/publisher.py": "the first number of a publisher's events",
}

PROGRAM = """
import socket, struct, sys, threading, time
import mooncake_kernels as mk
from mooncake_kernels.metadata.values import Values
from mooncake_serving.store.directory import EmbeddedDirectory, Member

shift = open(sys.argv[1], "r+b", buffering=0)
jumps, is_over = [int(one) for one in sys.argv[2].split(",")], threading.Event()

def jump():
    while not is_over.wait(0.01):
        for seconds in jumps:
            shift.seek(0)
            shift.write(struct.pack("<q", seconds))
            is_over.wait(0.02)

began = time.time()
thread = threading.Thread(target=jump)
thread.start()
seen = set()
until = time.monotonic() + 60
while len(seen) < len(jumps) and time.monotonic() < until:
    seen.add(round((time.time() - began) / 600))
assert len(seen) == len(jumps), f"the clock does not jump: {seen}"

silent = socket.create_server(("127.0.0.1", 0))
with mk.TransferEngine("127.0.0.1:0", transports=["tcp"]) as engine:
    for seconds in (0.3, 0.6):
        began = time.monotonic()
        try:
            engine.open(f"127.0.0.1:{silent.getsockname()[1]}", deadline_s=seconds)
        except mk.TransferError as error:
            assert error.timed_out, error
        else:
            raise AssertionError("it has opened a peer that is silent")
        assert time.monotonic() - began >= seconds, "it gave up too early"

directory, short, long = EmbeddedDirectory(), Member("s", "h", "short"), Member("l", "h", "long")
directory.join(long, 1000.0)
directory.join(short, 0.5)
values = Values()
values.put("long", b"", 1000.0, None, False)
values.put("short", b"", 0.5, None, False)
until = time.monotonic() + 60
while directory.members() != [long] or values.get("short") is not None:
    assert long in directory.members() and values.get("long") is not None, "expired by the clock"
    assert time.monotonic() < until, "it does not expire"
    time.sleep(0.02)

pool = mk.ObjectPool.create(1 << 16)
pool.put_from((1, 1), b"x")
assert pool.pin((1, 1)).to_bytes() == b"x"
event = threading.Event()
began = time.monotonic()
assert not event.wait(0.3) and time.monotonic() - began >= 0.3
is_over.set()
thread.join()
"""


def test_only_listed_sources_use_the_wall_clock():
    """Who uses it is listed here, with the reason."""
    sources = [
        path
        for folder, kinds in (
            ("csrc", ("*.cc", "*.h", "*.cu", "*.cuh")),
            ("mooncake_kernels", ("*.py",)),
            ("python", ("*.py",)),
        )
        for kind in kinds
        for path in (ROOT / folder).rglob(kind)
    ]
    assert len(sources) > 300
    using = {str(path.relative_to(ROOT)) for path in sources if WALL_CLOCK.search(path.read_text())}
    assert using == set(MAY_USE_IT)


def test_deadlines_and_lifetimes_survive_wall_clock_jumps(tmp_path):
    clock = ShiftedClock(tmp_path)
    jumps = ",".join(map(str, JUMPS_S))
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "shift"), jumps],
        capture_output=True, text=True, env=clock.environ, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("seconds", JUMPS_S)
def test_shifted_clock_changes_only_wall_time(tmp_path, seconds):
    clock = ShiftedClock(tmp_path)
    program = "import time; print(time.time() - time.clock_gettime(time.CLOCK_TAI))"
    offsets = []
    for shift in (0, seconds):
        clock.set(shift)
        output = subprocess.check_output([sys.executable, "-c", program], env=clock.environ)
        offsets.append(float(output))
    assert abs(offsets[1] - offsets[0] - seconds) < 600
