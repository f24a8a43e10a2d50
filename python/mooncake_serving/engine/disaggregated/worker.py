"""The common part of prefill and decode workers: a process with a model, a cache and an engine."""

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument

from ..engine import Engine
from ..kv_cache import PagedKVCache
from ..loader import load_model
from .life import timed
from .messages import (
    Command,
    Failed,
    Handover,
    Loading,
    Ready,
    Report,
    Sender,
    Started,
    WorkerOptions,
)
from .staging import StagingPool


class Worker:
    """Serve one pipe until it closes.

    Args:
        pipe: commands come in, reports go out.
        options: what to load.
        access: what peers may do with the staging pool.
    """

    def __init__(self, pipe: Connection, options: WorkerOptions, access: mk.transfer.Access):
        torch.set_num_threads(options.threads)
        self.pipe, self.options = pipe, options
        # Batch invariant, so that a request's tokens do not depend on its neighbours.
        self.model, _ = load_model(
            options.model,
            device=options.device,
            progress=self._progress,
            batch_invariant=True,
        )
        self.cache = PagedKVCache(
            self.model.config,
            options.num_blocks,
            block_size=options.block_size,
            axes=options.axes,
            dtype=self.model.dtype,
            device=options.device,
        )
        self.engine = Engine(
            self.model,
            self.cache,
            max_batch_tokens=max(512, options.max_requests),  # a token of each
            chunk_tokens=options.chunk_tokens,
            max_requests=options.max_requests,
        )
        self.view = self.cache.view()
        self.staging = StagingPool(self.view, options.num_staging_blocks)
        self.transfer = mk.TransferEngine(transports=options.transports, secret=options.secret)
        with timed(self.report, "registered", self.staging.memory.nbytes):
            self.transfer.register(self.staging.memory, access=access)

    def report(self, report: Report) -> None:
        """Send a report to the launcher."""
        self.pipe.send(report)

    def timed(self, name: str, num_bytes: int) -> AbstractContextManager[None]:
        """Report a step of a block's life that takes as long as the ``with`` block."""
        return timed(self.report, name, num_bytes)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Count a prompt's blocks; raise if the staging pool can never hold them."""
        num_blocks = self.cache.num_blocks_for(num_tokens)
        if num_blocks > self.staging.num_blocks:
            raise InvalidArgument(
                f"prompt_tokens must fit the staging pool of {self.staging.num_blocks} blocks, "
                f"got {num_tokens} tokens, which take {num_blocks}"
            )
        return num_blocks

    def handle(self, command: Any) -> None:
        """Carry out one command."""
        raise NotImplementedError

    def work(self) -> bool:
        """Do work that needs no command; return whether there was any."""
        return False

    def run(self) -> None:
        """Serve until the launcher closes its end of the pipe."""
        self.report(Ready(self.transfer.name))
        busy = False
        while True:
            # When idle, a worker checks for notifications this often.
            while self.pipe.poll(0 if busy else 0.002):
                self.attempt(self.handle, self.pipe.recv())
            busy = self.work()

    def attempt(self, action: Callable[[Any], None], command: Command | Handover) -> None:
        """Do what a command asks for; report its request as failed if that is not possible."""
        try:
            action(command)
        except Exception as error:  # noqa: BLE001 - of one request: the worker serves the others
            request_id = None if isinstance(command, Sender) else command.request_id
            self.report(Failed(request_id, reason(error)))

    def _progress(self, done: int, total: int, name: str) -> None:
        self.report(Loading(done, total))


def reason(error: Exception) -> str:
    """Return why a request failed; the type is given only where the text may say nothing."""
    is_worded = isinstance(error, ValueError | RuntimeError | OSError)
    return str(error) if is_worded else f"{type(error).__name__}: {error}"


class Runnable(Protocol):
    """What a worker process runs."""

    transfer: mk.TransferEngine

    def run(self) -> None:
        """Serve until the launcher closes its end of the pipe."""


def run_worker(make: Callable[[Connection, Any], Runnable], pipe: Connection, options: Any) -> None:
    """Run a worker process: make the worker and run it; report the reason of a failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C: it closes the pipe
    worker = None
    try:
        pipe.send(Started())
        worker = make(pipe, options)
        worker.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the launcher is done, or dead: exit, too
    except Exception as error:  # noqa: BLE001 - the launcher should report it, whatever it is
        with suppress(OSError):  # the launcher may be gone
            pipe.send(Failed(None, f"{type(error).__name__}: {error}"))
    finally:
        if worker is not None:
            worker.transfer.close()
