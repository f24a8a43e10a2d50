"""explain_path: the predicted path of a transfer, against the one that it took."""

import ctypes
import dataclasses
import platform
import signal

import numpy as np
import pytest

import mooncake_kernels as mk
from mooncake_kernels.errors import FailureKind, InvalidArgument, TransferError
from mooncake_kernels.transfer import TransferEngine

from .scripts import run_fork
from .support import addressed, engine_pair, peer_process, untouched

SIZE = 1 << 20


def test_local():
    with engine_pair("local") as pair:
        here, there = pair.regions(addressed(SIZE), untouched(SIZE))
        found = pair.near.explain_path(here, pair.peer, there.address, SIZE)
        assert found == mk.PathChoice(
            "local",
            "copy",
            here.location,
            "this process",
            ("local:0",),
            True,
            True,
            (
                f"local: the engine at {pair.far.name} is of this process",
                "it is a copy within this process",
            ),
        )
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.transport = "tcp"


@pytest.mark.parametrize("shared", [True, False])
def test_shm(shared):
    with (
        TransferEngine() as engine,
        peer_process(SIZE, shared=shared) as other,
        engine.open(other.name) as peer,
    ):
        here = engine.register(addressed(SIZE))
        found = engine.explain_path(here.address + 5, peer, other.address + 7, 100)
        assert (found.transport, found.method) == ("shm", "mapped" if shared else "process_vm")
        assert found.remote == f"process {other.process.pid}"
        assert found.lanes == ("shm:0", "shm:1")
        assert found.writable and found.readable
        assert found.reasons[0].startswith("local was not chosen: no engine of this process")
        assert f"shm: an engine that this user may use listens at {other.name}" in str(found)


def test_new_region_is_looked_up_at_the_peer():
    with engine_pair("shm") as pair:
        here = pair.near.register(addressed(SIZE))
        for memory, method in (
            (mk.shared_memory(SIZE), "mapped"),
            (untouched(SIZE), "process_vm"),
        ):
            with pair.far.register(memory) as there:
                found = pair.near.explain_path(here, pair.peer, there.address)
                assert (found.method, found.writable) == (method, True)
            found = pair.near.explain_path(here, pair.peer, there.address)
            assert not found.writable and not found.readable
            assert "the peer has not told where such a region is" in str(found)


def test_tcp_and_why_not_shm():
    with TransferEngine() as near, TransferEngine(transports=["tcp"]) as far:
        here, there = near.register(addressed(SIZE)), far.register(untouched(SIZE))
        name = f"localhost:{far.name.rpartition(':')[2]}"
        with near.open(name) as peer:
            found = near.explain_path(here, peer, there.address, 8)
        assert (found.transport, found.method, found.remote) == ("tcp", "connection", name)
        local, shm, *rest = found.reasons
        assert local == "local was not chosen: no engine of this process has that name"
        assert shm == (
            "shm was not chosen: no engine of this machine answers there (connection refused)"
        )
        assert rest == [f"tcp: 2 connections to {name}", "the bytes go by a TCP connection"]


@pytest.mark.parametrize("transports", [["tcp"], ["shm"]], ids="-".join)
def test_same_process_engine_without_local_transport(transports):
    """Its list is obeyed by whoever opens it, by its very name."""
    with TransferEngine() as near, TransferEngine(transports=transports) as far:
        here, there = near.register(addressed(SIZE)), far.register(untouched(SIZE))
        with near.open(far.name) as peer:
            assert peer.transport == transports[0]
            found = near.explain_path(here, peer, there.address, 8)
            near.write(peer, [(here.address, there.address, SIZE)]).wait()
        assert found.reasons[0] == (
            "local was not chosen: the engine of that name in this process does without it"
        )
        with TransferEngine(transports=["local"]) as only_local:
            with pytest.raises(TransferError, match="no engine of that name in this process"):
                only_local.open(far.name)


def test_within_tls(node):
    with TransferEngine(tls=node) as far, TransferEngine(tls=node, transports=["tcp"]) as near:
        here, there = near.register(addressed(64)), far.register(untouched(64))
        with near.open(far.name) as peer:
            assert "within TLS" in str(near.explain_path(here, peer, there.address))


@pytest.mark.parametrize("access", ["read", "write"])
def test_rights(pair, access):
    memory = addressed(64)
    here, there = pair.near.register(addressed(64)), pair.far.register(memory, access)
    found = pair.near.explain_path(here, pair.peer, there.address, 64)
    assert (found.writable, found.readable) == (access == "write", access == "read")
    refused = "read" if access == "write" else "write"
    assert f"a {refused} would be refused: descriptors[0] remote range" in found.reasons[-1]
    with pytest.raises(TransferError, match="peers may not"):
        getattr(pair.near, refused)(pair.peer, [(here.address, there.address, 64)]).wait()
    np.testing.assert_array_equal(memory, addressed(64))


