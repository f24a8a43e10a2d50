"""A store shared by several processes of a host, its use by threads, and killed processes."""

import subprocess

import pytest

from ..metadata.support import eventually
from ..transfer.scripts import PYTHON
from .store_processes import processes
from .store_support import Memory, pool_file, set_up, settings_of, value_of
from .support import in_threads


def test_processes_share_their_values(path):
    with processes(settings_of(path), settings_of(path)) as (one, two):
        value = value_of(1, 300_000)
        assert one.call("register_buffer", one.address, 1 << 20) == 0
        one.call("write", value)
        assert one.call("put_from", "a", one.address, len(value)) == 0
        assert two.call("is_exist", "a") == 1
        assert two.call("get_into", "a", two.address, 1 << 20) == len(value)
        assert two.call("read", len(value)) == value
        assert two.call("put", "a", b"other") == 0 and one.call("get", "a") == value
        assert two.call("upsert", "a", b"other") == 0 and one.call("get", "a") == b"other"
        assert one.call("remove_all") == 1 and two.call("is_exist", "a") == 0


def test_values_of_a_killed_process_stay(path):
    with processes(settings_of(path), settings_of(path)) as (one, two):
        for i in range(50):
            assert one.call("put", f"k{i}", value_of(i, 1000 * i + 1)) == 0
        one.kill()
        for i in range(50):
            assert two.call("get", f"k{i}") == value_of(i, 1000 * i + 1)


@pytest.mark.parametrize("turn", range(3))
def test_process_killed_during_put_leaves_no_partial_value(path, turn):
    """A value is there as a whole or not at all, and its room comes back."""
    names = [f"k{i}" for i in range(8)]
    values = [bytes([i]) * (3 << 20) for i in range(8)]
    store = set_up(path, 32 << 20)
    with processes(settings_of(path)) as (writer,):
        writer.begin("upsert_batch", names, values)
        eventually(lambda: turn == 0 or store.is_exist(names[2 * turn]), "nothing was written")
        writer.kill()
    for i, name in enumerate(names):
        assert store.get(name) in (b"", values[i])
    for i, name in enumerate(names):
        assert store.upsert(name, values[i]) == 0
    assert store.get_batch(names) == values
    store.close()


def test_threads(path):
    store = set_up(path)
    memory = Memory(store, 8 << 17)
    part = 1 << 17

    def run(index: int) -> None:
        begin = memory.address + index * part
        for turn in range(30):
            name, size = f"{index}-{turn}", 1 + turn * 1000
            assert store.put_from(name, begin, size) == 0
            assert store.get_into(name, begin + 32_000, size) == size
            expected = memory.at(index * part, size)
            assert store.get(name) == expected if size <= 32_000 else store.get_size(name) == size
            assert store.upsert("shared", bytes([index]) * 10_000) in (0, -1)
            found = store.get("shared")
            assert found == b"" or found == found[:1] * 10_000
            assert store.remove(name) == 0

    in_threads(8, run)
    assert store.remove_all() == 1
    store.close()


FORKED = """
import os, sys
from mooncake_serving.compat.mooncake.store import MooncakeDistributedStore
arguments = ("127.0.0.1", "P2PHANDSHAKE", 1 << 20, 0, "tcp", "", sys.argv[1])
store = MooncakeDistributedStore()
assert store.setup(*arguments) == store.put("a", b"1") == 0
pid = os.fork()
if pid:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert store.health_check() == 0 and store.get_batch(["a", "b"]) == [b"1", b"2"]
    sys.exit(code)
assert store.health_check() == 1
assert store.is_exist("a") == store.put("c", b"3") == store.setup(*arguments) == -600
assert store.get("a") == b"" and store.batch_is_exist(["a"]) == [-1]
own = MooncakeDistributedStore()
assert own.setup(*arguments) == own.put("b", b"2") == 0 and own.get("a") == b"1"
assert own.close() == store.close() == 0
"""


def test_forked_child_must_create_its_own_store():
    with pool_file() as path:
        command = [*PYTHON, "-c", FORKED, path]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "is_exist: the store is of another process: a forked child must make" in ran.stderr
    assert "setup: the store is of another process" in ran.stderr
