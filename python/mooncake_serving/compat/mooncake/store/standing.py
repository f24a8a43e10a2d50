"""What a store is made of: the pool of this host, or the pools of many hosts and a directory."""

import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.metadata.url import without_secrets
from mooncake_kernels.pool import ObjectPool
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.store import Store

from .. import names
from ..codes import Failed
from ..engine import start_engine
from .codes import INTERNAL_ERROR, log
from .objects import Objects
from .settings import Settings
from .ssd_offload import offloading_store

if TYPE_CHECKING:  # these need an extra, which a pool of one host does without
    from mooncake_serving.store import Node
    from mooncake_serving.store.directory import Directory

_ALIGNMENT = 512  # of objects, which may be small
_BYTES_PER_OBJECT = 8 << 10  # of a pool: at most one object for each, see ObjectPool.create
_STAGING_SLOTS = 8
_MIN_SLOT_BYTES = 64 << 10
_MAX_NAMES = 8  # that are tried, one after the other
_SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://")


def open_objects(settings: Settings) -> Objects:
    """Open what ``master_server_addr`` names.

    Raises:
        InvalidArgument, Unavailable, OSError: a setting is wrong, or something cannot be opened.
        Failed: the address is that of a Mooncake master.
    """
    names.metadata_of(settings.metadata_server)
    names.transports_of(settings.protocol)
    if settings.master_server_addr.startswith(_SCHEMES):
        return _open_cluster(settings)
    if "/" not in settings.path:
        raise Failed(
            INTERNAL_ERROR,
            "master_server_addr must be the path of a pool (/dev/shm/kv) or the URL of a directory "
            f"(redis://host:port), for nothing here speaks to a mooncake_master, got "
            f"{without_secrets(settings.path)!r:.80}",
        )
    namespace = namespace_of(settings)
    store = _store(settings, partial(_open_pool, settings), namespace=namespace)
    return Objects(store, store, namespace)


def _open_cluster(settings: Settings) -> Objects:
    """Join with a pool of this process alone, as Mooncake's clients do."""
    # These need an extra, which a pool of one host does without.
    from mooncake_serving.store import ClusterStore, directory

    from .cluster_objects import ClusterObjects
    from .segments import Segments

    namespace = namespace_of(settings)
    with contextlib.ExitStack() as opened:
        servers = opened.enter_context(directory.connect(settings.master_server_addr))
        store = None
        if settings.global_segment_size:
            pool = partial(new_pool, settings.global_segment_size, None)
            store = opened.enter_context(_store(settings, pool, namespace=namespace))
        elif settings.enable_ssd_offload:
            raise InvalidArgument(
                "global_segment_size must be above 0 with enable_ssd_offload, which needs a pool "
                "of this process, got 0"
            )
        node = join(settings, store, servers, opened)
        segments = Segments(settings, servers, node)
        opened.callback(segments.close)
        cluster = ClusterStore(node, namespace=None if store else namespace)
        return ClusterObjects(cluster, servers, segments, namespace, opened.pop_all())


def join(
    settings: Settings, store: Store | None, servers: "Directory", opened: contextlib.ExitStack
) -> "Node":
    """Start an engine and a node for a pool, which ``opened`` closes."""
    from mooncake_serving.store import Node

    slot_bytes = max(settings.local_buffer_size // _STAGING_SLOTS, _MIN_SLOT_BYTES)
    engine = opened.enter_context(_start_engine(settings))
    return opened.enter_context(
        Node(store, engine, servers, staging_slots=_STAGING_SLOTS, slot_bytes=slot_bytes)
    )


def _start_engine(settings: Settings) -> TransferEngine:
    """Start the engine of this process.

    At a metadata server it must have a name of its own: as in Mooncake, the processes of a host may
    all give the host, and each of them adds a free port.
    """
    metadata = names.metadata_of(settings.metadata_server)
    transports = names.transports_of(settings.protocol)
    topology = names.topology_of(settings.rdma_devices, transports)
    listen = names.listen_name(settings.local_hostname)
    host, _, port = listen.rpartition(":")
    if metadata == "p2p" or port != "0":
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
    """A port that no other process is given while ``reserved`` is open.

    Its socket does not listen and lets others name the port: the engine can listen there.
    """
    try:
        family, kind, *_, address = socket.getaddrinfo(
            host.strip("[]"), 0, type=socket.SOCK_STREAM
        )[0]
        holding = reserved.enter_context(socket.socket(family, kind))
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holding.bind(address)
    except OSError as error:
        raise InvalidArgument(
            f"local_hostname must be a host of this machine ({error}), got {host!r:.80}"
        ) from None
    return holding.getsockname()[1]


def _store(settings: Settings, pool: Callable[[], ObjectPool], **options: Any) -> Store:
    """Make the store on a pool, with a disk behind it if there shall be one."""
    if settings.enable_ssd_offload:
        return offloading_store(settings.ssd_offload_path, pool, **options)
    return Store(pool(), **options)


def namespace_of(settings: Settings) -> str:
    """The namespace of all values of a tenant."""
    return f"mooncake/{settings.tenant_id}"


def _open_pool(settings: Settings) -> ObjectPool:
    """Open the pool of this host; it is made if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return _existing_pool(settings)
    if settings.global_segment_size == 0:
        raise InvalidArgument(
            "global_segment_size must be above 0 for who makes the pool, and there is no "
            f"{settings.path} yet, got 0"
        )
    with contextlib.suppress(FileExistsError):  # another process has made it meanwhile
        return new_pool(settings.global_segment_size, settings.path)
    return _existing_pool(settings)


def new_pool(num_bytes: int, path: str | None) -> ObjectPool:
    """Make a pool for so many bytes of objects."""
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
