"""Files as memory: their registrations, and transfers to and from them."""

import concurrent.futures
import contextlib
import os
import re
import threading
import time
from collections import Counter
from typing import Any

import numpy as np

from mooncake_kernels import config
from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.transfer import Ticket, TransferEngine

from .descriptors import nixl_mem_t, nixlRegDList
from .errors import (
    as_nixl,
    nixlBackendError,
    nixlInvalidParamError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlRepostActiveError,
)
from .transfers import Side, nixlXferTelemetry

_MAX_WORKERS = 8  # files of an agent that are read and written at once
_PATH = re.compile(rb"(ro|rw|wo)((?:,[a-z]+)*):(.+)", re.DOTALL)
_MODES = {b"ro": os.O_RDONLY, b"rw": os.O_RDWR, b"wo": os.O_RDWR}  # what is written is read, too
_FLAGS = {b"create": os.O_CREAT, b"direct": 0, b"trunc": os.O_TRUNC}  # past the cache anyway


class File:
    """A registered file: a descriptor of its own, closed when no one uses the object any more."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.name = os.readlink(f"/proc/self/fd/{descriptor}")
        self._lock = threading.Lock()

    def grow(self, num_bytes: int) -> None:
        """Make it at least that large; holes read as zeros."""
        with self._lock:
            if os.fstat(self.descriptor).st_size < num_bytes:
                os.truncate(self.descriptor, num_bytes)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


class Files:
    """The registered files of an agent, by device: a descriptor, or any number. Thread-safe."""

    def __init__(self, engine: TransferEngine):
        self._engine = engine
        self._lock = threading.Lock()
        self._files: dict[int, File] = {}
        self._uses: Counter[int] = Counter()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    def register(self, descs: nixlRegDList) -> None:
        """Register all of them, or none.

        A text of the form ``"rw,create:/path"`` opens that file: ``ro``, ``rw`` or ``wo``, then
        ``create``, ``trunc`` or ``direct``. Otherwise the device is the descriptor of an open file.

        Raises:
            nixlBackendError: it cannot be opened, or is no open file.
            nixlInvalidParamError: a device stands for another file already.
        """
        opened: dict[int, File] = {}
        devices = [int(device) for device in descs.rows[:, 2]]
        with self._lock:
            for device, text in zip(devices, descs.metas, strict=True):
                path = _PATH.fullmatch(text)
                is_known = device in self._files or device in opened
                if is_known and path is None:
                    continue
                if is_known:
                    raise nixlInvalidParamError(
                        "register_memory: the device of a path must be one that no registered "
                        f"file has, got {device} for {text!r:.80}"
                    )
                opened[device] = _opened(path) if path else _duplicated(device)
            self._files.update(opened)
            self._uses.update(devices)

    def deregister(self, descs: nixlRegDList) -> None:
        """Undo one registration of each, of all or of none. Transfers go on.

        Raises:
            nixlNotFoundError: one is not registered.
        """
        devices = Counter(int(device) for device in descs.rows[:, 2])
        with self._lock:
            for device, count in devices.items():
                if self._uses[device] < count:
                    raise nixlNotFoundError(
                        "deregister_memory: dereg_list must have been registered, got the file "
                        f"{device}"
                    )
            self._uses.subtract(devices)
            for device in devices:
                if not self._uses[device]:
                    del self._uses[device], self._files[device]

    def query(self, descs: nixlRegDList) -> list[dict[str, str] | None]:
        """``size``, ``mode`` and ``mtime`` of files, by their paths; None for what is not there."""
        found: list[dict[str, str] | None] = []
        for text in descs.metas:
            match = _PATH.fullmatch(text)
            try:
                status = os.stat(match[3] if match else text)
            except (OSError, ValueError):
                found.append(None)
                continue
            fields = {"size": status.st_size, "mode": status.st_mode, "mtime": status.st_mtime}
            found.append({name: str(int(value)) for name, value in fields.items()})
        return found

    def check(self, op: str, devices: np.ndarray) -> None:
        """Refuse files that are not registered.

        Raises:
            nixlNotFoundError: one is not.
        """
        for device in np.unique(devices).tolist():
            self.get(op, device)

    def get(self, op: str, device: int) -> File:
        """The file of that device."""
        with self._lock:
            file = self._files.get(device)
        if file is None:
            raise nixlNotFoundError(f"{op}: device must be of a registered file, got {device}")
        return file

    def transfer(self, operation: str, near: Side, far: Side) -> "FileTransfer":
        """A request between memory of this agent and files."""
        assert far.devices is not None
        sizes = np.broadcast_to(np.asarray(near.sizes, np.uint64), near.addresses.shape)
        parts = []
        for device in np.unique(far.devices).tolist():
            mine = far.devices == device
            columns = (near.addresses[mine], far.addresses[mine], sizes[mine].copy())
            parts.append((self.get("make_prepped_xfer", device), columns))
        with self._lock:
            if self._pool is None:
                self._pool = concurrent.futures.ThreadPoolExecutor(_MAX_WORKERS, "nixl-files")
        return FileTransfer(self._engine, self._pool, operation, parts)

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


class FileTransfer:
    """Requests to files, one for each, which threads of a pool open and carry out."""

    backend_kind = nixl_mem_t.FILE_SEG

    def __init__(
        self,
        engine: TransferEngine,
        pool: concurrent.futures.ThreadPoolExecutor,
        operation: str,
        parts: list[tuple[File, tuple[np.ndarray, np.ndarray, np.ndarray]]],
    ):
        self._engine = engine
        self._pool = pool
        self._writes = operation == "WRITE"
        self._move = engine.write_blocks if self._writes else engine.read_blocks
        self._parts = parts
        self._num_bytes = sum(int(sizes.sum()) for _, (_, _, sizes) in parts)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._state = ""
        self._num_left = 0  # files that are not finished
        self._is_cancelled = False
        self._tickets: set[Ticket] = set()
        self._error: Exception | None = None
        self._begin_s = self._posted_s = self._end_s = 0.0

    def post(self, pieces: list[bytes]) -> None:
        """Start it.

        Raises:
            nixlBackendError: it has a notification: a file cannot be notified.
            nixlRepostActiveError: it is still running.
        """
        if pieces:
            raise nixlBackendError("transfer: notif_msg must be empty for files")
        with self._lock:
            if self._state == "PROC" and self._num_left:
                raise nixlRepostActiveError("transfer: handle must not be active, it is running")
            self._begin_s = time.monotonic()
            self._state, self._error, self._num_left = "PROC", None, len(self._parts)
            self._is_cancelled = False
        for part in self._parts:
            self._pool.submit(self._run, *part)
        self._posted_s = time.monotonic()

    def state(self) -> str:
        """``DONE``, ``PROC`` or ``ERR``; see ``MemoryTransfer.state``."""
        with self._lock:
            if self._state != "PROC":
                if not self._state:
                    raise nixlNotPostedError("check_xfer_state: handle must have been posted")
                return self._state
            if self._num_left:
                return "PROC"
            self._state = "DONE" if self._error is None else "ERR"
            error = self._error
        if error is not None:
            raise as_nixl(error) from error
        return "DONE"

    def cancel(self) -> None:
        """End it; local memory is no longer touched when this returns."""
        with self._lock:
            if self._state != "PROC":
                return
            self._is_cancelled = True
            tickets = [*self._tickets]
        for ticket in tickets:
            ticket.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._num_left)
            self._state = "ERR"

    def telemetry(self) -> nixlXferTelemetry:
        """How it went."""
        return nixlXferTelemetry(
            int(self._begin_s * 1e6),
            int((self._posted_s - self._begin_s) * 1e6),
            int((self._end_s - self._begin_s) * 1e6),
            self._num_bytes,
            sum(len(sizes) for _, (_, _, sizes) in self._parts),
        )

    def _run(self, file: File, columns: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        error: Exception | None = None
        try:
            if not self._is_cancelled:
                self._carry_out(file, columns)
        except (TransferError, InvalidArgument, Unavailable, OSError) as failure:
            error = failure
        with self._changed:
            self._error = self._error or error
            self._num_left -= 1
            if not self._num_left:
                self._end_s = time.monotonic()
                self._changed.notify_all()

    def _carry_out(self, file: File, columns: tuple[Any, Any, Any]) -> None:
        if self._writes:
            file.grow(int((columns[1] + columns[2]).max()))
        name = f"file:{file.name}"
        with self._engine.open(name, descriptor=file.descriptor) as peer:
            with self._lock:
                if self._is_cancelled:
                    return
                ticket = self._move(peer, *columns, deadline_s=config.current().deadline_s)
                self._tickets.add(ticket)
            try:
                ticket.wait()
            finally:
                with self._lock:
                    self._tickets.discard(ticket)


def _opened(match: re.Match[bytes]) -> File:
    flags = _MODES[match[1]]
    for flag in filter(None, match[2].split(b",")):
        if flag not in _FLAGS:
            raise nixlInvalidParamError(
                "register_memory: the flags of a path must be create, trunc or direct, got "
                f"{flag!r:.80}"
            )
        flags |= _FLAGS[flag]
    try:
        return File(os.open(match[3], flags | os.O_CLOEXEC, 0o644))
    except (OSError, ValueError) as error:
        raise nixlBackendError(f"register_memory: {error}") from None


def _duplicated(device: int) -> File:
    """The caller may close its descriptor, and the number may be used again, while it is used."""
    try:
        return File(os.dup(device))
    except (OSError, OverflowError) as error:
        raise nixlBackendError(
            "register_memory: the device must be the descriptor of an open file, or the text "
            f'flags and path ("rw:/path"), got {device}: {error}'
        ) from None