def test_read_into_read_only_memory_is_reported_unreadable(pair):
    here, there = pair.near.register(bytes(64), "read"), pair.far.register(untouched(64))
    found = pair.near.explain_path(here, pair.peer, there.address)
    assert found.writable and not found.readable
    assert "local range" in found.reasons[-1] and "read-only memory" in found.reasons[-1]


def test_explain_path_has_no_side_effects(pair):
    memory = addressed(SIZE)
    here, there = pair.near.register(untouched(SIZE)), pair.far.register(memory)
    pair.near.explain_path(here, pair.peer, there.address, SIZE)
    np.testing.assert_array_equal(memory, addressed(SIZE))
    np.testing.assert_array_equal(here._buffer.owner, untouched(SIZE))
    counters = pair.near.stats()["peers"][pair.far.name]
    assert counters["num_requests"] == counters["num_bytes_read"] == 0
    assert pair.far.rejections() == {}


def test_invalid_arguments_are_rejected(pair):
    here = pair.near.register(addressed(64))
    explain = pair.near.explain_path
    with pytest.raises(InvalidArgument, match=r"^explain_path: local must be inside .*, got 0x"):
        explain(here.address + 64, pair.peer, 1)
    with pytest.raises(InvalidArgument, match=r"^explain_path: local must .* \+ 65 bytes$"):
        explain(here, pair.peer, 1, 65)
    with pytest.raises(InvalidArgument, match="explain_path: num_bytes must be an integer"):
        explain(here, pair.peer, 1, 0)
    with pytest.raises(InvalidArgument, match="explain_path: remote must be an address"):
        explain(here, pair.peer, here)
    with pytest.raises(InvalidArgument, match="explain_path: remote must be an integer"):
        explain(here, pair.peer, -1)
    with pytest.raises(InvalidArgument, match="explain_path: peer must be a Peer"):
        explain(here, pair.far.name, 1)
    pair.peer.close()
    with pytest.raises(InvalidArgument, match="explain_path: peer must be open"):
        explain(here, pair.peer, 1)


def test_explain_path_fails_for_stopped_and_killed_peers():
    with TransferEngine(transports=["tcp"]) as engine, peer_process(SIZE) as other:
        here = engine.register(addressed(SIZE))
        peer = engine.open(other.name)
        other.stop()
        with pytest.raises(TransferError, match=r"deadline of 0.2 s passed") as caught:
            engine.explain_path(here, peer, other.address, deadline_s=0.2)
        assert caught.value.timed_out
        other.signal(signal.SIGKILL)
        other.process.join()
        with pytest.raises(TransferError, match="connection refused") as caught:
            engine.explain_path(here, peer, other.address)
        assert caught.value.kind is FailureKind.GONE


def test_explain_path_fails_for_closed_local_peer():
    with engine_pair("local") as pair:
        here = pair.near.register(addressed(64))
        pair.far.close()
        with pytest.raises(TransferError, match="the peer's engine was closed"):
            pair.near.explain_path(here, pair.peer, 1)
        with pytest.raises(TransferError, match="the peer's engine was closed"):
            pair.near.regions(pair.peer)


# The system calls, which a filter of seccomp refuses as a kernel does that restricts ptrace.
CALLS = {"x86_64": (310, 311), "aarch64": (270, 271)}
NOT_PERMITTED = """
import ctypes

class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8),
                ("k", ctypes.c_uint32)]

class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_uint16), ("filter", ctypes.POINTER(Filter))]

filters = (Filter * 5)(
    Filter(0x20, 0, 0, 0),  # the number of the call
    Filter(0x15, 1, 0, read),
    Filter(0x15, 0, 1, write),
    Filter(0x06, 0, 0, 0x00050001),  # EPERM
    Filter(0x06, 0, 0, 0x7FFF0000),  # allowed
)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, ctypes.byref(Program(5, filters)), 0, 0) == 0, "PR_SET_SECCOMP"

with TransferEngine(transports=["shm"]) as near, TransferEngine() as far:
    here = near.register(np.full(64, 7, np.uint8))
    memory = np.zeros(64, np.uint8)
    there = far.register(memory)
    with near.open(far.name) as peer:
        found = near.explain_path(here, peer, there.address, 64)
        assert (found.transport, found.method) == ("shm", "connection"), found
        assert "process_vm_readv: Operation not permitted" in found.reasons[-1], found
        near.write(peer, [(here.address, there.address, 64)]).wait()
        assert (memory == 7).all()
"""


@pytest.mark.skipif(platform.machine() not in CALLS, reason="the numbers of its system calls")
def test_memory_that_the_kernel_closes_goes_by_the_connection():
    # PR_GET_SECCOMP fails where the kernel has none.
    if ctypes.CDLL(None).prctl(21, 0, 0, 0, 0) < 0:
        pytest.skip("the kernel has no seccomp")
    numbers = "read, write = {}, {}".format(*CALLS[platform.machine()])
    assert run_fork(numbers + NOT_PERMITTED) == (0, "")
