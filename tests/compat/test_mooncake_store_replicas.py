"""Where the copies of values are, and how Mooncake's calls make, move and remove them."""

import ctypes

import numpy as np
import pytest

from mooncake_kernels.pool import PinnedObject
from mooncake_serving.compat.mooncake.store import (
    INVALID_PARAMS,
    OBJECT_NOT_FOUND,
    TASK_NOT_FOUND,
    MooncakeDistributedStore,
    ReplicaStatus,
    ReplicateConfig,
    TaskStatus,
    TaskType,
)

from ..metadata.support import eventually
from .store_processes import processes
from .store_support import reasons, settings_of, value_of


def memory_of(replica):
    return replica.get_memory_descriptor().buffer_descriptor


def test_replica_descriptor_on_a_single_host(store):
    value = value_of(1, 1000)
    assert store.put("a", value) == 0
    [one] = store.get_replica_desc("a")
    assert one.status is ReplicaStatus.COMPLETE and one.status == 3
    assert one.is_memory_replica() and not one.is_disk_replica()
    assert not one.is_local_disk_replica()
    with pytest.raises(RuntimeError, match="must be in a shared file"):
        one.get_disk_descriptor()
    memory = memory_of(one)
    assert memory.size == 1000 and memory.transport_endpoint == store.get_hostname()
    assert ctypes.string_at(memory.buffer_address, 1000) == value
    assert store.get_replica_desc("none") == []
    assert store.batch_get_replica_desc(["a", "none", "a"]) == {"a": [one]}
    assert store.batch_get_replica_desc([]) == {}


def test_replicas_are_described_without_reading_the_value(store, monkeypatch):
    monkeypatch.setattr(PinnedObject, "verify", lambda _: pytest.fail("compared"))
    assert store.put("a", b"1" * 1000) == 0
    assert memory_of(store.get_replica_desc("a")[0]).size == store.get_size("a") == 1000


def test_replica_clear_on_a_single_host(store):
    for key in ("a", "b", "c"):
        assert store.put(key, b"1") == 0
    assert store.batch_replica_clear(["a"], "elsewhere") == []
    assert store.batch_replica_clear(["a", "none"], store.get_hostname()) == ["a"]
    assert store.batch_replica_clear(["a", "b", "none", "c"]) == ["b", "c"]
    assert store.batch_is_exist(["a", "b", "c"]) == [0, 0, 0]
    assert store.batch_replica_clear([]) == []


def test_one_host_has_no_copy_targets(store, caplog):
    assert store.put("a", b"1") == 0
    assert store.create_copy_task("a", ["elsewhere"]) == ((0, 0), INVALID_PARAMS)
    reasons(caplog, "a pool of one host has none")
    move = store.create_move_task("a", store.get_hostname(), "elsewhere")
    assert move == ((0, 0), INVALID_PARAMS)
    reasons(caplog, "a pool of one host has none")


def test_wrong_arguments(store, caplog):
    assert store.get_replica_desc(5) == [] and store.batch_get_replica_desc("abc") == {}
    assert store.get_replica_desc(["a"]) == [] == store.get_replica_desc({})
    assert store.batch_replica_clear(["a"], np.array(["a", "b"])) == []
    reasons(caplog, "segment_name must be a string")
    assert store.batch_replica_clear("abc") == []
    reasons(caplog, "keys must be a list, got 'abc'")
    assert store.query_task((1, 2)) == (None, TASK_NOT_FOUND)
    assert store.query_task(5) == (None, INVALID_PARAMS)
    reasons(caplog, "task_id must be a list")
    assert store.query_task(([1], 2)) == (None, INVALID_PARAMS)
    reasons(caplog, "task_id must be an integer")
    assert store.create_copy_task("a", "elsewhere") == ((0, 0), INVALID_PARAMS)
    reasons(caplog, "targets must be a list, got 'elsewhere'")


def test_before_setup(caplog):
    store = MooncakeDistributedStore()
    assert store.get_replica_desc("a") == [] and store.batch_get_replica_desc(["a"]) == {}
    assert store.batch_replica_clear(["a"]) == []
    assert store.create_copy_task("a", ["b"]) == ((0, 0), INVALID_PARAMS)
    assert store.query_task((1, 2)) == (None, INVALID_PARAMS)
    reasons(caplog, "call setup first")


@pytest.fixture
def settings(server):
    return settings_of(server.url)


@pytest.fixture
def hosts(settings):
    """A store, and two processes with pools."""
    with processes(settings, settings) as others:
        store = MooncakeDistributedStore()
        assert store.setup(settings) == 0
        yield store, *others
        store.close()


