"""Files as memory: their registrations, and transfers to and from them."""

import concurrent.futures
import contextlib
import errno
import fcntl
import functools
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from mooncake_kernels import config
from mooncake_kernels.errors import FailureKind, TransferError
from mooncake_kernels.transfer import Ticket, TransferEngine

from . import dropped
from .descriptors import nixl_mem_t, nixlRegDList
from .errors import (
    as_nixl,
    nixlBackendError,
    nixlInvalidParamError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlRepostActiveError,
)
from .transfers import S_PER_BYTE, Side, nixlXferTelemetry

_MAX_WORKERS = 8  # files of an agent that are read and written at once
_PATH = re.compile(rb"(ro|rw|wo)((?:,[a-z]+)*):(.+)", re.DOTALL)
_MODES = {b"ro": os.O_RDONLY, b"rw": os.O_RDWR, b"wo": os.O_RDWR}  # what is written is read, too
_FLAGS = {b"create": os.O_CREAT, b"direct": 0, b"trunc": os.O_TRUNC}  # past the cache anyway
_MAX_BYTES = (1 << 63) - 1  # of a file
_REFUSED = {  # by what a file was opened for
    "READ": (frozenset({"wo"}), "a file that is read must be opened for reading"),
    "WRITE": (frozenset({"ro"}), "a file that is written must be opened for writing"),
}


class File:
    """A registered file: a descriptor of its own, closed when no one uses the object any more.

    Attributes:
        access: ``ro``, ``rw`` or ``wo``: what callers may do; the engine may do more.
        is_path: whether a path was opened for it, so that its device is no descriptor.
    """

    def __init__(self, descriptor: int, access: str, is_path: bool):
        self.descriptor = descriptor
        self.access = access
        self.is_path = is_path
        self.name = os.readlink(f"/proc/self/fd/{descriptor}")

    def grow(self, num_bytes: int) -> None:
        """Make it at least that large; holes read as zeros.

        It never becomes shorter, as by truncation, whatever other processes do at the same time.
        Only the last byte, which the caller is about to write, is allocated.
        """
        if os.fstat(self.descriptor).st_size >= num_bytes:
            return
        try:
            os.posix_fallocate(self.descriptor, num_bytes - 1, 1)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            if os.fstat(self.descriptor).st_size < num_bytes:
                os.pwrite(self.descriptor, b"\0", num_bytes - 1)

    def is_of(self, descriptor: int) -> bool:
        """Whether a descriptor is of this file.

        Raises:
            OSError: it is not open.
        """
        mine, other = os.fstat(self.descriptor), os.fstat(descriptor)
        return (mine.st_dev, mine.st_ino) == (other.st_dev, other.st_ino)

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
        self._is_closed = False
        self._pool = concurrent.futures.ThreadPoolExecutor(
            _MAX_WORKERS, "nixl-files", dropped.JOBS.enter
        )

    def register(self, descs: nixlRegDList) -> None:
        """Register all of them, or none.

        A text of the form ``"rw,create:/path"`` opens that file: ``ro``, ``rw`` or ``wo``, then
        ``create``, ``trunc`` or ``direct``. Otherwise the device is the descriptor of an open file.
        If that number is registered, but was closed and is of another file by now, it is of this
        one from now on; lists prepared before must be prepared again.

        Raises:
            nixlBackendError: it cannot be opened, or is no open file.
            nixlInvalidParamError: a device stands for another file already.
        """
        opened: dict[int, File] = {}
        devices = [int(device) for device in descs.rows[:, 2]]
        with self._lock:
            for device, text in zip(devices, descs.metas, strict=True):
                path = _PATH.fullmatch(text)
                known = opened.get(device) or self._files.get(device)
                if known and path is None and _is_same(known, device):
                    continue
                if known and path:
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

    def find(self, op: str, rows: np.ndarray) -> dict[int, File]:
        """The files of ``[n, 3]`` rows (offset, bytes, device), by device.

        Raises:
            nixlNotFoundError: one is not registered.
            nixlInvalidParamError: a row ends where no file does.
        """
        is_beyond = (rows[:, 0] > _MAX_BYTES) | (rows[:, 1] > _MAX_BYTES - rows[:, 0])
        if is_beyond.any():
            bad = int(np.argmax(is_beyond))
            offset, num_bytes, _ = rows[bad].tolist()
            raise nixlInvalidParamError(
                f"{op}: descriptor {bad} must end below 2**63 bytes of its file, got offset "
                f"{offset} + {num_bytes} bytes"
            )
        return {device: self.get(op, device) for device in np.unique(rows[:, 2]).tolist()}

    def get(self, op: str, device: int) -> File:
        """The file of that device."""
        with self._lock:
            file = self._files.get(device)
        if file is None:
            raise nixlNotFoundError(f"{op}: device must be of a registered file, got {device}")
        return file

    def transfer(self, operation: str, near: Side, far: Side) -> "FileTransfer":
        """A request between memory of this agent and files.

        Raises:
            nixlNotFoundError: a file is not registered any more, or its device is of another one.
        """
        assert far.devices is not None and far.files is not None
        sizes = np.broadcast_to(np.asarray(near.sizes, np.uint64), near.addresses.shape)
        parts = []
        for device in np.unique(far.devices).tolist():
            file = self.get("make_prepped_xfer", device)
            if file is not far.files[device]:
                raise nixlNotFoundError(
                    "make_prepped_xfer: remote_xfer_side must be prepared again, because device "
                    f"{device} was registered for another file since"
                )
            mine = far.devices == device
            parts.append((file, (near.addresses[mine], far.addresses[mine], sizes[mine].copy())))
        return FileTransfer(self._engine, self._submit, operation, parts)

    def close(self) -> None:
        """End the threads, once what they do is over. What has not begun is cancelled."""
        with self._lock:
            self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, run: Callable[[int], None], part: int) -> concurrent.futures.Future[None]:
        """Have a thread call ``run(part)``.

        Raises:
            TransferError: it was closed.
            RuntimeError: there is no thread left.
        """
        try:
            return self._pool.submit(run, part)
        except RuntimeError:
            if self._is_closed:
                raise _closed_error() from None
            raise


