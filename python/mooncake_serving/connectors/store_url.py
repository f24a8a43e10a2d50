"""One URL for a store: what an engine's configuration names, and how it is opened."""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlencode

from mooncake_kernels.errors import InvalidArgument, Unavailable, shown
from mooncake_kernels.metadata.url import has_secret, without_secrets
from mooncake_kernels.pool import ObjectPool
from mooncake_kernels.private_files import first_line
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.store import SsdTier, Store, TieredStore, directory

if TYPE_CHECKING:
    from mooncake_serving.store import ClusterStore

    AnyStore: TypeAlias = Store | ClusterStore

log = logging.getLogger("mooncake_serving.connectors")

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
CLUSTER_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel")
OPTIONS = {  # by scheme; those of the directory's connection are passed on to it
    "shm": ("size",),
    "tiered": ("memory", "disk", "pool", "bucket"),
    "redis": ("size", "pool", "cluster", "engine", "password_file", "password_env"),
}
FORMS = (
    '"shm:/dev/shm/kv?size=8GiB", "tiered:/mnt/kv?memory=4GiB&disk=100GiB" or '
    '"redis://host:6379/0?size=8GiB"'
)
PASSWORDS = {"password_file", "password_env"}
WATERMARK = (0.90, 0.85)  # what other processes evict does not reach the disk
BUCKET_BYTES = 256 << 20
MIN_BUCKETS = 8  # of a small disk; each time it is full, one of them is freed
MIN_BUCKET_BYTES = 64 << 10
PAGE = 4096


@dataclass(frozen=True, repr=False)
class StoreUrl:
    """A checked URL, see ``open_store``. Its ``repr`` has no login.

    Attributes:
        scheme: "shm", "tiered" or "redis".
        path: of the pool; of the file on the disk; "" of a cluster.
        pool: path of the pool in memory; None: one of this process alone.
        memory_bytes: of the pool, if it is to be made; None: not given.
        disk_bytes: of the file on the disk; 0: none.
        bucket_bytes: in which that file is written.
        server: URL of the cluster's directory, with its login if the URL has one.
        cluster: its name.
        engine: where other hosts reach the pool, as ``host:port``; None: at a free port.
        password_file: whose first line is the directory's password; "": none.
        password_env: the environment variable that has the password; "": none.
    """

    scheme: str
    path: str = ""
    pool: str | None = None
    memory_bytes: int | None = None
    disk_bytes: int = 0
    bucket_bytes: int = BUCKET_BYTES
    server: str = ""
    cluster: str = "mooncake"
    engine: str | None = None
    password_file: str = ""
    password_env: str = ""

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["server"] = without_secrets(self.server)
        return f"StoreUrl({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def password(self) -> str:
        """Read the password of the directory; "" if a file or a variable of it is not named.

        Raises:
            InvalidArgument: there is none.
            OSError: the file cannot be read.
        """
        if self.password_file:
            try:
                return first_line(self.password_file)
            except ValueError as error:
                raise _wrong("url's password_file=", "a file with a password", str(error)) from None
        if self.password_env and self.password_env not in os.environ:
            raise _wrong("url's password_env=", "a variable that is set", repr(self.password_env))
        return os.environ.get(self.password_env, "")


