"""Hosts in separate processes, with Redis: each is killed during an operation."""

import random
import threading
import time

import numpy as np
import pytest

from mooncake_kernels.errors import FailureKind, TransferError, Unavailable
from mooncake_kernels.pool import PutResult
from mooncake_serving.store import Store
from mooncake_serving.store.cluster import pinned_reads
from mooncake_serving.store.cluster.messages import Pin, Pinned, key_bytes
from mooncake_serving.store.directory import Claim

from ..directory.conftest import patient  # noqa: F401
from ..support import BEING_WRITTEN, EXISTS, STORED, eventually
from .processes import HostProcess, fetch, get, pool_file, put, put_until_listed
from .support import SHORT_TTL_S, UNIT, replaced, value

NUM_RACED = 30


@pytest.fixture
def hosts(hosts_with_redis):
    return hosts_with_redis


@pytest.fixture
def start(redis):
    """Starts hosts in processes of their own."""
    started = []

    def start_one(name: str, path=None, **options) -> HostProcess:
        started.append(HostProcess(redis.url, name, path, **options))
        return started[-1]

    yield start_one
    for process in started:
        process.close()


PUTTING = threading.Lock()


def pin(host, name: str, keys: bytes) -> None:
    """Pin objects at a node, and read nothing."""
    host.node._rpc.request(name, Pin, Pinned, 5.0, valid_s=600, keys=keys, verify=False)


def claim(host, keys: np.ndarray) -> list[int]:
    """As a put that does not end."""
    PUTTING.acquire(blocking=False)
    return host.node.claims.ask(keys, 600.0, PUTTING).tolist()


def put_all(host, writer: int) -> list[PutResult]:
    return [host.cluster.put(k, value(1000 * writer + k, 500)) for k in range(NUM_RACED)]


def put_one_after_another(host, first: int) -> None:
    for i in range(first, first + 1_000_000):
        host.cluster.put(i % 100, value(i % 100, 1 + 37 * (i % 100)))


def test_objects_of_other_processes(hosts, start):
    here, there = hosts.make("here", transports=["shm", "tcp"]), start("there")
    assert there.do(put, "a", value(1, 300_000)) is STORED
    assert here.cluster.get("a") == value(1, 300_000)
    assert here.cluster.put("a", b"") is EXISTS
    assert here.cluster.put("b", value(2)) is STORED
    assert there.do(fetch, ["a", "b", "c"]) == [EXISTS, STORED, None]
    assert here.cluster.remove("b") and there.do(get, "b") is None


def test_one_of_many_writing_processes_wins(hosts, start):
    here, others = hosts.make("here"), [start(f"there-{i}") for i in range(2)]
    for i, other in enumerate(others):
        other.begin(put_all, i + 1)
    results = [put_all(here, 0), *(other.end() for other in others)]
    for key in range(NUM_RACED):
        [winner] = [i for i, result in enumerate(results) if result[key] is STORED]
        for read in (lambda k: here.cluster.get(k), *(lambda k, o=o: o.do(get, k) for o in others)):
            assert read(key) == value(1000 * winner + key, 500)


def test_pins_of_a_killed_reader_are_released(hosts, start):
    here, there = hosts.make("here", ttl_s=SHORT_TTL_S), start("there", ttl_s=SHORT_TTL_S)
    here.cluster.put("a", value(1))
    there.do(pin, here.node.name, key_bytes(here.store.keyspace.keys(["a"])))
    assert here.node.num_readers() == 1 and here.store.stats().num_pins == 1
    there.kill()
    eventually(lambda: here.node.num_readers() == 0)
    assert here.store.stats().num_pins == 0


@pytest.mark.parametrize("by_key", [True, False])
def test_stopped_holder_is_not_retried_by_every_read(hosts, start, by_key):
    here, there = hosts.make("here", answer_s=1.0, read_s=1.0, by_key=by_key), start("there")
    there.do(put, "a", value(1))
    asked = []

    def begin(original, name, *args):
        asked.append(name)
        return original(name, *args)

    with replaced(here.node._peers, "_begin", begin):
        assert here.cluster.get("a") == value(1)
        there.stop()
        try:
            here.node.backoff._lasts_s = 600.0
            assert here.cluster.get("a") is None  # after a second
            assert here.cluster.exists("a")
            num_asked = len(asked)
            assert here.cluster.get_each(["a"] * 50) == [None] * 50
            assert len(asked) == num_asked
        finally:
            there.go_on()
        assert there.do(get, "b") is None
        assert there.do(pin, here.node.name, key_bytes(here.store.keyspace.keys(["b"]))) is None
        assert here.cluster.get("a") == value(1)  # it was heard of


def test_silent_node_is_the_last_choice_for_puts(hosts):
    homes = [hosts.make("one", 64 * UNIT), hosts.make("two", 128 * UNIT)]
    writer = hosts.make("writer", 0)
    names = [home.node.name for home in reversed(homes)]
    assert [member.name for member in writer.cluster._writes.homes()] == names
    first = writer.node.member(names[0])
    writer.node.backoff.failed(first, TransferError(names[0], "closed"))
    assert [member.name for member in writer.cluster._writes.homes()] == names
    late = TransferError(names[0], "no answer", kind=FailureKind.TIMED_OUT)
    writer.node.backoff.failed(first, late)
    assert [member.name for member in writer.cluster._writes.homes()] == names[::-1]
    writer.node.backoff._lasts_s = 0.0
    writer.node.backoff.failed(first, late)
    assert [member.name for member in writer.cluster._writes.homes()] == names


