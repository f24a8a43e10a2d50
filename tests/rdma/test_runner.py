"""in_guest itself: exit statuses, outputs, messages, files, and what it leaves behind."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ..transfer.support import eventually
from .conftest import IN_GUEST

WORDS = ["two words", "it's", 'a "quote"', "$HOME", "new\nline", "", "ü", "*"]
SHOW = """
import json, os, pathlib, sys
sys.stderr.write("to stderr")
pathlib.Path(sys.argv[1], "made").write_text("in the guest")
pathlib.Path(sys.argv[0]).parent.joinpath("lost").write_text("not in --rw")
json.dump([sys.argv[2:], os.getcwd(), os.environ["MK_TEST_VALUE"]], sys.stdout)
sys.exit(3)
"""


def start(tmp: Path, *words: str | Path, cwd: Path | None = None) -> subprocess.Popen:
    """Start in_guest, with its temporary files in ``tmp``."""
    environment = {**os.environ, "TMPDIR": str(tmp), "MK_TEST_VALUE": "from 'here'"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [IN_GUEST, *words], cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    """Wait, and return the exit status, stdout and stderr."""
    stdout, stderr = process.communicate()
    return process.returncode, stdout, stderr


@pytest.fixture(scope="module")
def tmp(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runner")


@pytest.fixture(scope="module")
def ends(guest_files, tmp) -> dict[str, tuple[int, str, str]]:
    """How guests end, by name. They run two at once, which must not matter to them."""
    lines = {
        "absent": ["--", "no-such-program"],
        "killed": ["--", "sh", "-c", "kill -9 $$"],
        "slow": ["--timeout", "8", "--", "sleep", "1000"],
        "panic": ["--", "sh", "-c", "echo c >/proc/sysrq-trigger"],
        # Its kernel finds no first process, and does not restart.
        "boot": ["-v", "--qemu", "-append 'console=ttyS0 panic=0 rdinit=/none'", "--", "true"],
        "large": ["--nics", "0", "--", "seq", "200000"],
    }
    with ThreadPoolExecutor(2) as pool:
        runs = pool.map(lambda words: finish(start(tmp, *words)), lines.values())
        return dict(zip(lines, runs, strict=True))


def test_command_runs_with_the_hosts_environment(guest_files, tmp_path, tmp):
    program, folder = tmp_path / "show.py", tmp_path / "can be, written"
    program.write_text(SHOW)
    folder.mkdir()
    words = ["--rw", folder, "--", sys.executable, program, folder, *WORDS]
    status, stdout, stderr = finish(start(tmp, *words, cwd=tmp_path))
    assert (status, stderr) == (3, "to stderr")
    assert eval(stdout) == [WORDS, str(tmp_path), "from 'here'"]
    assert (folder / "made").read_text() == "in the guest"
    assert sorted(os.listdir(tmp_path)) == ["can be, written", "show.py"]


def test_missing_command_exits_with_127(ends):
    assert ends["absent"][0] == 127 and "no-such-program" in ends["absent"][2]


def test_killed_command_exits_with_137(ends):
    assert ends["killed"] == (137, "", "")


def test_slow_command_times_out_with_124(ends):
    assert ends["slow"][0] == 124 and "had no result after 8 s" in ends["slow"][2]


def test_guest_panic_exits_with_125(ends):
    status, _, stderr = ends["panic"]
    assert status == 125
    assert "the guest died; its console ends" in stderr and "Kernel panic" in stderr


def test_guest_panic_during_boot_is_retried(ends):
    status, _, stderr = ends["boot"]
    assert status == 125
    assert stderr.count("end Kernel panic") == 3 and stderr.count("it is started again") == 2


def test_large_output_arrives_complete(ends):
    assert ends["large"] == (0, "".join(f"{i}\n" for i in range(1, 200001)), "")


def running(tmp: Path) -> list[Path]:
    """Processes that have a file of ``tmp`` on their command line: qemu."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(tmp).encode() in line.read_bytes():
                found.append(line)
        except OSError:  # it ended
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_the_guest_and_cleans_up(guest_files, tmp_path, number):
    process = start(tmp_path, "--", "sleep", "1000")
    eventually(lambda: running(tmp_path))
    assert os.listdir(tmp_path)
    process.send_signal(number)
    assert finish(process)[0] == 128 + number
    # Had it just begun to start qemu, the kernel ends that: a moment after this process.
    assert eventually(lambda: not running(tmp_path)) and not os.listdir(tmp_path)


def test_no_processes_or_files_are_left_behind(ends, tmp):
    assert not running(tmp) and not os.listdir(tmp)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command"),
        (["true"], "unrecognized arguments: true"),
        (["--nics", "-1", "--", "true"], "--nics: must be at least 0, got -1"),
        (["--nics", "many", "--", "true"], "--nics: invalid"),
        (["--numa", "--smp", "1", "--", "true"], "--numa needs --smp 2"),
    ],
)
def test_invalid_command_line_is_rejected(words, message):
    done = subprocess.run([IN_GUEST, *words], text=True, capture_output=True)
    assert done.returncode == 2 and message in done.stderr


def test_missing_programs_are_named(tmp_path):
    (tmp_path / "python3").symlink_to(sys.executable)
    (tmp_path / "env").symlink_to("/usr/bin/env")
    done = subprocess.run(
        [sys.executable, IN_GUEST, "--", "true"],
        env={"PATH": str(tmp_path)},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 125
    assert "no qemu-system-x86_64, busybox" in done.stderr
    assert "apt-get install --no-install-recommends qemu-system-x86 busybox-static" in done.stderr
