"""Hosts in one process: each a pool, an engine and a node, all of them with one directory."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from mooncake_kernels.errors import Unavailable
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.store import ClusterStore, Node, Store
from mooncake_serving.store.directory import Directory

UNIT = 4096
TTL_S = 20.0  # so that no node of a busy machine is taken for dead
SHORT_TTL_S = 2.0  # of nodes that die, or must soon notice something


@dataclass
class Host:
    """The parts of a participating process.

    Attributes:
        store: on its pool; None: it has none.
        cluster: the same, over all hosts.
    """

    store: Store | None
    engine: TransferEngine
    node: Node
    cluster: ClusterStore

    def close(self) -> None:
        self.cluster.close()
        self.engine.close()
        if self.store is not None:
            self.store.close()


def make_host(
    directory: Directory,
    name: str,
    capacity_bytes: int = 64 * UNIT,
    *,
    transports: Sequence[str] = ("tcp",),
    options: dict | None = None,
    store: Store | None = None,
    secret: bytes | None = None,
    tls=None,
    by_key: bool = True,
    engine_name: str | None = None,
    **node_options,
) -> Host:
    """A host of that name; without a pool if its capacity is 0; without ``by_key``, everything it
    reads and serves goes by address.
    """
    if store is None and capacity_bytes:
        store = Store.create(capacity_bytes, evict_ratio=0.0)
    engine = TransferEngine(engine_name, transports=transports, secret=secret, tls=tls)
    node = Node(store, engine, directory, **{"host": name, "ttl_s": TTL_S} | node_options)
    if not by_key:
        node._peers.prefers_rpc = lambda *_: False
    return Host(store, engine, node, ClusterStore(node, **(options or {})))


class Hosts:
    """Makes hosts, and closes them."""

    def __init__(self, directory: Directory):
        self.directory = directory
        self.all: list[Host] = []

    def make(self, name: str, *args, **options) -> Host:
        host = make_host(options.pop("directory", self.directory), name, *args, **options)
        self.all.append(host)
        return host

    def several(self, num_hosts: int, *args, **options) -> list[Host]:
        made = [self.make(f"host-{i}", *args, **options) for i in range(num_hosts)]
        for host in made:
            host.node.membership.refresh()
        return made

    def close(self) -> None:
        """Close all in parallel: each waits for its threads."""
        with ThreadPoolExecutor() as executor:
            list(executor.map(Host.close, self.all))


class SomeDirectory:
    """A directory that is unavailable when a test says so."""

    def __init__(self, directory: Directory):
        self._directory = directory
        self.is_away = False

    def __getattr__(self, name: str):
        if self.is_away:
            raise Unavailable(f"{name}: the directory is away")
        return getattr(self._directory, name)


def value(seed: int, num_bytes: int = UNIT) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


@contextlib.contextmanager
def replaced(owner, name: str, wrap: Callable) -> Iterator[None]:
    """Call ``wrap(original, *args)`` instead of a method for a while."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: wrap(original, *args, **options))
    try:
        yield
    finally:
        setattr(owner, name, original)


def kept_by(store: Store, keys) -> list[tuple[int, int]]:
    """Retention and position of each, as the pool has them."""
    objects = store.pool.objects()
    rows = zip(objects.retention.tolist(), objects.position.tolist(), strict=True)
    kept = dict(zip(map(tuple, objects.keys.tolist()), rows, strict=True))
    return [kept[tuple(key)] for key in store.keyspace.keys(keys).tolist()]


def damage(store: Store, key) -> None:
    """Flip a bit of an object in place."""
    with store.view(key) as pinned:
        array = pinned.tensor().numpy()
        array[len(array) // 2] ^= 1