def ended(store, task):
    eventually(lambda: store.query_task(task)[0].status >= TaskStatus.FAILED, "it does not end")
    return store.query_task(task)[0]


def endpoints(store, key):
    return sorted(memory_of(one).transport_endpoint for one in store.get_replica_desc(key))


def test_the_holders_of_a_value(hosts):
    store, one, two = hosts
    names = sorted(host.call("get_hostname") for host in (one, two))
    value = value_of(1, 5000)
    assert one.call("put", "a", value) == 0
    [there] = store.get_replica_desc("a")
    assert memory_of(there).size == 5000 and memory_of(there).buffer_address == 0
    assert memory_of(there).transport_endpoint == one.call("get_hostname")
    assert store.put("b", value, ReplicateConfig(replica_num=3)) == 0
    assert endpoints(store, "b") == sorted([*names, store.get_hostname()])
    here = next(r for r in store.get_replica_desc("b") if memory_of(r).buffer_address)
    assert ctypes.string_at(memory_of(here).buffer_address, 5000) == value
    assert memory_of(here).transport_endpoint == store.get_hostname()
    assert set(store.batch_get_replica_desc(["a", "none", "b"])) == {"a", "b"}


def test_replica_clear_of_one_segment(hosts, caplog):
    store, one, two = hosts
    first, second = one.call("get_hostname"), two.call("get_hostname")
    assert store.put("a", b"1", ReplicateConfig(replica_num=3)) == 0
    assert store.batch_replica_clear(["a", "none"], first) == ["a"]
    assert store.batch_replica_clear(["a"], first) == []
    assert endpoints(store, "a") == sorted([second, store.get_hostname()])
    assert store.batch_replica_clear(["a"], store.get_hostname()) == ["a"]
    assert endpoints(store, "a") == [second] and store.get("a") == b"1"
    assert store.batch_replica_clear(["a"], second) == ["a"]  # the last one, too
    assert store.get("a") == one.call("get", "a") == b""
    assert store.batch_replica_clear(["a"], "nobody") == []
    reasons(caplog, "segment_name must be a member with a pool, got 'nobody'")


def test_copy_and_move_tasks(hosts, caplog):
    store, one, two = hosts
    first, second = one.call("get_hostname"), two.call("get_hostname")
    assert store.put("a", value_of(1, 70_000)) == 0
    task, code = store.create_copy_task("a", [first, second])
    assert code == 0 and ended(store, task).status is TaskStatus.SUCCESS
    assert endpoints(store, "a") == sorted([first, second, store.get_hostname()])
    assert store.batch_replica_clear(["a"], second) == ["a"]
    task, code = store.create_move_task("a", first, second)
    done = ended(store, task)
    assert code == 0 and done.status is TaskStatus.SUCCESS and done.id == task
    assert done.type is TaskType.REPLICA_MOVE and done.message == ""
    assert 0 < done.created_at_ms_epoch <= done.last_updated_at_ms_epoch
    assert endpoints(store, "a") == sorted([second, store.get_hostname()])
    assert two.call("get", "a") == value_of(1, 70_000)

    assert store.create_copy_task("none", [first]) == ((0, 0), OBJECT_NOT_FOUND)
    reasons(caplog, "there is no value of 'none'")
    for call in (
        lambda: store.create_copy_task("a", [["x"]]),
        lambda: store.create_move_task("a", {}, first),
    ):
        assert call() == ((0, 0), INVALID_PARAMS)
        reasons(caplog, "segment_name must be a string")
    assert store.create_copy_task("a", ["nobody"]) == ((0, 0), INVALID_PARAMS)
    reasons(caplog, "segments must be of members with a pool, .*got 'nobody'")
    task, code = store.create_move_task("a", first, first)
    assert code == 0 and ended(store, task).status is TaskStatus.FAILED
    assert ended(store, task).message == f"error {INVALID_PARAMS}, see the log"
    reasons(caplog, "add must be of other pools than remove")


def test_failed_task_reports_its_reason(hosts):
    store, one, _ = hosts
    assert one.call("put", "large", value_of(1, 20 << 20)) == 0
    for i in range(3):  # which fills the own pool for good
        config = ReplicateConfig(with_hard_pin=True)
        assert store.put(f"pinned{i}", value_of(i, 8 << 20), config) == 0
    task, code = store.create_copy_task("large", [store.get_hostname()])
    done = ended(store, task)
    assert code == 0 and done.status is TaskStatus.FAILED and "FULL" in done.message
