"""Processes of instances: how they start, what they are told, and how they end."""

import multiprocessing
import pickle
import queue
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from .errors import WorkerFailed
from .instance import Instance
from .messages import Failed, InstanceOptions, Started


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
    """The process of an instance, and the pipe to it.

    A thread sends the commands: an instance that is busy does not read, and when reports fill the
    pipe, it waits for the launcher, which must not wait for it.

    The instance of one that is dropped ends: its pipe closes.
    """

    def __init__(self, name: str, options: InstanceOptions):
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, options), name=name, daemon=True
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
    with suppress(OSError):  # the instance is dead, or the pipe is closed
        while (command := commands.get()) is not None:
            pipe.send_bytes(command)


def _end_sends(pipe: Connection, commands: queue.SimpleQueue[bytes | None]) -> None:
    commands.put(None)
    with (
        suppress(OSError),
        socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end,
    ):
        end.shutdown(socket.SHUT_RDWR)  # ends a send that is under way; closing would not


def _serve(pipe: Connection, options: InstanceOptions) -> None:
    """Run an instance; report the reason of a failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C: it closes the pipe
    instance = None
    try:
        pipe.send(Started())
        instance = Instance(pipe, options)
        instance.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the launcher is done, or dead: exit, too
    except Exception as error:  # noqa: BLE001 - the launcher should report it, whatever it is
        with suppress(OSError):  # the launcher may be gone
            pipe.send(Failed(None, f"{type(error).__name__}: {error}"))
    finally:
        if instance is not None:
            instance.transfer.close()
