"""Processes that compute for this one: how they start, what they are told, and how they end."""

import multiprocessing
import pickle
import queue
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import mooncake_kernels as mk

from .errors import WorkerFailed


@dataclass(frozen=True)
class Failed:
    """From a process: a request failed, or with None the process itself."""

    request_id: int | None
    reason: str


class Runnable(Protocol):
    """What runs in a process.

    Attributes:
        transfer: its transfer engine, closed when it ends.
    """

    transfer: mk.TransferEngine

    def run(self) -> None:
        """Serve the pipe until it closes."""


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Temporarily ignore SIGINT: a process that is started meanwhile ignores it for good.

    A terminal's Ctrl-C goes to all processes, and is the launcher's to handle. Python sets signals
    in its main thread only; elsewhere a process is exposed until ``_serve`` ignores them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


class Process:
    """A process, and the pipe to it.

    A thread sends the commands: a process that is busy does not read, and when reports fill the
    pipe, it waits for the launcher, which must not wait for it.

    The process of one that is dropped ends: its pipe closes.

    Args:
        name: for people.
        make: called there with its end of the pipe and the options.
        options: picklable.
    """

    def __init__(self, name: str, make: Callable[[Connection, Any], Runnable], options: Any):
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(make, theirs, options), name=name, daemon=True
        )
        with _interrupts_ignored():
            self.process.start()
        theirs.close()  # so that its death closes the pipe
        self._commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        ends = (self.pipe, self._commands)  # all that the thread refers to: not to this object
        self._sender = threading.Thread(target=_send_all, args=ends, name=f"to {name}", daemon=True)
        self._sender.start()
        self._finalizer = weakref.finalize(self, _end_sends, *ends)

    def send(self, command: object) -> None:
        """Queue a command, without waiting. To a dead process it is lost; its reports say so."""
        self._commands.put(pickle.dumps(command))

    def death(self) -> WorkerFailed:
        """Return the error that says how the process ended."""
        self.process.join(timeout=5)
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code and code < 0 else f"exited with code {code}"
        return WorkerFailed(f"the {self.name} process {how}")

    def close(self) -> None:
        """End the process: gracefully, then by force. Idempotent."""
        self._finalizer()
        self._sender.join()
        self.pipe.close()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _send_all(pipe: Connection, commands: queue.SimpleQueue[bytes | None]) -> None:
    with suppress(OSError):  # the process is dead, or the pipe is closed
        while (command := commands.get()) is not None:
            pipe.send_bytes(command)


def _end_sends(pipe: Connection, commands: queue.SimpleQueue[bytes | None]) -> None:
    commands.put(None)
    with (
        suppress(OSError),
        socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end,
    ):
        end.shutdown(socket.SHUT_RDWR)  # ends a send that is under way; closing would not


def _serve(make: Callable[[Connection, Any], Runnable], pipe: Connection, options: Any) -> None:
    """Run what is made; report the reason of a failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C: it closes the pipe
    made = None
    try:
        made = make(pipe, options)
        made.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the launcher is done, or dead: exit, too
    except Exception as error:  # noqa: BLE001 - the launcher should report it, whatever it is
        with suppress(OSError):  # the launcher may be gone
            pipe.send(Failed(None, f"{type(error).__name__}: {error}"))
    finally:
        if made is not None:
            made.transfer.close()