def parse_store_url(url: Any) -> StoreUrl:
    """Check a URL, see ``open_store``.

    Raises:
        InvalidArgument: it is none, an option is unknown, missing, or has a wrong value.
    """
    if not isinstance(url, str):
        raise _wrong("url", FORMS, shown(url))
    scheme, colon, rest = url.partition(":")
    if not colon or scheme not in ("shm", "tiered", *CLUSTER_SCHEMES):
        raise _wrong("url", FORMS, repr(without_secrets(url)))
    address, _, query = rest.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) != len(pairs):
        raise _wrong("url", "one with each option once", _names(name for name, _ in pairs))
    if scheme in CLUSTER_SCHEMES:
        return _cluster_url(f"{scheme}:{address}", options)
    known = OPTIONS[scheme]
    for name in options:
        if name not in known:
            raise _wrong(f"url ({scheme}:)", f"one with no options but {_names(known)}", repr(name))
    path = unquote(address.removeprefix("//"))
    if scheme == "tiered" and path.startswith("/") and (path.endswith("/") or Path(path).is_dir()):
        path = f"{path.rstrip('/')}/mooncake.tier"
    if not path.startswith("/") or path.endswith("/"):
        raise _wrong(f"url ({scheme}:)", "one with an absolute path, as " + FORMS, repr(url))
    if scheme == "shm":
        return StoreUrl("shm", path, path, _size(options, "size"))
    disk = _size(options, "disk")
    if disk is None:
        raise _wrong("url (tiered:)", "one with disk=, such as disk=100GiB", repr(url))
    bucket = _size(options, "bucket") or min(BUCKET_BYTES, disk // MIN_BUCKETS // PAGE * PAGE)
    if bucket < MIN_BUCKET_BYTES:
        name, least = ("bucket", MIN_BUCKET_BYTES) if "bucket" in options else (
            "disk", MIN_BUCKETS * MIN_BUCKET_BYTES)  # fmt: skip
        need = f"a size of at least {least >> 10}KiB"
        raise _wrong(f"url's {name}=", need, repr(options[name]))
    _check_pool(options)
    pool = options.get("pool") or _pool_of(path)
    return StoreUrl("tiered", path, pool, _size(options, "memory"), disk, bucket)


def open_store(url: str, *, namespace: str = "", verify: float = 1.0) -> "AnyStore":
    """Open the store that a URL names; what is not there yet is made.

    * ``shm:PATH?size=SIZE``: a pool in memory that all processes of this host share which name it.
      The first one makes it; it stays until its file is removed.
    * ``tiered:PATH?memory=SIZE&disk=SIZE``: the same, with a disk behind it: PATH is a file, or the
      folder of one. ``pool=`` is the path of the pool, by default one in /dev/shm that follows from
      PATH; ``bucket=`` the size in which the disk is written. One process has the disk: those that
      open the URL meanwhile have the pool alone.
    * ``redis://host:port/db?size=SIZE``: a pool of this process, in a cluster whose directory that
      server is; also ``rediss:``, ``unix:`` and ``redis+sentinel:``, with the options of the
      directory's own URL. ``pool=`` is its path, if processes share it; without ``size=`` and
      ``pool=`` this process has none, and others take what it puts. ``cluster=`` names the cluster,
      ``engine=host:port`` is where other hosts reach the pool. ``password_file=`` names a file
      whose first line is the password, ``password_env=`` an environment variable. What is read from
      other hosts again and again is copied into this pool, see ``HotKeys``.

    A SIZE is like 4096, 64KiB or 1.5G, in powers of 1024.

    Args:
        url: as above.
        namespace: of the keys, see ``Store``.
        verify: share of the reads that compare checksums, see ``Store``.

    Returns:
        A ``Store``, ``TieredStore`` or ``ClusterStore``; its ``close()`` closes everything.

    Raises:
        InvalidArgument: the URL is wrong, or names a pool or a disk that was made otherwise.
        OSError: a file cannot be made or opened.
        Unavailable: the directory does not answer, or a package is missing.
    """
    parsed = parse_store_url(url)
    options: dict[str, Any] = {"namespace": namespace, "verify": verify}
    if parsed.scheme == "redis":
        return _open_cluster(parsed, options)
    return _open_store(parsed, options)


def _open_pool(url: StoreUrl) -> ObjectPool:
    """Open a pool that processes share, or make it."""
    assert url.pool is not None
    with contextlib.suppress(FileNotFoundError):
        pool = ObjectPool.open(url.pool)
        asked, has = url.memory_bytes, pool.capacity_bytes
        if asked is not None and abs(asked - has) >= pool.alignment:
            log.warning("%s is there and has %d bytes: %d changes nothing", url.pool, has, asked)
        return pool
    name = "memory" if url.scheme == "tiered" else "size"
    if url.memory_bytes is None:
        raise _wrong("url", f"one with {name}=, for there is no pool {url.pool} yet", "none")
    # Another process may make it meanwhile.
    with contextlib.suppress(FileExistsError), _sized_by(name):
        return ObjectPool.create(url.memory_bytes, url.pool)
    return ObjectPool.open(url.pool)


def _open_store(url: StoreUrl, options: dict[str, Any]) -> Store:
    pool = _open_pool(url)
    try:
        tier = _open_tier(url)
        if tier is None:
            return Store(pool, **options)
        return TieredStore(pool, tier, watermark=WATERMARK, **options)  # or it closes the tier
    except BaseException:
        pool.close()
        raise


def _open_tier(url: StoreUrl) -> SsdTier | None:
    """Open the disk; None: there is none, or another process has it."""
    if url.scheme != "tiered":
        return None
    try:
        return SsdTier(url.path, url.disk_bytes, bucket_bytes=url.bucket_bytes)
    except InvalidArgument as error:
        raise InvalidArgument(f"open_store: url's disk= and bucket= do not fit: {error}") from None
    except Unavailable as error:
        if not _is_locked(url.path):
            raise
        log.info("%s: only the pool %s in memory is used here (%s)", url.path, url.pool, error)
        return None


def _open_cluster(url: StoreUrl, options: dict[str, Any]) -> "ClusterStore":
    from mooncake_serving.store import HotKeys, Node

    from .owned_cluster import OwnedCluster

    with ExitStack() as opened:
        store: Store | None = None
        if url.pool is not None:
            store = opened.enter_context(_open_store(url, options))
        elif url.memory_bytes is not None:
            with _sized_by("size"):
                store = Store.create(url.memory_bytes, **options)
            opened.enter_context(store)
        engine = opened.enter_context(TransferEngine(url.engine))
        server = opened.enter_context(directory.connect(_with_password(url), url.cluster))
        node = opened.enter_context(Node(store, engine, server))
        if store is not None:
            cluster = OwnedCluster(node, opened, verify=options["verify"], hot=HotKeys())
        else:
            cluster = OwnedCluster(node, opened, **options)
    return cluster


def _cluster_url(server: str, options: dict[str, str]) -> StoreUrl:
    own = {name: options.pop(name) for name in OPTIONS["redis"] if name in options}
    server += f"?{urlencode(options)}" if options else ""
    if len(own.keys() & PASSWORDS) + has_secret(server) > 1:
        raise _wrong("url", "one with a login, password_file= or password_env=", "several")
    _check_pool(own)
    size, cluster = _size(own, "size"), own.get("cluster", "mooncake")
    try:
        directory.connect(server, cluster).close()  # it connects on first use
    except InvalidArgument as error:
        more = ", or its options " + _names(OPTIONS["redis"])
        raise InvalidArgument(f"open_store: url is wrong: {error}{more}") from None
    return StoreUrl(
        "redis",
        pool=own.get("pool"),
        memory_bytes=size,
        server=server,
        cluster=cluster,
        engine=own.get("engine"),
        password_file=own.get("password_file", ""),
        password_env=own.get("password_env", ""),
    )


def _check_pool(options: dict[str, str]) -> None:
    if "pool" in options and not options["pool"].startswith("/"):
        raise _wrong("url's pool=", "an absolute path", repr(options["pool"]))


@contextlib.contextmanager
def _sized_by(name: str) -> Iterator[None]:
    """Name the option of the URL in errors about the size of a pool that is made."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(f"open_store: url's {name}= or path is wrong: {error}") from None


def _with_password(url: StoreUrl) -> str:
    password = url.password()
    if not password:
        return url.server
    mark = "&" if "?" in url.server else "?"
    return f"{url.server}{mark}password={quote(password, safe='')}"


def _is_locked(path: str) -> bool:
    """Whether a process has the disk."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _pool_of(path: str) -> str:
    """A pool in memory for the file on a disk: the same for all processes of the user."""
    digest = hashlib.blake2b(os.path.realpath(path).encode(), digest_size=8).hexdigest()
    return f"/dev/shm/mooncake-{os.getuid()}-{digest}"


def _size(options: dict[str, str], name: str) -> int | None:
    if name not in options:
        return None
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([kmgt]?)(?:i?b)?", options[name].lower())
    size = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if size < 1:
        raise _wrong(f"url's {name}=", "a size such as 4096, 64KiB or 1.5G", repr(options[name]))
    return size


def _names(names: Any) -> str:
    return ", ".join(names)


def _wrong(argument: str, need: str, value: str) -> InvalidArgument:
    return InvalidArgument(f"open_store: {argument} must be {need}, got {value}")
