"""``serve``: make or open a pool, and serve it to administrators and Prometheus."""

import argparse
import contextlib
import secrets
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncake_kernels import config
from mooncake_kernels.command_line import server_url
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool
from mooncake_kernels.transfer import TransferEngine

from .. import directory
from ..eviction import EvictionPolicy, largest_first, length_aware, lfu, lru, sieve
from ..quotas import Quota, set_quota
from ..ssd import SsdTier
from ..store import Store
from ..tiered import TieredStore
from .admin_client import saved_token
from .options import (
    add_command,
    add_pool,
    add_token,
    as_bytes,
    as_count,
    as_seconds,
    open_pool,
)

if TYPE_CHECKING:
    from ..admin import NodeCluster

POLICIES: dict[str, EvictionPolicy] = {
    "lru": lru,
    "sieve": sieve,
    "lfu": lfu,
    "length_aware": length_aware,
    "largest_first": largest_first,
}

DEFAULTS = {
    "cluster": "mooncake",
    "events_topic": "",
    "events_form": "map",
    "events_interval": 0.1,
    "ssd_bucket": 256 << 20,
    "ssd_min_uses": 2,
}
NEEDS = {  # options that mean nothing without another
    "replay": "events",
    "events_topic": "events",
    "events_namespace": "events",
    "events_form": "events",
    "events_interval": "events",
    "cluster": "directory",
    "engine": "directory",
    "ssd_capacity": "ssd",
    "ssd_bucket": "ssd",
    "ssd_min_uses": "ssd",
}
SSD_OPTIONS = {"path": "--ssd", "capacity_bytes": "--ssd-capacity", "bucket_bytes": "--ssd-bucket"}
SSD_WATERMARK = (0.90, 0.85)  # objects that other processes evict do not reach the disk


