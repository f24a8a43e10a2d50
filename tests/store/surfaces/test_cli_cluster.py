"""``serve`` as a node of a cluster with Redis, and a node without a pool in this process."""

import contextlib
import os
import signal

import httpx
import numpy as np
import pytest

from mooncake_kernels.pool import PutResult
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.store import ClusterStore, Node, Store, directory
from mooncake_serving.store.cli import main

from ..directory.conftest import patient  # noqa: F401
from ..support import WAIT_S, ended_well, eventually, kill
from .support import serving, url_of

VALUE = np.random.default_rng(0).bytes(10_000)


@pytest.fixture
def served(shared_redis, path):
    """A node with a pool in a process of its own: its id, its name, and a client of its routes."""
    options = ["--directory", shared_redis.url, "--cluster", path.name]
    with serving(path, "--capacity", "1MiB", "--port", 0, *options) as (pid, lines):
        name = lines[0].split()[1]
        with httpx.Client(base_url=url_of(lines), timeout=WAIT_S) as client:
            yield pid, name, client


@pytest.fixture
def servers(shared_redis, path):
    with directory.connect(shared_redis.url, cluster=path.name) as made:
        yield made


@pytest.fixture
def cluster(served, servers):
    with TransferEngine() as engine, Node(None, engine, servers) as node:
        yield ClusterStore(node)


def test_members_and_objects(served, cluster):
    _, name, client = served
    names = sorted([name, cluster.node.name])
    eventually(lambda: [one["name"] for one in client.get("/members").json()] == names)
    assert len(client.get("/pools").json()) == 1
    cluster.put("x", VALUE)
    [entry] = client.get("/objects").json()["objects"]
    assert entry["num_bytes"] == len(VALUE) and cluster.get("x") == VALUE


def test_removals_and_evictions_reach_the_directory(served, cluster):
    _, _, client = served
    for remove in (
        lambda key: client.delete(f"/objects/{key}"),
        lambda key: client.post("/evict", json={"num_bytes": 1}),
    ):
        cluster.put("x", VALUE)
        [entry] = client.get("/objects").json()["objects"]
        assert cluster.exists("x")
        assert remove(entry["key"]).is_success
        assert not cluster.exists("x")


def test_drain(served, cluster, servers, path, capsys):
    """What it has goes to another pool, and then it goes itself; the command waits for the end."""
    _, name, client = served
    values = {f"x{i}": np.random.default_rng(i).bytes(1000 * i) for i in range(20)}
    cluster.put_each(list(values), list(values.values()))
    url, other = str(client.base_url), cluster.node.name
    eventually(lambda: other in [one["name"] for one in client.get("/members").json()])
    assert main(["drain", url, other]) == 2
    assert "ask its admin server" in capsys.readouterr().err
    assert client.get("/drain").json()["state"] == "idle"
    with (
        Store.create(1 << 20) as store,
        TransferEngine() as engine,
        Node(store, engine, servers) as node,
    ):
        assert main(["drain", url, name, "--wait"]) == 0
        progress = {"state": "left", "num_moved": 20, "num_left": 0, "num_failed": 0}
        assert client.get("/drain").json() == {
            **progress, "num_on_disk": 0, "num_gone": 0, "error": None, "is_accepting": False,
        }  # fmt: skip
        assert sorted(one.name for one in servers.members()) == sorted(
            [cluster.node.name, node.name]
        )
        assert [one["name"] for one in client.get("/members").json()] == sorted(
            [cluster.node.name, node.name]
        )
        with TransferEngine() as another, Node(None, another, servers) as late:
            assert late.name in [one["name"] for one in client.get("/members").json()]  # even now
        assert main(["drain", url, name, "--wait"]) == 0  # it is done
        assert main(["drain", url, name, "--cancel"]) == 2
        assert "has left" in capsys.readouterr().err
        assert main(["drain", url, "nobody"]) == 2
        assert "there is no member nobody" in capsys.readouterr().err
        assert store.stats().num_ready == 20
        assert cluster.get_each(list(values)) == list(values.values())


def test_failed_drain_is_reported_and_can_be_cancelled(served, cluster, servers, capsys):
    _, name, client = served
    cluster.put("x", VALUE)
    url = str(client.base_url)
    assert main(["drain", url, name, "--wait"]) == 1  # there is nowhere to go
    said = capsys.readouterr().err
    assert "1 objects could not be moved" in said and "drain --cancel" in said
    progress = client.get("/drain").json()
    assert (progress["state"], progress["num_failed"], progress["num_left"]) == ("failed", 1, 1)
    assert progress["is_accepting"] is False and len(client.get("/objects").json()["objects"]) == 1
    assert [one.is_draining for one in servers.members() if one.name == name] == [True]
    assert main(["drain", url, "nobody", "--cancel"]) == 2
    assert main(["drain", url, name, "--cancel"]) == 0
    progress = client.get("/drain").json()
    assert progress["state"] == "idle" and progress["is_accepting"]
    assert [one.is_draining for one in servers.members() if one.name == name] == [False]
    cluster.node.members(anew=True)
    assert cluster.put("y", VALUE) is PutResult.STORED
    assert len(client.get("/objects").json()["objects"]) == 2