def test_claim_of_a_killed_writer_expires(hosts, start):
    here, there = hosts.make("here"), start("there", ttl_s=SHORT_TTL_S)
    assert there.do(claim, here.store.keyspace.keys(["a"])) == [Claim.GRANTED]
    assert here.cluster.put("a", value(1)) is BEING_WRITTEN
    there.kill()
    eventually(lambda: here.cluster.put("a", value(1)) is STORED)


def test_writer_killed_between_publishing_and_storing(hosts, start):
    """What is listed to no effect is withdrawn by the pool's other node, once missed."""
    here = hosts.make("here")
    with pool_file("listed") as path, Store.create(100 * UNIT, path) as store:
        writer, beside = start("there", path), hosts.make("there", store=store)
        writer.begin(put_until_listed, "a", value(1))
        eventually(lambda: here.cluster.exists("a"))
        writer.kill()
        assert here.cluster.get("a") is None and store.stats().num_writing == 1
        eventually(lambda: here.cluster.put("a", value(1)) is STORED)
        assert here.cluster.get("a") == beside.cluster.get("a") == value(1)


def test_holder_killed_during_a_read(hosts, start):
    here = hosts.make("here", by_key=False)
    near, far = start("here", ttl_s=SHORT_TTL_S), start("far")  # the near one is asked first
    near.do(put, "a", value(1, 500_000))
    near.do(put, "only there", value(2))
    far.do(fetch, ["a"])

    def killed(read, *args, **options):
        near.kill()
        return read(*args, **options)

    with replaced(here.node.memory, "read", killed):
        assert here.cluster.get("a") == value(1, 500_000)
    assert here.cluster.get("only there") is None
    eventually(lambda: not here.cluster.exists("only there"))
    assert here.cluster.put("only there", value(3)) is STORED


@pytest.mark.parametrize("verify", [0, 1])
def test_holder_killed_after_the_data_was_read(hosts, start, verify, monkeypatch):
    monkeypatch.setattr(pinned_reads, "SOONER_BYTES", 0)
    here, there = hosts.make("here", by_key=False, options={"verify": verify}), start("there")
    there.do(put, "a", value(1))

    def killed(read, *args, **options):
        read(*args, **options)
        there.kill()

    with replaced(here.node.memory, "read", killed):
        # Their checksum says that the bytes are good, or no one does.
        assert here.cluster.get("a") == (value(1) if verify else None)
    assert here.cluster.fetch(["a"]) == [None] and here.store.stats().num_writing == 0


def test_pool_survives_the_kill_of_one_of_two_nodes(hosts, start):
    here = hosts.make("here")
    with pool_file("two-nodes") as path:
        maker, other = (start("there", path, ttl_s=SHORT_TTL_S) for _ in range(2))
        assert maker.do(put, "a", value(1)) is STORED and other.do(get, "a") == value(1)
        maker.kill()
        for _ in range(5):
            eventually(lambda: here.cluster.get("a") == value(1))
        eventually(lambda: maker.name not in here.node.membership.refresh())
        assert here.cluster.exists("a") and here.cluster.get("a") == value(1)
        other.kill()
        eventually(lambda: not here.cluster.exists("a"))


def test_writer_killed_at_random_moments(hosts, start, soak):
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    here = hosts.make("here")
    for round_index in range(40 if soak else 1):
        with pool_file(f"anywhere-{round_index}") as path, Store.create(100 * UNIT, path) as store:
            writer, beside = (
                start("there", path, ttl_s=SHORT_TTL_S),
                hosts.make("there", store=store),
            )
            writer.begin(put_one_after_another, draw.randrange(100))
            eventually(lambda store=store: store.stats().num_ready > 10)
            time.sleep(draw.random() * 0.05)
            writer.kill()
            for i in range(100):
                expected = value(i, 1 + 37 * i)
                assert here.cluster.get(i) in (None, expected), seed
                # EXISTS is wrong until what the writer has listed to no effect is withdrawn.
                eventually(
                    lambda i=i: (
                        here.cluster.put(i, value(i, 1 + 37 * i)) is not BEING_WRITTEN
                        and here.cluster.get(i) is not None
                    ),
                    seed,
                )
                assert here.cluster.get(i) == beside.cluster.get(i) == expected, seed
            here.store.remove_all()
            here.node.entries.publish_all()
            beside.close()
            hosts.all.remove(beside)
            # Until the writer is forgotten its pool is said to have what it had.
            eventually(lambda: not here.cluster.exists_each(range(100)).any())


def test_cluster_recovers_from_a_redis_kill(hosts, start, redis):
    here, there = hosts.make("here", ttl_s=SHORT_TTL_S), start("there", ttl_s=SHORT_TTL_S)
    assert here.cluster.put_each(range(5), [value(i) for i in range(5)]) == [STORED] * 5
    assert there.do(put, "theirs", value(7)) is STORED
    redis.stop()
    assert here.cluster.get_each(range(5)) == [value(i) for i in range(5)]
    assert here.cluster.put(3, b"") is EXISTS
    for call in (
        lambda: here.cluster.get("theirs"),
        lambda: here.cluster.put("new", value(8)),
        lambda: there.do(get, 3),
    ):
        with pytest.raises(Unavailable):
            call()
    redis.start()
    eventually(lambda: here.cluster.exists("theirs"))
    assert here.cluster.get("theirs") == value(7)
    eventually(lambda: there.do(get, 3) == value(3))
    assert here.cluster.put("new", value(8)) is STORED and there.do(get, "new") == value(8)
