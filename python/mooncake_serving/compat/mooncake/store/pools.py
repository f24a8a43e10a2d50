"""Pools, with a disk behind them if ``enable_ssd_offload`` is set, and how they join others.

The environment says the rest about the disk, in Mooncake's variables; see ``TieredStore``.
"""

import contextlib
import errno
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.pool import ObjectPool
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.store import SsdTier, Store, TieredStore
from mooncake_serving.store.ssd import FIRST_BUCKET

from .. import names
from ..codes import Failed
from ..engine import start_engine
from .codes import INTERNAL_ERROR, log
from .settings import Settings

if TYPE_CHECKING:  # these need an extra, which a pool of one host does without
    from mooncake_serving.store import Node
    from mooncake_serving.store.directory import Directory

_ALIGNMENT = 512  # of objects, which may be small
_BYTES_PER_OBJECT = 8 << 10  # of a pool: at most one object for each, see ObjectPool.create
_STAGING_SLOTS = 8
_MIN_SLOT_BYTES = 64 << 10
_MAX_NAMES = 8  # that are tried, one after the other
_PORTS = range(12300, 14301)  # Mooncake's
_MAX_PORTS = 64  # that are tried

FILE_NAME = "mooncake-store.ssd"
_FOLDER = "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"
_CAPACITY = "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES"
_BUCKET = "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES"
_DEFAULT_FOLDER = "/data/file_storage"
_DEFAULT_BUCKET_BYTES = 256 << 20
_MAX_DEFAULT_CAPACITY = 2 << 40
_SETTINGS = {"SsdTier: capacity_bytes ": f"{_CAPACITY} ", "SsdTier: bucket_bytes ": f"{_BUCKET} "}

# What others evict does not reach the disk, so this process makes room for them. As of
# ``mooncake-store serve``.
_WATERMARK = (0.90, 0.85)


