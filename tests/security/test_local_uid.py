"""The socket within the machine: of an engine's own user, and of those that it lists."""

import contextlib
import ctypes
import os
import socket

import pytest

from mooncake_kernels import config
from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import TransferEngine

from ..transfer.certificates import authority
from ..transfer.handshake import NO_SECRET, NO_TLS
from ..transfer.secret import OURS, rejections
from ..transfer.support import WAIT_S, addressed, eventually, untouched
from .other_user import ENGINE, NOBODY, heard_from, needs_root, result_of, start

SIZE = 4096
ANOTHER_USER = "a process of another user of this machine (local_users)"
KINDS = ["nothing", "secret", "secret_only", "tls", "tls_and_secret"]

pytestmark = needs_root


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(params=KINDS)
def options(request, ca):
    secret, tls = {"secret": OURS}, {"tls": ca.tls("node")}
    return {
        "nothing": {},
        "secret": secret,
        "secret_only": {**secret, "secret_only": True},
        "tls": tls,
        "tls_and_secret": {**secret, **tls},
    }[request.param]


CONNECT = """
with within(arguments["name"]) as end:
    heard = b""
    with contextlib.suppress(OSError):
        if arguments["speaks"]:
            end.sendall(Hello().packed())
        while part := end.recv(1 << 10):
            heard += part
said(heard.hex())
"""


@pytest.mark.parametrize("speaks", [False, True])
def test_other_users_are_rejected(options, speaks):
    with TransferEngine(**options) as engine:
        assert result_of(NOBODY, CONNECT, name=engine.name, speaks=speaks) == ""
        assert rejections(engine) == {ANOTHER_USER: 1}


def test_root_is_rejected_by_another_users_engine():
    script = """
with TransferEngine() as engine:
    said(engine.name)
    sys.stdin.readline()
    said(engine.rejections())
"""
    process = start(NOBODY, script, imports=ENGINE)
    try:
        name = heard_from(process)
        with socket.socket(socket.AF_UNIX) as end:
            end.settimeout(WAIT_S)
            end.connect("\0mooncake_kernels/" + name.replace(":", "/"))
            with contextlib.suppress(ConnectionResetError):
                assert end.recv(1) == b""
        with TransferEngine() as engine, engine.open(name) as peer:
            assert peer.transport == "tcp"  # nor is spoken to
        process.stdin.write("\n")
        process.stdin.flush()
        assert set(heard_from(process)) == {ANOTHER_USER}
    finally:
        process.kill()
        process.communicate()


LISTED = """
with within(arguments["name"]) as end:
    mine = Hello(flags=arguments["flags"])
    end.sendall(mine.packed())
    theirs = hear_hello(end)
    verdict, _ = hear_welcome(end)
    read = None
    if verdict == 0:
        import struct
        address = arguments["address"]
        end.sendall(struct.pack("<IIQQQ32x", 2, 1, 1, 0, 4) + struct.pack("<QQ", address, 4))
        read = receive_exactly(end, 68)[64:].hex()
        end.sendall(struct.pack("<IIQQQ32x", 6, 0, 1, 0, 0))  # its memory
        with contextlib.suppress(ConnectionResetError):
            assert end.recv(1) == b""
said([verdict, read])
"""


def test_listed_users_must_authenticate_like_remote_hosts(options):
    with TransferEngine(local_users=[NOBODY], **options) as engine:
        region = engine.register(addressed(SIZE))
        verdict, read = result_of(NOBODY, LISTED, name=engine.name, flags=0, address=region.address)
        if not options:
            assert read == addressed(4).tobytes().hex()
            assert engine.rejections() == {}
            return
        assert read is None
        assert verdict == (NO_SECRET if "secret" in options else NO_TLS)
        if "secret" in options and "secret_only" not in options:
            verdict, _ = result_of(NOBODY, LISTED, name=engine.name, flags=1, address=0)
            assert verdict == NO_TLS  # the secret alone is not enough


SHARE = """
secret = arguments["secret"] and arguments["secret"].encode()
with TransferEngine(transports=["shm"], secret=secret, local_users=[0]) as engine:
    memory = np.zeros(4096, np.uint8)
    region = engine.register(memory)
    with engine.open(arguments["name"]) as peer:
        engine.read(peer, [(region.address, arguments["address"], 4096)]).wait()
        path = engine.explain_path(region.address, peer, arguments["address"])
        said([peer.transport, memory.tobytes().hex(), path.method])
"""


