"""One run of a guest: what it is told, its output, its end."""

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from . import initrd, machine, wire

HERE = Path(__file__).parent
TIMED_OUT, DIED = 124, 125


def run(options: argparse.Namespace, kernel: Path, extra_path: list[Path]) -> int:
    """Run the command in a guest and return its exit status.

    Args:
        options: those of in_guest.
        kernel: the folder of the kernel to boot.
        extra_path: folders for Python to look for modules in, last.
    """
    if options.rw:
        options.rw.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="in_guest.") as name, forwarders() as outputs:
        control = Path(name)
        write_control(options, kernel, extra_path, control)
        initrd.write(kernel, HERE / "init", control / "initrd")
        words = machine.command_line(options, kernel, control, outputs)
        with open(control / "qemu.log", "wb") as log:
            qemu = start(words, log, list(outputs.values()))
        for descriptor in outputs.values():  # qemu has its own: a pipe ends when qemu does
            os.close(descriptor)
        status = wait(qemu, options.timeout)
        return report(options, control, status)


def write_control(
    options: argparse.Namespace, kernel: Path, extra_path: list[Path], control: Path
) -> None:
    """Write the folder from which the guest learns what to do."""
    config = {"KERNEL": str(kernel), "RW": str(options.rw.resolve()) if options.rw else ""}
    files = {
        "config": "".join(f"{name}={shlex.quote(value)}\n" for name, value in config.items()),
        "session": (HERE / "session").read_text(),
        "command": command(options.command, extra_path),
        **wire.batches(options.nics),
    }
    for name, text in files.items():
        (control / name).write_text(text + "\n" if text else "", errors="surrogateescape")


def command(words: list[str], extra_path: list[Path]) -> str:
    """Return the shell script that runs the command as it would run here."""
    environment = {name: value for name, value in os.environ.items() if name.isidentifier()}
    path = [environment.get("PYTHONPATH", ""), *map(str, extra_path)]
    environment["PYTHONPATH"] = ":".join(filter(None, path))
    environment["MK_TEST_WORLD"] = "guest"
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    return "\n".join(
        [*lines, f"cd {shlex.quote(os.getcwd())} || exit", f"exec {shlex.join(words)}"]
    )


@contextlib.contextmanager
def forwarders() -> Iterator[dict[str, int]]:
    """Give the descriptors that the guest's outputs go to; at the end, wait for what they hold."""
    threads, outputs = [], {}
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        source, outputs[name] = os.pipe()
        threads.append(
            threading.Thread(target=forward, args=(source, stream.fileno()), daemon=True)
        )
        threads[-1].start()
    yield outputs
    for thread in threads:
        thread.join()


def forward(source: int, target: int) -> None:
    """Copy until the pipe ends. A reader that went away (``| head``) must not block the guest."""
    while data := os.read(source, 1 << 16):
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(target, data) :]
    os.close(source)


def start(words: list[str], log, descriptors: list[int]) -> subprocess.Popen:
    """Start qemu so that it ends with us, even if we are killed. A ctrl-C is for us alone."""
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *words],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=descriptors,
        start_new_session=True,
    )


def wait(qemu: subprocess.Popen, timeout: int) -> int:
    """Wait for qemu's end and return its status, TIMED_OUT if it had to be ended."""
    try:
        return DIED if qemu.wait(timeout) else 0
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        qemu.kill()
        qemu.wait()


def report(options: argparse.Namespace, control: Path, status: int) -> int:
    """Return the command's exit status, or say how the guest ended without one."""

    def text(name: str) -> str:
        path = control / name
        return path.read_text(errors="replace") if path.exists() else ""

    if options.verbose:
        sys.stderr.write(f"{text('dmesg')}in_guest: ready after {text('ready')}")
    if text("status"):
        return int(text("status"))
    how = f"had no result after {options.timeout} s" if status == TIMED_OUT else "died"
    lines = text("console").splitlines(True)
    panics = [i for i, line in enumerate(lines) if "Kernel panic" in line]
    begin = min(len(lines) - 40, panics[-1] if panics else len(lines))  # however long its trace is
    tail = "".join(lines[max(begin, 0) :])
    sys.stderr.write(f"in_guest: the guest {how}; its console ends:\n{tail}{text('qemu.log')}\n")
    return status or DIED