def add_commands(commands: Any) -> None:
    """Declare the command."""
    parser = add_command(
        commands, "serve", run, "Make or open a pool, and serve its admin interface.",
        "serve /dev/shm/kv --capacity 64GiB --port 9410",
    )  # fmt: skip
    add_pool(parser)
    parser.add_argument(
        "--capacity",
        type=as_bytes,
        metavar="SIZE",
        help="of the pool if there is none yet, as 64GiB",
    )
    parser.add_argument("--host", default="127.0.0.1", help="to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=9410, help="0: a free one (default: 9410)")
    parser.add_argument(
        "--socket", metavar="FILE",
        help="listen at this Unix socket in place of --host and --port: in a folder of mode 0700, "
        "which is made if need be; no token is needed there",
    )  # fmt: skip
    add_token(parser)
    parser.add_argument(
        "--no-token", action="store_true",
        help="have every process of this machine evict, remove and drain",
    )  # fmt: skip
    parser.add_argument(
        "--eviction",
        choices=POLICIES,
        default="lru",
        help="what goes when room is needed (default: lru)",
    )
    parser.add_argument(
        "--quota", type=_quota, metavar="NAMESPACE=SIZE", action="append", default=[],
        help="what the prefix hashes of a namespace may take of the pool, as tenant-7=8GiB, or "
        "tenant-7=none; the pool remembers it for all who open it; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--watermark", type=_watermark, metavar="HIGH,LOW",
        help="evict ahead of need, as 0.9,0.85: down to LOW of the pool when HIGH is used",
    )  # fmt: skip
    parser.add_argument(
        "--events",
        metavar="ENDPOINT",
        help="publish what comes to the pool and goes, as tcp://127.0.0.1:5557",
    )
    parser.add_argument("--replay", metavar="ENDPOINT", help="for events that were missed")
    parser.add_argument(
        "--events-topic",
        metavar="NAME",
        help="by which subscribers choose (default: the empty one)",
    )
    parser.add_argument(
        "--events-namespace", metavar="NAME",
        help="whose prefix hashes are published, as integers (default: whole keys of all)",
    )  # fmt: skip
    parser.add_argument(
        "--events-form", choices=["map", "array"],
        help="map: of today's vLLM (default); array: of earlier vLLM and SGLang",
    )  # fmt: skip
    parser.add_argument(
        "--events-interval", type=as_seconds, metavar="SECONDS",
        help="how often to look for what has changed: so late are events at most (default: 0.1)",
    )  # fmt: skip
    parser.add_argument(
        "--directory", metavar="URL", help="take part in a cluster, as redis://10.0.0.1:6379/0"
    )
    parser.add_argument(
        "--directory-file", metavar="FILE",
        help="whose first line is that URL: a password in an option is seen by all users of the "
        "machine; or set MOONCAKE_KERNELS_DIRECTORY",
    )  # fmt: skip
    parser.add_argument("--cluster", metavar="NAME", help="which (default: mooncake)")
    parser.add_argument(
        "--engine", metavar="HOST:PORT",
        help="where other nodes reach the pool (default: a free port of listen_host)",
    )  # fmt: skip
    parser.add_argument(
        "--ssd", metavar="FILE",
        help="a disk behind the pool; then 0.9,0.85 is the watermark unless another is given",
    )  # fmt: skip
    parser.add_argument(
        "--ssd-capacity", type=as_bytes, metavar="SIZE",
        help="of FILE, as 1TiB: at least two buckets; needed with --ssd",
    )  # fmt: skip
    parser.add_argument(
        "--ssd-bucket", type=as_bytes, metavar="SIZE",
        help="whole pages of 4KiB, at least 64KiB, in which FILE is written, more than an object "
        "has (default: 256MiB)",
    )  # fmt: skip
    parser.add_argument(
        "--ssd-min-uses", type=as_count, metavar="N",
        help="on a full FILE: 1: write all that goes; 2: what was used again (default)",
    )  # fmt: skip
    parser.add_argument(
        "--temporary", action="store_true", help="remove files in the end that were made"
    )


def run(options: argparse.Namespace) -> None:
    from mooncake_kernels.http_server import silence_uvicorn

    from ..admin import AdminServer

    silence_uvicorn()
    _check(options)
    with contextlib.ExitStack() as stack:
        stop = _stopped_by_signals(stack)
        removal = stack.enter_context(contextlib.ExitStack())
        pool = stack.enter_context(_pool(options, removal))
        for namespace, quota in options.quota:
            set_quota(pool, namespace, quota)
        disk_removal = contextlib.ExitStack()
        store = stack.enter_context(_store(options, pool, disk_removal))
        stack.enter_context(disk_removal)  # left before the store is closed: the file is locked
        if options.events is not None:
            _publish(options, store, stack)
        cluster = None if options.directory is None else _join(options, store, stack)
        token, is_made = _token(options)
        admin = stack.enter_context(
            AdminServer(
                store,
                host=options.host,
                port=options.port,
                socket=options.socket,
                cluster=cluster,
                token=token,
                needs_token=not options.no_token,
            )
        )
        if is_made and token is not None:
            try:
                file = stack.enter_context(saved_token(admin.port, token))
            except OSError as error:
                raise OSError(
                    f"serve: the token cannot be saved ({error}): give --token-file, --socket or "
                    "--no-token"
                ) from None
            sys.stdout.write(f"token in {file}\n")
        if not options.temporary:  # it is being served: keep what was made
            removal.pop_all()
            disk_removal.pop_all()
        sys.stdout.write(f"serving {pool.path} at {admin.url}\n")
        sys.stdout.flush()
        stop.wait()


def _token(options: argparse.Namespace) -> tuple[str | None, bool]:
    """Choose the token; the second: whether it was made for this server, and is to be saved."""
    if options.no_token:
        if options.token is not None:
            raise InvalidArgument("serve: --no-token must not be given with --token-file")
        return None, False
    token = options.token or config.current().admin_token or None
    if token is not None or options.socket is not None:
        return token, False
    from mooncake_kernels.http_server import is_loopback, resolve

    if not is_loopback(resolve("serve", options.host)[1]):
        raise InvalidArgument(
            f"serve: --token-file must be given where others reach the host, got none and "
            f"{options.host}"
        )
    return secrets.token_hex(), True


def _stopped_by_signals(stack: contextlib.ExitStack) -> threading.Event:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.signal(number, lambda *_: stop.set())
        stack.callback(signal.signal, number, before)
    return stop


def _pool(options: argparse.Namespace, removal: contextlib.ExitStack) -> ObjectPool:
    """Open the pool or make it; a pool made here is removed by ``removal``."""
    path = Path(options.path)
    if path.exists():
        pool = open_pool(options, options.path)
        if options.capacity and abs(options.capacity - pool.capacity_bytes) >= pool.alignment:
            sys.stderr.write(
                f"warning: {path} is there and has {pool.capacity_bytes} bytes: "
                f"--capacity {options.capacity} changes nothing\n"
            )
        return pool
    if options.capacity is None:
        raise InvalidArgument(
            f"serve: --capacity must be given to make a pool, got none, and no {path}"
        )
    pool = ObjectPool.create(options.capacity, path, group=options.group)
    removal.callback(path.unlink, missing_ok=True)
    return pool


def _check(options: argparse.Namespace) -> None:
    """Refuse options without what they are for; then fill in the defaults."""
    given, file, setting = options.directory, options.directory_file, config.current().directory
    options.directory = server_url("--directory", given, file, setting)
    given = {name for name, value in vars(options).items() if value is not None}
    for name, needed in NEEDS.items():
        if name in given and needed not in given:
            raise InvalidArgument(f"serve: --{name.replace('_', '-')} needs --{needed}")
    for name in DEFAULTS.keys() - given:
        setattr(options, name, DEFAULTS[name])
    if options.ssd is None:
        return
    if options.ssd_capacity is None:
        raise InvalidArgument("serve: --ssd needs --ssd-capacity")
    if options.ssd_capacity < 2 * options.ssd_bucket:
        raise InvalidArgument(
            f"serve: --ssd-capacity must be at least twice --ssd-bucket, {2 * options.ssd_bucket} "
            f"bytes, got {options.ssd_capacity}"
        )


def _store(options: argparse.Namespace, pool: ObjectPool, removal: contextlib.ExitStack) -> Store:
    """Make a store on the pool, with the disk behind it if any; a file made here is removed by
    ``removal``, or if this fails.
    """
    eviction = POLICIES[options.eviction]
    if options.ssd is None:
        return Store(pool, eviction=eviction, watermark=options.watermark)
    path = Path(options.ssd)
    was_there = path.exists()
    try:
        tier = SsdTier(path, options.ssd_capacity, bucket_bytes=options.ssd_bucket)
    except InvalidArgument as error:
        raise InvalidArgument(_by_option(str(error))) from None
    if not was_there and not len(tier.keys()):  # nor has another process made it meanwhile
        removal.callback(path.unlink, missing_ok=True)
    try:
        return TieredStore(
            pool,
            tier,
            eviction=eviction,
            min_uses=options.ssd_min_uses,
            watermark=options.watermark or SSD_WATERMARK,
        )
    except BaseException:
        removal.close()
        raise


def _by_option(message: str) -> str:
    """What a tier says about an argument, with the name of its option."""
    for argument, option in SSD_OPTIONS.items():
        message = message.replace(f"SsdTier: {argument} ", f"serve: {option} ")
    return message


def _join(options: argparse.Namespace, store: Store, stack: contextlib.ExitStack) -> "NodeCluster":
    from ..admin import NodeCluster
    from ..cluster import Node

    servers = stack.enter_context(directory.connect(options.directory, options.cluster))
    engine = stack.enter_context(TransferEngine(options.engine))
    node = stack.enter_context(Node(store, engine, servers))
    sys.stdout.write(f"node {node.name} of {options.cluster}\n")
    return stack.enter_context(NodeCluster(node))


def _publish(options: argparse.Namespace, store: Store, stack: contextlib.ExitStack) -> None:
    from ..events import EventPublisher, StoreEvents

    publisher = EventPublisher(
        options.events,
        topic=options.events_topic,
        replay_endpoint=options.replay,
        namespace=options.events_namespace,
        form=options.events_form,
    )
    stack.enter_context(publisher)
    stack.enter_context(StoreEvents(store, publisher, interval_s=options.events_interval))
    sys.stdout.write(f"events at {publisher.endpoint} {publisher.replay_endpoint}".rstrip() + "\n")


def _quota(text: str) -> tuple[str, Quota | None]:
    namespace, is_one, size = text.rpartition("=")
    if not is_one:
        raise argparse.ArgumentTypeError(f"must be NAMESPACE=SIZE, got {text!r:.80}")
    return namespace, None if size == "none" else Quota(as_bytes(size))


def _watermark(text: str) -> tuple[float, float]:
    try:
        high, low = map(float, text.split(","))
    except ValueError:
        high, low = 0.0, 0.0
    if not 0 < low <= high <= 1:
        raise argparse.ArgumentTypeError(f"must be HIGH,LOW, 0 < LOW <= HIGH <= 1, got {text!r}")
    return high, low