@pytest.fixture
def serve_with_disk(shared_redis, path, tmp_path):
    """Serves a node with a disk behind its pool: its id, its name, and a client of its routes."""
    disk = ["--ssd", tmp_path / "disk", "--ssd-capacity", "16MiB", "--ssd-bucket", "1MiB"]
    options = ["--ssd-min-uses", 1, *disk, "--directory", shared_redis.url, "--cluster", path.name]

    @contextlib.contextmanager
    def serve():
        with serving(path, "--capacity", "1MiB", "--port", 0, *options) as (pid, lines):
            with httpx.Client(base_url=url_of(lines), timeout=WAIT_S) as client:
                yield pid, lines[0].split()[1], client

    return serve


VALUES = {f"x{i}": np.random.default_rng(i).bytes(10_000) for i in range(500)}


def fill(cluster) -> None:
    """Put more than the pool has room for."""
    cluster.node.members(anew=True)
    for key, value in VALUES.items():
        assert cluster.put(key, value) is PutResult.STORED
    assert cluster.get_each(list(VALUES)) == list(VALUES.values())


def test_drain_moves_the_disk_or_reports_what_stays(serve_with_disk, servers, capsys):
    with (
        serve_with_disk() as (_, name, client),
        TransferEngine() as engine,
        Node(None, engine, servers) as node,
    ):
        cluster, url = ClusterStore(node), str(client.base_url)
        fill(cluster)
        with (
            Store.create(2 << 20) as small,
            TransferEngine() as other,
            Node(small, other, servers) as too_small,
        ):
            assert main(["drain", url, name, "--wait"]) == 1
            progress = client.get("/drain").json()
            assert progress["state"] == "failed" and progress["num_on_disk"] > 100
            told = capsys.readouterr().err
            assert f"only its disk has {progress['num_on_disk']} (see --leave-disk)" in told
            assert cluster.get_each(list(VALUES)) == list(VALUES.values())
            assert main(["drain", url, name, "--wait", "--leave-disk"]) == 0
            left = client.get("/drain").json()
            assert left["state"] == "left" and left["num_left"] == 0 < left["num_on_disk"]
            assert f"left on the disk: {left['num_on_disk']} objects" in capsys.readouterr().out
            found = cluster.get_each(list(VALUES))
            # What was read just now was in memory, and has pushed out others where it went.
            assert found.count(None) >= left["num_on_disk"]
            assert too_small.name in [one.name for one in servers.members()]


def test_node_killed_while_draining_its_disk_loses_nothing(serve_with_disk, servers):
    """What was acknowledged is where it went, or still on the disk."""
    with (
        Store.create(16 << 20) as store,
        TransferEngine() as engine,
        TransferEngine() as another,
        Node(None, another, servers) as reader,
    ):
        cluster = ClusterStore(reader)
        with serve_with_disk() as (pid, name, client):
            fill(cluster)
            with Node(store, engine, servers) as node:
                assert client.post("/drain", json={"node": name}).status_code == 202
                # The pool has room for a fifth of them.
                eventually(lambda: client.get("/drain").json()["num_moved"] > 150)
                kill(pid)
                num_there = store.stats().num_ready
                assert num_there > 150
                with serve_with_disk() as (_, again, client):
                    reader.members(anew=True)
                    found = cluster.get_each(list(VALUES))
                    assert found == list(VALUES.values())
                    assert main(["drain", str(client.base_url), again, "--wait"]) == 0
                assert store.get_each(list(VALUES)) == list(VALUES.values())
                assert node.name in [one.name for one in servers.members()]


def test_serve_leaves_the_directory_on_sigterm(served, servers):
    pid, name, client = served
    assert [member.name for member in servers.members()] == [name]
    assert client.get("/health").status_code == 200
    os.kill(pid, signal.SIGTERM)
    assert ended_well(pid)
    assert servers.members() == []


def test_serve_fails_with_an_unreachable_directory(path, capfd):
    with pytest.raises(AssertionError, match="serve has ended"):
        with serving(path, "--capacity", "1MiB", "--port", 0, "--directory", "redis://127.0.0.1:1"):
            pass
    assert "127.0.0.1:1" in capfd.readouterr().err
