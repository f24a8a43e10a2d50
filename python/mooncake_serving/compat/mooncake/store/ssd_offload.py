"""The disk behind a pool: ``enable_ssd_offload`` of ``setup``, see ``TieredStore``.

The environment says the rest, in Mooncake's variables.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import SsdTier, TieredStore
from mooncake_serving.store.ssd.layout import FIRST_BUCKET

from ..codes import Failed
from .codes import INTERNAL_ERROR

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


def offloading_store(
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
            # Whoever puts a value wants it kept, even if it has not been read yet.
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
