"""What stands behind a store: the pool of this host."""

import contextlib

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import Store

from .. import names
from ..codes import Failed
from .codes import INTERNAL_ERROR, log
from .objects import Objects
from .settings import Settings

_ALIGNMENT = 512  # of objects, which may be small
_BYTES_PER_OBJECT = 8 << 10  # of a pool: there can be one for each of these, see ObjectPool.create


def open_objects(settings: Settings) -> Objects:
    """Open what ``master_server_addr`` names; the pool is made if there is none.

    Raises:
        InvalidArgument, Unavailable, OSError: a setting is wrong, or the pool is not to be had.
        Failed: the address is one of Mooncake's master.
    """
    names.metadata_of(settings.metadata_server)
    names.transports_of(settings.protocol)
    if "/" not in settings.path:
        raise Failed(
            INTERNAL_ERROR,
            "master_server_addr must be the path of a pool, for example /dev/shm/kv, "
            f"for nothing here speaks to a mooncake_master, got {settings.path!r:.80}",
        )
    namespace = f"mooncake/{settings.tenant_id}"
    return Objects(Store(_open_pool(settings), namespace=namespace), namespace)


def _open_pool(settings: Settings) -> ObjectPool:
    with contextlib.suppress(FileNotFoundError):
        return _existing(settings)
    if settings.global_segment_size == 0:
        raise InvalidArgument(
            "global_segment_size must be above 0 for who makes the pool, and there is no "
            f"{settings.path} yet, got 0"
        )
    with contextlib.suppress(FileExistsError):  # another has made it meanwhile
        return ObjectPool.create(
            settings.global_segment_size,
            settings.path,
            alignment=_ALIGNMENT,
            num_objects=max(1024, settings.global_segment_size // _BYTES_PER_OBJECT),
        )
    return _existing(settings)


def _existing(settings: Settings) -> ObjectPool:
    pool = ObjectPool.open(settings.path)
    if settings.global_segment_size not in (0, pool.capacity_bytes):
        log.info(
            "setup: %s has %d bytes, whatever global_segment_size says (%d)",
            settings.path,
            pool.capacity_bytes,
            settings.global_segment_size,
        )
    return pool