def join(
    settings: Settings, store: Store | None, servers: "Directory", opened: contextlib.ExitStack
) -> "Node":
    """Start an engine and a node for a pool, which ``opened`` closes.

    Others may take as long to answer as Mooncake lets a transfer take: an engine that computes on
    all processors is not dead, and a value that exists is not absent.
    """
    from mooncake_serving.store import Node

    answer_s = names.timeout_s()
    slot_bytes = max(settings.local_buffer_size // _STAGING_SLOTS, _MIN_SLOT_BYTES)
    engine = opened.enter_context(_start_engine(settings))
    return opened.enter_context(
        Node(
            store,
            engine,
            servers,
            answer_s=answer_s,
            staging_slots=_STAGING_SLOTS,
            slot_bytes=slot_bytes,
        )
    )


def _start_engine(settings: Settings) -> TransferEngine:
    """Start the engine of this process.

    Processes of a host may all give the host, and each of them adds a free port, in Mooncake's
    range: firewalls let it through. At a metadata server the port is a part of the name, which
    must be free there, too.
    """
    metadata = names.metadata_of(settings.metadata_server)
    transports = names.transports_of(settings.protocol)
    topology = names.topology_of(settings.rdma_devices, transports)
    listen = names.listen_name(settings.local_hostname)
    host, _, port = listen.rpartition(":")
    if port != "0":
        return start_engine(settings.local_hostname, listen, metadata, transports, topology)
    with contextlib.ExitStack() as reserved:
        for _ in range(_MAX_NAMES):
            name = f"{host}:{_reserve_port(host, reserved)}"
            try:
                return start_engine(name, name, metadata, transports, topology)
            except InvalidArgument as error:  # the name is in use: by a host that is called so, too
                reason = error
    raise reason


def _reserve_port(host: str, reserved: contextlib.ExitStack) -> int:
    """A port that no other process is given while ``reserved`` is open: one of ``_PORTS``, or any
    if they are all in use.

    Its socket does not listen and lets others name the port: the engine can listen there.
    """
    try:
        family, kind, *_, address = socket.getaddrinfo(
            host.strip("[]"), 0, type=socket.SOCK_STREAM
        )[0]
        holding = reserved.enter_context(socket.socket(family, kind))
        for port in (*random.sample(_PORTS, _MAX_PORTS), 0):
            try:
                holding.bind((address[0], port, *address[2:]))
                break
            except OSError as error:
                if port == 0 or error.errno != errno.EADDRINUSE:
                    raise
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for the engine, not before
    except OSError as error:
        raise InvalidArgument(
            f"local_hostname must be a host of this machine ({error}), got {host!r:.80}"
        ) from None
    return holding.getsockname()[1]


def open_store(settings: Settings, pool: Callable[[], ObjectPool], **options: Any) -> Store:
    """Make the store on a pool, with a disk behind it if one is configured."""
    if settings.enable_ssd_offload:
        return _offloading_store(settings.ssd_offload_path, pool, **options)
    return Store(pool(), **options)


def open_pool(settings: Settings) -> ObjectPool:
    """Open the pool of this host; it is made if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return _existing_pool(settings)
    if settings.global_segment_size == 0:
        raise InvalidArgument(
            "global_segment_size must be above 0 for the creator of the pool, and there is no "
            f"{settings.path} yet, got 0"
        )
    with contextlib.suppress(FileExistsError):  # another process has made it meanwhile
        return new_pool(settings.global_segment_size, settings.path)
    return _existing_pool(settings)


def new_pool(num_bytes: int, path: str | None) -> ObjectPool:
    """Make a pool for that many bytes of objects."""
    return ObjectPool.create(
        num_bytes,
        path,
        alignment=_ALIGNMENT,
        num_objects=max(1024, num_bytes // _BYTES_PER_OBJECT),
    )


def _existing_pool(settings: Settings) -> ObjectPool:
    pool = ObjectPool.open(settings.path)
    if settings.global_segment_size not in (0, pool.capacity_bytes):
        log.info(
            "setup: %s has %d bytes, whatever global_segment_size says (%d)",
            settings.path,
            pool.capacity_bytes,
            settings.global_segment_size,
        )
    return pool


def _offloading_store(
    folder: str, open_pool: Callable[[], ObjectPool], **options: Any
) -> TieredStore:
    """Make a store whose pool evicts to a file in a folder; it opens the pool itself.

    Args:
        folder: "": what the environment says.
        open_pool: is called once the file is open, which fails more often.
        **options: of ``TieredStore``.

    Raises:
        InvalidArgument: the folder or a variable is wrong, the file has other buckets or is larger;
            or the pool is on a GPU.
        Failed: another process has the file open, or a disk behind the pool.
        OSError: there is not enough space, or the file cannot be made.
    """
    path = _path_in(folder or os.environ.get(_FOLDER, _DEFAULT_FOLDER))
    was_there = path.exists()
    try:
        with contextlib.ExitStack() as undo:
            tier = undo.enter_context(_open_tier(path))
            if not was_there and not len(tier.keys()):  # nor has another made it meanwhile
                undo.callback(path.unlink, missing_ok=True)
            pool = undo.enter_context(open_pool())
            # A value that was put is kept even if it has not been read yet.
            store = TieredStore(pool, tier, min_uses=1, watermark=_WATERMARK, **options)
            undo.pop_all()
            return store
    except Unavailable as error:
        raise Failed(INTERNAL_ERROR, f"enable_ssd_offload: {error}") from None


def _path_in(folder: str) -> Path:
    if not os.path.isabs(folder) or not os.path.isdir(folder):
        raise InvalidArgument(
            f"ssd_offload_path, or {_FOLDER}, must be the absolute path of an existing folder, got "
            f"{folder!r:.200}"
        )
    return Path(folder, FILE_NAME)


def _open_tier(path: Path) -> SsdTier:
    bucket_bytes = _number(_BUCKET) or _DEFAULT_BUCKET_BYTES
    capacity_bytes = _number(_CAPACITY) or _default_capacity(path, bucket_bytes)
    try:
        return SsdTier(path, capacity_bytes, bucket_bytes=bucket_bytes)
    except InvalidArgument as error:
        message = str(error)
        for argument, name in _SETTINGS.items():
            message = message.replace(argument, name)
        raise InvalidArgument(message) from None


def _default_capacity(path: Path, bucket_bytes: int) -> int:
    """What the file has; for a new one, half of what is free."""
    if path.exists() and (num_bytes := path.stat().st_size):
        return num_bytes - FIRST_BUCKET
    free = shutil.disk_usage(path.parent).free
    if free // 2 < 2 * bucket_bytes:
        raise OSError(
            errno.ENOSPC,
            f"ssd_offload_path must have at least {4 * bucket_bytes} bytes free, or {_CAPACITY} "
            f"must be set, got {free} free",
            str(path.parent),
        )
    return min(free // 2, _MAX_DEFAULT_CAPACITY)


def _number(name: str) -> int | None:
    """The number in an environment variable; None if it is not set."""
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise InvalidArgument(f"{name} must be a number of bytes, got {text!r:.80}")
    return int(text) if text else None
