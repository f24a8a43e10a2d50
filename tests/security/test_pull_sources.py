"""What a peer says of names: no file is opened and nobody is connected to on its word."""

import ast
import os
import socket
import stat
from pathlib import Path

import numpy as np
import pytest

import mooncake_kernels as mk
import mooncake_serving
from mooncake_kernels import metadata
from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.rpc import Peers, Refused
from mooncake_serving.store.directory import EmbeddedDirectory, Member

from ..store.cluster.support import Hosts, value
from ..transfer.handshake import Hello, begin
from ..transfer.support import connect, ended
from .stranger import Stranger, key_of, place_of

pytest.importorskip("msgspec")

PRIVATE = b"TOP-SECRET-PRIVATE-KEY-MATERIAL|" * 200
SECRET = b"0123456789abcdef" * 2


@pytest.fixture(params=[None, SECRET], ids=["no_secret", "secret"])
def secret(request):
    return request.param


@pytest.fixture
def attacked(secret):
    hosts = Hosts(EmbeddedDirectory())
    yield hosts.make("attacked", secret=secret)
    hosts.close()


@pytest.fixture
def stranger(attacked, secret):
    stranger = Stranger(attacked.node.name, secret)
    yield stranger
    stranger.close()


@pytest.fixture(params=["regular", "device", "pipe", "folder"])
def private(request, tmp_path):
    """Something that only this user may read, or that one waits for."""
    path = tmp_path / "private"
    if request.param == "regular":
        path.write_bytes(PRIVATE)
        path.chmod(0o600)
    elif request.param == "folder":
        path.mkdir()
    elif request.param == "pipe":
        os.mkfifo(path)
    else:
        try:
            os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(7, 0))
        except PermissionError:
            pytest.skip("only root may make a block device")
    return path


def opened_nothing(engine: TransferEngine) -> bool:
    return "file" not in engine.stats()["transports"]


def has_nothing(host) -> bool:
    pool = host.store.pool
    return PRIVATE[:32] not in bytes(pool.memory().numpy()) and not len(
        host.store.list_objects()[0]
    )


def test_stranger_cannot_make_a_node_read_files(attacked, stranger, private):
    source = f"file:{private}"
    for places in ([place_of(0, 3000)], []):
        answer = stranger.pull(1, source, places)
        assert isinstance(answer, Refused) and "sender must be a member" in answer.reason
    assert has_nothing(attacked) and opened_nothing(attacked.engine)


def test_member_cannot_make_a_node_read_files(attacked, stranger, private):
    attacked.node.directory.join(Member(stranger.engine.name, "elsewhere"), 60.0)
    source = f"file:{private}"
    answer = stranger.pull(1, source, [place_of(0, 3000)])
    assert isinstance(answer, Refused) and "source must be its sender" in answer.reason
    assert stranger.pull(1, source, []).results == [f"{source} is no member"]
    assert has_nothing(attacked) and opened_nothing(attacked.engine)


@pytest.mark.parametrize("is_member", [False, True])
def test_pull_never_connects_to_a_third_party(attacked, stranger, is_member):
    if is_member:
        attacked.node.directory.join(Member(stranger.engine.name, "elsewhere"), 60.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        name = f"127.0.0.1:{other.getsockname()[1]}"
        assert isinstance(stranger.pull(1, name, [place_of(0, 3000)]), Refused)
        answer = stranger.pull(1, name, [])
        if is_member:
            assert answer.results == [f"{name} is no member"]
        else:
            assert isinstance(answer, Refused)
        with pytest.raises(BlockingIOError):
            other.accept()
    assert has_nothing(attacked)


def test_stranger_cannot_store_objects(attacked, stranger):
    answer = stranger.pull(1, stranger.engine.name, [place_of(stranger.place, 4096)])
    assert isinstance(answer, Refused) and has_nothing(attacked)
    attacked.node.directory.join(Member(stranger.engine.name, "elsewhere"), 60.0)
    assert stranger.pull(1, stranger.engine.name, [place_of(stranger.place, 4096)]).results == [0]
    assert attacked.store.has_keys(np.frombuffer(key_of(1), np.uint64).reshape(1, 2)).all()


def test_file_name_in_directory_is_never_opened(attacked, private):
    directory, name = attacked.node.directory, f"file:{private}"
    directory.join(Member(name, "elsewhere", "its pool", 1 << 30, 1 << 30), 60.0)
    directory.publish("its pool", attacked.store.keyspace.keys(["a"]))
    attacked.node.members(anew=True)
    assert attacked.cluster.get("a") is None
    assert attacked.cluster.put("b", value(1)) == mk.PutResult.STORED
    assert attacked.node.client.pull(attacked.node.name, np.zeros((1, 2), np.uint64), name) != [0]
    assert opened_nothing(attacked.engine)


def test_file_name_from_metadata_server_is_never_opened(tmp_path, monkeypatch):
    path = tmp_path / "private"
    path.write_bytes(PRIVATE)
    with TransferEngine() as engine:
        entry = metadata.Entry("victim", f"file:{path}", instance=5)
        monkeypatch.setattr(engine._names._metadata, "check_name", lambda op, name: name)
        monkeypatch.setattr(engine._names._metadata, "lookup", lambda name: entry)
        with pytest.raises((InvalidArgument, TransferError)):
            engine.open("victim")
        assert opened_nothing(engine)


def test_file_names_are_opened_only_with_allow_file(tmp_path):
    path = tmp_path / "private"
    path.write_bytes(PRIVATE)
    with TransferEngine() as engine:
        for name in (f"file:{path}", "file:/nowhere", "file:relative"):
            with pytest.raises(InvalidArgument, match="name must be an engine's"):
                engine.open(name, allow_file=False)
            with pytest.raises(TransferError, match="name must be an engine's"):
                Peers(engine).lease(name, 5.0)
        with pytest.raises(InvalidArgument, match="allow_file must be True or False"):
            engine.open(f"file:{path}", allow_file=1)
        assert opened_nothing(engine)
        with engine.open(f"file:{path}") as peer:  # a user's own choice
            assert peer.transport == "file"


def test_hello_with_a_file_name_is_rejected():
    """Its notifications would be answered by opening the file."""
    with TransferEngine(transports=["tcp"]) as engine, connect(engine.name) as connection:
        with pytest.raises((EOFError, ConnectionError)):
            begin(connection, hello=Hello(name=b"file:/etc/passwd"))
        assert ended(connection)
        assert engine.receive_notifications() == []


def opening_calls() -> list[tuple[str, ast.Call]]:
    """Calls of ``open`` in the packages that look like an engine's."""
    found = []
    for package in (mk, mooncake_serving):
        for path in Path(package.__file__).parent.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr == "open"
                    and any(word in ast.unparse(node.func.value) for word in ("engine", "transfer"))
                ):
                    found.append((path.name, node))
    return found


def test_every_open_call_states_allow_file():
    calls = {
        (name, ast.unparse(node.func)): {word.arg: word.value for word in node.keywords}
        for name, node in opening_calls()
        if ast.unparse(node.func) != "engine.open" or name != "names.py"  # the host's, of engines
    }
    assert len(calls) >= 6
    for place, words in calls.items():
        assert "allow_file" in words, place
        allowed = ast.unparse(words["allow_file"]) == "True"
        # The tier opens its own; NIXL's API those that this process registers.
        assert allowed == (place[0] in ("disk.py", "files.py")), place
