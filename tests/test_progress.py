"""Programs under watch: how long they take does not matter, but that they go on does."""

import subprocess
import sys

import pytest

from tests.progress import run_to_its_end

LONG = "import time\nfor i in range(20):\n time.sleep(0.2)\n print(i, flush=True)"
BUSY = "import time\nend = time.monotonic() + 4\nwhile time.monotonic() < end: pass\nprint('end')"
CHILD = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}])"
STUCK = "import time\nprint('begun', flush=True)\ntime.sleep(3600)"


@pytest.mark.parametrize("code", [LONG, BUSY, CHILD])
def test_program_making_progress_runs_to_its_end(code):
    done = run_to_its_end([sys.executable, "-c", code], idle_s=2.0)
    assert done.returncode == 0 and done.stdout.split()[-1] in ("19", "end")


def test_stalled_program_is_killed_and_reported():
    with pytest.raises(AssertionError, match="made no progress\nbegun"):
        run_to_its_end([sys.executable, "-c", STUCK], idle_s=0.5)


def test_exit_status_and_stderr_are_returned():
    done = run_to_its_end([sys.executable, "-c", "import sys; sys.exit('it is wrong')"])
    assert isinstance(done, subprocess.CompletedProcess)
    assert (done.returncode, done.stderr) == (1, "it is wrong\n")