class FileTransfer:
    """Requests to files, one for each, which threads of a pool open and carry out."""

    backend_kind = nixl_mem_t.FILE_SEG
    remote = None

    def __init__(
        self,
        engine: TransferEngine,
        submit: Callable[[Callable[[int], None], int], concurrent.futures.Future[None]],
        operation: str,
        parts: list[tuple[File, tuple[np.ndarray, np.ndarray, np.ndarray]]],
    ):
        self._engine = engine
        self._submit = submit
        self._operation = operation
        self._move = engine.write_blocks if operation == "WRITE" else engine.read_blocks
        self._parts = parts
        self._num_bytes = sum(int(sizes.sum()) for _, (_, _, sizes) in parts)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._state = ""
        self._waiting: set[int] = set()  # parts that no thread has begun
        self._num_left = 0  # parts that are not finished
        self._is_cancelled = False
        self._tickets: set[Ticket] = set()
        self._error: Exception | None = None
        self._begin_s = self._posted_s = self._end_s = 0.0

    def post(self, pieces: list[bytes]) -> str:
        """Start it. Returns ``state()``, which raises a failure.

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
            self._state, self._error, self._is_cancelled = "PROC", self._refusal(), False
            self._waiting = set() if self._error else set(range(len(self._parts)))
            self._num_left = len(self._waiting)
            parts = [*self._waiting]
        for part in parts:
            try:
                future = self._submit(self._run, part)
            except (TransferError, RuntimeError) as error:
                self._drop(part, error)
            else:
                future.add_done_callback(functools.partial(self._drop_if_cancelled, part))
        self._posted_s = time.monotonic()
        return self.state()

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
            self._num_left -= len(self._waiting)  # threads find nothing to do there
            self._waiting.clear()
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

    def _refusal(self) -> Exception | None:
        """Why a file may not be used so; None if all may."""
        refused, need = _REFUSED[self._operation]
        for file, _ in self._parts:
            if file.access in refused:
                return nixlBackendError(f"transfer: {need}, got {file.access}: {file.name!r:.200}")
        return None

    def _drop_if_cancelled(self, part: int, future: concurrent.futures.Future[None]) -> None:
        if future.cancelled():
            self._drop(part, _closed_error())

    def _drop(self, part: int, error: Exception) -> None:
        """Count a part that no thread will carry out."""
        with self._lock:
            is_mine = part in self._waiting
            self._waiting.discard(part)
        if is_mine:
            self._finish(error)

    def _run(self, part: int) -> None:
        with self._lock:
            if part not in self._waiting:  # it was cancelled, or dropped
                return
            self._waiting.discard(part)
        error: Exception | None = TransferError(
            self._parts[part][0].name, "it was interrupted", kind=FailureKind.CANCELLED
        )
        try:
            self._carry_out(*self._parts[part])
            error = None
        except Exception as failure:  # noqa: BLE001 - state() raises it, whatever it is
            error = failure
        finally:
            self._finish(error)

    def _finish(self, error: Exception | None) -> None:
        with self._changed:
            self._error = self._error or error
            self._num_left -= 1
            if not self._num_left:
                self._end_s = time.monotonic()
                self._changed.notify_all()

    def _carry_out(self, file: File, columns: tuple[Any, Any, Any]) -> None:
        if self._operation == "WRITE":
            file.grow(int((columns[1] + columns[2]).max()))
        deadline_s = config.current().deadline_s + int(columns[2].sum()) * S_PER_BYTE
        opened = self._engine.open(f"file:{file.name}", allow_file=True, descriptor=file.descriptor)
        with opened as peer:
            with self._lock:
                if self._is_cancelled:
                    return
                ticket = self._move(peer, *columns, deadline_s=deadline_s)
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
        descriptor = os.open(match[3], flags | os.O_CLOEXEC, 0o644)
        return File(descriptor, match[1].decode(), is_path=True)
    except (OSError, ValueError) as error:
        raise nixlBackendError(f"register_memory: {error}") from None


def _duplicated(device: int) -> File:
    """The caller may close its descriptor, and the number may be used again, while it is used."""
    try:
        descriptor = os.dup(device)
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        access = {os.O_RDONLY: "ro", os.O_WRONLY: "wo"}.get(mode, "rw")
        return File(descriptor, access, is_path=False)
    except (OSError, OverflowError) as error:
        raise nixlBackendError(
            "register_memory: the device must be the descriptor of an open file, or the text "
            f'flags and path ("rw:/path"), got {device}: {error}'
        ) from None


def _is_same(known: File, device: int) -> bool:
    """Whether a device that is registered again stands for the same file as before."""
    try:
        return known.is_path or known.is_of(device)
    except (OSError, OverflowError) as error:
        raise nixlBackendError(
            f"register_memory: the device must be the descriptor of an open file, got {device}: "
            f"{error}"
        ) from None


def _closed_error() -> TransferError:
    return TransferError("files", "the agent was closed", kind=FailureKind.CLOSED)
