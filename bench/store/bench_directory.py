"""The store's directory, in this process and in Redis: batches of keys, as a prompt has them.

32 pools, each served by two members; 100,000 objects, each in two pools. Redis is on this host,
behind a Unix socket. `dict` is a dict of sets without members. `pipeline` is redis-py's, one
command per key, as one would write it without scripts and without checking which members are alive.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

from lib.harness import Case, LeftOut, arguments
from lib.table import report
from mooncake_serving.store.directory import Claim, Directory, EmbeddedDirectory, Member, connect

NUM_POOLS = 32
NUM_OBJECTS, QUICK_OBJECTS = 100_000, 5_000
PREFIX, BATCH = 256, 512
TTL_S = 3600.0


def fill(directory: Directory, keys: np.ndarray) -> None:
    for i in range(2 * NUM_POOLS):
        pool = i % NUM_POOLS
        directory.join(Member(f"node-{i}", f"host-{pool}", f"pool-{pool}", 1 << 40), TTL_S)
        for start in range(pool * BATCH, len(keys), NUM_POOLS * BATCH):
            directory.publish(f"pool-{pool}", keys[start : start + BATCH])
            directory.publish(f"pool-{(pool + 1) % NUM_POOLS}", keys[start : start + BATCH])


class Dicts:
    """The contents of a directory, without members, time and locks."""

    def __init__(self, keys: np.ndarray):
        self.holders: dict[tuple[int, int], set[int]] = {}
        for i, key in enumerate(map(tuple, keys.tolist())):
            pool = i // BATCH % NUM_POOLS
            self.holders[key] = {pool, (pool + 1) % NUM_POOLS}

    def match_prefix(self, keys: np.ndarray) -> int:
        for i, key in enumerate(map(tuple, keys.tolist())):
            if not self.holders.get(key):
                return i
        return len(keys)

    def find(self, keys: np.ndarray) -> list[set[int]]:
        return [self.holders.get(key, set()) for key in map(tuple, keys.tolist())]

    def come_and_go(self, keys: np.ndarray) -> None:
        for key in map(tuple, keys.tolist()):
            self.holders.setdefault(key, set()).add(0)
        for key in map(tuple, keys.tolist()):
            self.holders[key].discard(0)
            if not self.holders[key]:
                del self.holders[key]


class Pipelines:
    """The same with redis-py alone, on the strings that the directory made."""

    def __init__(self, client):
        self.client = client

    def find(self, keys: np.ndarray) -> list[list[bytes]]:
        pipeline = self.client.pipeline(transaction=False)
        for key in keys:
            pipeline.get(b"{mooncake}:o" + key.tobytes())
        return [(pools or b"").split() for pools in pipeline.execute()]

    def match_prefix(self, keys: np.ndarray) -> int:
        found = [bool(pools) for pools in self.find(keys)]
        return found.index(False) if False in found else len(keys)

    def come_and_go(self, keys: np.ndarray) -> None:
        for command in ("SADD", "SREM"):
            pipeline = self.client.pipeline(transaction=False)
            for key in keys:
                packed = key.tobytes()
                pipeline.execute_command(command, b"bench:o" + packed, 1)
                pipeline.execute_command(command, b"bench:p", packed)
            pipeline.execute()


def cases(
    where: str, directory: Directory, keys: np.ndarray, name: str, theirs: Dicts | Pipelines
) -> Iterator[Case]:
    new = keys[:BATCH] ^ np.uint64(1 << 63)
    yield prefixes(where, directory, keys[1000 : 1000 + PREFIX], new, name, theirs)
    yield holders(where, directory, keys[2000 : 2000 + BATCH], name, theirs)
    yield comings(where, directory, new, name, theirs)
    yield claims(where, directory, new)


def prefixes(
    where: str,
    directory: Directory,
    prefix: np.ndarray,
    new: np.ndarray,
    name: str,
    theirs: Dicts | Pipelines,
) -> Case:
    def check() -> None:
        assert len(directory.match_prefix(prefix)) == theirs.match_prefix(prefix) == PREFIX
        broken = np.concatenate([prefix[:100], new[:1], prefix[100:]])
        assert len(directory.match_prefix(broken)) == theirs.match_prefix(broken) == 100

    return Case(
        f"{where}: match_prefix: {PREFIX} keys",
        lambda: directory.match_prefix(prefix),
        {name: lambda: theirs.match_prefix(prefix)},
        check,
        fields={"keys": PREFIX},
    )


def holders(
    where: str, directory: Directory, batch: np.ndarray, name: str, theirs: Dicts | Pipelines
) -> Case:
    def check() -> None:
        found = directory.holders(batch)
        assert [len(pools) for pools in theirs.find(batch)] == [len(names) for names in found]
        assert {len(names) for names in found} == {2}

    return Case(
        f"{where}: holders: {BATCH} keys",
        lambda: directory.holders(batch),
        {name: lambda: theirs.find(batch)},
        check,
        fields={"keys": BATCH},
    )


def comings(
    where: str, directory: Directory, new: np.ndarray, name: str, theirs: Dicts | Pipelines
) -> Case:
    """Objects that come and go."""

    def come_and_go() -> None:
        directory.publish("pool-0", new)
        directory.withdraw("pool-0", new)

    def check() -> None:
        directory.publish("pool-0", new)
        assert len(directory.match_prefix(new)) == BATCH
        directory.withdraw("pool-0", new)
        assert not any(directory.holders(new))

    return Case(
        f"{where}: publish, withdraw: {BATCH} keys",
        come_and_go,
        {name: lambda: theirs.come_and_go(new)},
        check,
        fields={"keys": 2 * BATCH},
    )


def claims(where: str, directory: Directory, new: np.ndarray) -> Case:
    def claim() -> None:
        directory.claim("node-0", new, TTL_S)
        directory.abandon("node-0", new)

    def check() -> None:
        assert (directory.claim("node-0", new, TTL_S) == Claim.GRANTED).all()
        assert (directory.claim("node-1", new, TTL_S) == Claim.TAKEN).all()
        directory.abandon("node-0", new)
        assert (directory.claim("node-1", new, TTL_S) == Claim.GRANTED).all()
        directory.abandon("node-1", new)

    name = f"{where}: claim, abandon: {BATCH} keys"
    return Case(name, claim, {}, check, fields={"keys": 2 * BATCH})


def us_of_server(client, case: Case) -> int:
    """The least time of one call in the server itself: on a busy machine the rest is waiting."""
    least = None
    for _ in range(50):
        client.config_resetstat()
        case.ours()
        taken = client.info("commandstats")["cmdstat_evalsha"]["usec"]
        least = taken if least is None else min(least, taken)
    return least


def redis_cases(keys: np.ndarray, folder: str) -> Iterator[Case | LeftOut]:
    if shutil.which("redis-server") is None:
        yield LeftOut("Redis", "there is no redis-server")
        return
    import redis

    path = Path(folder) / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(500):
            if path.exists():
                break
            time.sleep(0.02)
        client = redis.Redis(unix_socket_path=str(path), protocol=2)
        with client, connect(f"unix://{path}") as directory:
            before = client.info("memory")["used_memory"]
            fill(directory, keys)
            used = client.info("memory")["used_memory"] - before
            for case in cases("Redis", directory, keys, "pipeline", Pipelines(client)):
                case.fields["bytes_an_object"] = round(used / len(keys))
                case.fields["us_of_server"] = us_of_server(client, case)
                yield case
    finally:
        server.kill()
        server.wait()


def all_cases(quick: bool, folder: str) -> Iterator[Case | LeftOut]:
    rng = np.random.default_rng(0)
    shape = (QUICK_OBJECTS if quick else NUM_OBJECTS, 2)
    keys = rng.integers(0, 1 << 63, shape, np.uint64)
    embedded = EmbeddedDirectory()
    fill(embedded, keys)
    yield from cases("embedded", embedded, keys, "dict", Dicts(keys))
    yield from redis_cases(keys, folder)


if __name__ == "__main__":
    options = arguments(__doc__, without=("device",))
    with tempfile.TemporaryDirectory() as folder:
        report("directory", all_cases(options.quick, folder), options)