@pytest.mark.parametrize("secret", [None, OURS])
def test_mutually_listed_users_share_memory(secret):
    with TransferEngine(secret=secret, local_users=[NOBODY]) as engine:
        region = engine.register(addressed(SIZE))
        got = result_of(
            NOBODY,
            SHARE,
            imports=ENGINE,
            name=engine.name,
            secret=secret and secret.decode(),
            address=region.address,
        )
        assert got == ["shm", addressed(SIZE).tobytes().hex(), "connection"]
        assert engine.rejections() == {}


SQUAT = """
squatted = socket.socket(socket.AF_UNIX)
squatted.bind("\\0mooncake_kernels/" + arguments["name"].replace(":", "/"))
squatted.listen()
said("here")
heard = b""
squatted.settimeout(60)
with contextlib.suppress(OSError):
    while True:
        end, _ = squatted.accept()
        if end.recv(1) != b"":
            heard += b"x"
        said(len(heard))
"""


@pytest.mark.parametrize("secret", [None, OURS])
def test_squatted_socket_name_falls_back_to_tcp(secret):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        name = f"127.0.0.1:{taken.getsockname()[1]}"
    process = start(NOBODY, SQUAT, name=name)
    try:
        assert heard_from(process) == "here"
        with TransferEngine(name, secret=secret) as far:
            region = far.register(untouched(SIZE))
            with TransferEngine(transports=["shm"], secret=secret) as bound_to_it:
                with pytest.raises(TransferError, match="belongs to another user"):
                    bound_to_it.open(name, deadline_s=WAIT_S)
            assert heard_from(process) == 0  # it has heard nothing
            with TransferEngine(transports=["shm", "tcp"], secret=secret) as other:
                source = other.register(addressed(SIZE))
                with other.open(name) as peer:
                    assert peer.transport == "tcp"
                    assert heard_from(process) == 0
                    other.write(peer, [(source.address, region.address, SIZE)]).wait()
            assert (region._buffer.owner == addressed(SIZE)).all()
    finally:
        process.kill()
        process.communicate()


def test_local_users_setting_and_invalid_lists():
    with config.override(local_users=(NOBODY,)), TransferEngine() as engine:
        region = engine.register(addressed(SIZE))
        result_of(NOBODY, LISTED, name=engine.name, flags=0, address=region.address)
        assert engine.rejections() == {}
    for users in (7, "7", [-1], [2**32 - 1], [True], [1.0], {"a": 1}):
        with pytest.raises(InvalidArgument, match="local_users must be a list of user ids in"):
            TransferEngine(local_users=users)


def test_overflow_uid_in_user_namespace_is_rejected(tmp_path):
    """A process there that runs as an unmapped user is shown as the same 65534 as all others."""
    script = """
if child := os.fork():  # which has one thread, whatever was imported: others cannot unshare
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())
with TransferEngine(local_users=[65534]) as engine:
    with socket.socket(socket.AF_UNIX) as end:
        end.connect("\\0mooncake_kernels/" + engine.name.replace(":", "/"))
        end.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert end.recv(1) == b""
    said([os.geteuid(), engine.rejections()])
"""
    probe = os.fork()
    if probe == 0:
        os._exit(ctypes.CDLL(None).unshare(0x10000000) != 0)
    if os.waitstatus_to_exitcode(os.waitpid(probe, 0)[1]):
        pytest.skip("this machine does not allow user namespaces")
    got = result_of(NOBODY, script, imports="import ctypes" + ENGINE)
    assert got == [NOBODY, {ANOTHER_USER: 1}]


def test_rejected_connections_take_no_slot(options):
    with TransferEngine(**options) as engine:
        script = """
for _ in range(600):
    with contextlib.suppress(OSError), within(arguments["name"]) as end:
        end.recv(1)
said("done")
"""
        assert result_of(NOBODY, script, name=engine.name) == "done"
        eventually(lambda: engine.rejections() == {ANOTHER_USER: 600})
