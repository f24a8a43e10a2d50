"""Processes that one starts, and that end with it."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TextIO

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.http_server import in_url, listen


def end_with_stdin() -> None:
    """Have this process told to end, as by SIGTERM, when its standard input is closed.

    Whoever has started it with a pipe there ends it so, even by being killed.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin", daemon=True).start()


def default_threads(num_processes: int) -> int:
    """Return how many threads each of several processes has that share the processors."""
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


class Port:
    """A TCP port that is this process's, for one server process after the other.

    None that is not running has it: its clients are refused at once.

    Args:
        op: the call, which errors name.
        host: to listen on.
        port: 0: a free one.

    Raises:
        InvalidArgument: there is no such host, or the port is taken.
    """

    def __init__(self, op: str, host: str, port: int):
        try:
            probe = listen(op, host, port)  # others of this user may share what is bound below
        except OSError as error:
            raise InvalidArgument(
                f"{op}: port must be free, got {port} ({error.strerror})"
            ) from None
        self._family, self._address = probe.family, probe.getsockname()
        probe.close()
        try:  # so that a later ``listen`` of others fails, even while no server has it
            self._reserved = self._bind(reuse_address=False)
        except OSError:  # connections of an earlier server linger
            self._reserved = self._bind(reuse_address=True)
        self.url = f"http://{in_url(self._address[0])}:{self._address[1]}"

    def bound(self) -> socket.socket:
        """Return a socket that is bound to it, and does not listen yet."""
        return self._bind(reuse_address=True)

    def _bind(self, *, reuse_address: bool) -> socket.socket:
        bound = socket.socket(self._family)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse_address)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(self._address)
        except BaseException:
            bound.close()
            raise
        return bound

    def close(self) -> None:
        """Give it up. Idempotent."""
        self._reserved.close()


class Child:
    """A running server process of this package, whose output has its name before each line.

    Args:
        name: for people.
        arguments: of ``python -m mooncake_serving serve``.
        port: where it listens.
        environment: of the process.
        output: where its lines go.

    Attributes:
        url: where it listens.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        port: Port,
        environment: Mapping[str, str],
        output: TextIO,
    ):
        self.name, self.url = name, port.url
        command = [sys.executable, "-m", "mooncake_serving", "serve", *arguments]
        with port.bound() as bound:
            fd = bound.fileno()
            self._process = subprocess.Popen(
                [*command, "--fd", str(fd), "--until-stdin-closes"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=[fd],
                env=environment,
                start_new_session=True,  # a terminal's Ctrl-C is for the parent, which ends it
            )
        self._output = output
        self._thread = threading.Thread(target=self._copy, name=f"of {name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Return the number of the process."""
        return self._process.pid

    def poll(self) -> str | None:
        """Return how it has ended; None: it runs."""
        status = self._process.poll()
        if status is None:
            return None
        self._thread.join()
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def terminate(self) -> None:
        """Tell it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once, and wait for that."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _copy(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        with self._process.stdout as lines:
            for line in lines:
                self._output.write(f"{self.name}: {line}")
                self._output.flush()
