"""A client that comes back under its ``host:port``, as in Mooncake's test of replication: every
value that another client has is read at once.
"""

from functools import partial

import pytest

from mooncake_serving.compat.mooncake.store import MooncakeDistributedStore, ReplicateConfig

from ..metadata.support import RedisServer, free_port
from .store_processes import Process
from .store_support import settings_of, value_of

pytest.importorskip("redis")
pytest.importorskip("msgspec")

NUM_VALUES = 4


def set_up(server: RedisServer, name: str) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    assert store.setup(settings_of(server.url, name=name)) == 0
    return store


def two_copies() -> ReplicateConfig:
    config = ReplicateConfig()
    config.replica_num = 2
    return config


VALUES = {f"key-{i}": value_of(i, (1000, 300_000)[i % 2]) for i in range(NUM_VALUES)}


def has_all(get, exists, replicas, endpoint: str) -> bool:
    """Every value is there, and at that client."""
    for key, value in VALUES.items():
        assert exists(key) == 1
        assert get(key) == value
        endpoints = {
            one.get_memory_descriptor().buffer_descriptor.transport_endpoint
            for one in replicas(key)
        }
        assert endpoint in endpoints
    return True


def test_closed_client_reads_at_once_after_rejoining(server):
    names = [f"localhost:{free_port()}" for _ in range(2)]
    one, two = (set_up(server, name) for name in names)
    for key, value in VALUES.items():
        assert one.put(key, value, two_copies()) == 0
    for _ in range(3):
        one.close()
        assert has_all(two.get, two.is_exist, two.get_replica_desc, names[1])
        one = set_up(server, names[0])
        assert has_all(one.get, one.is_exist, one.get_replica_desc, names[1])
        assert has_all(two.get, two.is_exist, two.get_replica_desc, names[1])
    one.close()
    two.close()


@pytest.mark.parametrize("num_kills", [1, 2])
def test_a_client_that_was_killed_reads_at_once_when_it_is_back(server, num_kills):
    names = [f"localhost:{free_port()}" for _ in range(2)]
    two = set_up(server, names[1])
    one = Process(settings_of(server.url, name=names[0]))
    for key, value in VALUES.items():
        assert two.put(key, value, two_copies()) == 0
        assert len(two.get_replica_desc(key)) == 2
    for _ in range(num_kills):
        one.kill()
        one = Process(settings_of(server.url, name=names[0]))

        calls = [partial(one.call, name) for name in ("get", "is_exist", "get_replica_desc")]
        assert has_all(*calls, names[1])
        assert has_all(two.get, two.is_exist, two.get_replica_desc, names[1])
    one.kill()
    two.close()
