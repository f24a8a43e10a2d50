"""One run of a guest: its instructions, its output, its end."""

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from . import initrd, machine, wire

HERE = Path(__file__).parent
TIMED_OUT, DIED = 124, 125
MAX_BOOTS = 3  # an emulated kernel on a busy machine was seen to panic while it boots
PANIC_S = 2.0  # to tell and to end itself, which it does not always


def run(options: argparse.Namespace, kernel: Path, extra_path: list[Path]) -> int:
    """Run the command in a guest and return its exit status.

    A guest whose kernel panics before it reaches the command is started again.

    Args:
        options: those of in_guest.
        kernel: the folder of the kernel to boot.
        extra_path: folders for Python to look for modules in, last.
    """
    if options.rw:
        options.rw.mkdir(parents=True, exist_ok=True)
    boots_left = MAX_BOOTS
    while True:
        boots_left -= 1
        with tempfile.TemporaryDirectory(prefix="in_guest.") as name, forwarders() as outputs:
            control = Path(name)
            status = run_guest(options, kernel, extra_path, control, outputs)
            if not boots_left or (control / "ready").exists() or not panic(control):
                return report(options, control, status)
            if options.verbose:
                sys.stderr.write(f"{panic(control)}in_guest: it is started again\n")


def run_guest(
    options: argparse.Namespace,
    kernel: Path,
    extra_path: list[Path],
    control: Path,
    outputs: dict[str, int],
) -> int:
    """Run a guest to its end: 0, ``TIMED_OUT`` or ``DIED``."""
    write_control(options, kernel, extra_path, control)
    initrd.write(kernel, HERE / "init", control / "initrd")
    words = machine.command_line(options, kernel, control, outputs)
    with open(control / "qemu.log", "wb") as log:
        qemu = start(words, log, list(outputs.values()))
    for descriptor in outputs.values():  # qemu has its own: a pipe ends when qemu does
        os.close(descriptor)
    return wait(qemu, control, options.timeout)


def write_control(
    options: argparse.Namespace, kernel: Path, extra_path: list[Path], control: Path
) -> None:
    """Write the folder that tells the guest what to do."""
    config = {"KERNEL": str(kernel), "RW": str(options.rw.resolve()) if options.rw else ""}
    files = {
        "config": "".join(f"{name}={shlex.quote(value)}\n" for name, value in config.items()),
        "session": (HERE / "session").read_text(),
        "command": command(options.command, extra_path),
        **wire.batches(options.nics, options.wire),
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
    """Yield the descriptors that the guest's outputs go to; at the end, wait for what they hold."""
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
    """Copy until the pipe ends. A reader that is gone (``| head``) must not block the guest."""
    while data := os.read(source, 1 << 16):
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(target, data) :]
    os.close(source)


def start(words: list[str], log, descriptors: list[int]) -> subprocess.Popen:
    """Start qemu so that it ends with us, even if we are killed. Only we receive ctrl-C."""
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *words],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=descriptors,
        start_new_session=True,
    )


def wait(qemu: subprocess.Popen, control: Path, timeout: int) -> int:
    """Wait for qemu's end; return ``TIMED_OUT`` or ``DIED`` if it had to be ended, or failed."""
    until, late = time.monotonic() + timeout, TIMED_OUT
    try:
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return DIED if qemu.wait(min(left, 0.5)) else 0
            if late != DIED and panic(control):
                until, late = time.monotonic() + PANIC_S, DIED
        return late
    finally:
        qemu.kill()
        qemu.wait()


def read(control: Path, name: str) -> str:
    """Return the contents of a file of the control folder, nothing if it is not there."""
    path = control / name
    return path.read_text(errors="replace") if path.exists() else ""


def panic(control: Path) -> str:
    """Return the guest's console output from its kernel's panic on, nothing if there is none."""
    _, found, rest = read(control, "console").partition("Kernel panic")
    return found + rest


def report(options: argparse.Namespace, control: Path, status: int) -> int:
    """Return the command's exit status, or say how the guest ended without one."""
    if options.verbose:
        sys.stderr.write(f"{read(control, 'dmesg')}in_guest: ready after {read(control, 'ready')}")
    if said := read(control, "status"):
        return int(said)
    how = f"had no result after {options.timeout} s" if status == TIMED_OUT else "died"
    tail = "".join(read(control, "console").splitlines(True)[-200:])
    log = read(control, "qemu.log")
    sys.stderr.write(f"in_guest: the guest {how}; its console ends:\n{tail}{log}\n")
    return status or DIED
