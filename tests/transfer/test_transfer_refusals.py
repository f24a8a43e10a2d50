"""Forbidden operations are refused with a clear message, and have changed nothing."""

import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from mooncake_kernels import _host
from mooncake_kernels.errors import FailureKind, InvalidArgument, TransferError, Unavailable
from mooncake_kernels.transfer import TransferEngine

from .support import UNTOUCHED, addressed, untouched

SIZE = 4096


@pytest.fixture
def engine():
    with TransferEngine() as engine:
        yield engine


@pytest.fixture
def rows(pair):
    """(near region, far region, and a function that makes a descriptor of offsets)."""
    near, far = pair.regions(addressed(2 * SIZE), untouched(SIZE))
    return near, far, lambda n, f, size: (near.address + n, far.address + f, size)


def test_transfer_error_survives_pickling():
    cause, kind = "deadline of 3 s passed", FailureKind.TIMED_OUT
    error = TransferError("10.0.0.2:4711", cause, 5, 10, kind, True, np.array([True, False]))
    copy = pickle.loads(pickle.dumps(error))
    assert copy.delivered.tolist() == [True, False]
    copy.delivered = error.delivered
    assert (str(copy), vars(copy)) == (str(error), vars(error))
    assert f"{copy.kind}" == "FailureKind.TIMED_OUT"


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize(
    ("far_offset", "size"),
    [(-1, 10), (SIZE, 1), (SIZE - 5, 6), (1 << 40, 8), (-(1 << 20), 1), (SIZE // 2, SIZE)],
)
def test_remote_range_outside_the_region_is_refused(pair, rows, direction, far_offset, size):
    _, far, row = rows
    size_of_good = 16
    call = getattr(pair.near, direction)
    good = row(0, 64, size_of_good)
    ticket = call(pair.peer, [good, row(SIZE, far_offset, size)], notify=b"never")
    message = rf"descriptors\[1\] remote range {far.address + far_offset:#x} \+ {size} bytes is not"
    with pytest.raises(TransferError, match=message) as caught:
        ticket.wait()
    assert (caught.value.peer, caught.value.kind) == (pair.far.name, FailureKind.REFUSED)
    assert caught.value.num_bytes_done == 0
    assert caught.value.num_bytes_total == size_of_good + size
    assert (far._buffer.owner == UNTOUCHED).all(), "the good descriptor was carried out"
    pair.near.write(pair.peer, [], notify=b"next").wait()
    assert pair.far.receive_notifications() == [(pair.near.name, b"next")]
    call(pair.peer, [good]).wait()  # the peer is still good


def test_request_of_many_batches_is_checked_before_moving(pair):
    size, count = 64, 30_000
    near, far = pair.regions(addressed(count * size), untouched((count + 1) * size))
    remote = far.address + np.arange(count, 0, -1) * size  # nothing to merge
    remote[-1] = far.address - 1
    local = near.address + np.arange(count) * size
    with pytest.raises(TransferError, match=rf"descriptors\[{count - 1}\] remote range") as caught:
        pair.near.write_blocks(pair.peer, local, remote, size, notify=b"never").wait()
    assert caught.value.num_bytes_done == 0
    assert (far._buffer.owner == UNTOUCHED).all()
    pair.near.write(pair.peer, [], notify=b"next").wait()
    assert pair.far.receive_notifications() == [(pair.near.name, b"next")]


def test_notification_after_a_refused_request_arrives(pair, rows):
    """The refusal is of the request before, and may be known only when the next one is sent."""
    _, _, row = rows
    for round_ in range(30):
        refused = pair.near.write(pair.peer, [row(0, 1 << 30, 64)], notify=b"refused")
        good = pair.near.write(pair.peer, [row(0, 0, 64)], notify=b"good %d" % round_)
        with pytest.raises(TransferError, match="region"):
            refused.wait()
        good.wait()
        assert pair.far.receive_notifications(1) == [(pair.near.name, b"good %d" % round_)]


def test_notifications_without_a_receiver(pair, rows):
    _, _, row = rows
    pair.near.write(pair.peer, [], notify=b"in time").wait()
    assert pair.far.refuse_notifications() == [(pair.near.name, b"in time")]
    late = pair.near.write(pair.peer, [row(0, 0, 8)], notify=b"late")
    with pytest.raises(TransferError, match="receives no notifications any more") as caught:
        late.wait()
    assert caught.value.only_notification_missing and caught.value.kind is FailureKind.REFUSED
    assert pair.far.receive_notifications() == [], "from now on there is somebody again"
    pair.near.write(pair.peer, [], notify=b"again").wait()
    assert pair.far.receive_notifications(20.0) == [(pair.near.name, b"again")]
    with ThreadPoolExecutor(1) as thread:
        thread.submit(int).result()  # it runs
        receiving = thread.submit(pair.far.receive_notifications, 0.5)
        time.sleep(0.1)
        pair.far.refuse_notifications()
        assert receiving.result() == []
    with pytest.raises(TransferError, match="receives no notifications any more"):
        pair.near.write(pair.peer, [], notify=b"late").wait()
    pair.far.close()
    with pytest.raises(InvalidArgument, match="refuse_notifications: the engine .* is closed"):
        pair.far.refuse_notifications()


def test_gap_between_two_regions_is_refused(pair):
    memory = untouched(3 * SIZE)
    near = pair.near.register(addressed(3 * SIZE))
    left, _ = pair.far.register(memory[:SIZE]), pair.far.register(memory[2 * SIZE :])
    for start, size in [(SIZE, 1), (SIZE - 1, 2), (0, 3 * SIZE), (2 * SIZE - 1, 2)]:
        with pytest.raises(TransferError, match="is not inside a registered region"):
            pair.near.write(pair.peer, [(near.address, left.address + start, size)]).wait()
    assert (memory == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("access", "direction", "message"),
    [("read", "write", "peers may not write"), ("write", "read", "peers may not read")],
)
def test_access_rights(pair, access, direction, message):
    near, memory = pair.near.register(untouched(SIZE)), untouched(SIZE)
    far = pair.far.register(memory, access)
    assert far.access == access
    message = rf"descriptors\[0\] remote range .* {message}"
    with pytest.raises(TransferError, match=message) as caught:
        getattr(pair.near, direction)(pair.peer, [(near.address, far.address, 1)]).wait()
    assert caught.value.kind is FailureKind.REFUSED
    allowed = "read" if direction == "write" else "write"
    getattr(pair.near, allowed)(pair.peer, [(near.address, far.address, 1)]).wait()


@pytest.mark.parametrize("direction", ["write", "read"])
def test_local_range_outside_the_region_is_rejected(pair, rows, direction):
    _, far, row = rows
    bad = row(SIZE + 1, 0, SIZE)
    message = (
        rf"^{direction}: descriptors\[3\] local range {bad[0]:#x} \+ {SIZE} bytes "
        "is not inside a registered region$"
    )
    with pytest.raises(InvalidArgument, match=message):
        getattr(pair.near, direction)(pair.peer, [row(0, 0, 1)] * 3 + [bad])
    assert (far._buffer.owner == UNTOUCHED).all()


def test_read_only_memory_is_never_written(pair):
    constant = bytes(addressed(SIZE))
    near, far = pair.near.register(constant, "read"), pair.far.register(untouched(SIZE))
    with pytest.raises(InvalidArgument, match=r"local range .* is in read-only memory"):
        pair.near.read(pair.peer, [(near.address, far.address, 1)])
    pair.near.write(pair.peer, [(near.address, far.address, SIZE)]).wait()
    assert far._buffer.owner.tobytes() == constant == bytes(addressed(SIZE))


@pytest.mark.parametrize(
    ("descriptors", "message"),
    [
        ([], "write: descriptors must not be empty unless notify is given"),
        ([(0, 0, 0)], r"write: descriptors\[0\] num_bytes must be positive, got 0"),
        ([(0, 0, -1)], r"write: descriptors must be \[n, 3\] .* from 0 to 2\*\*64 - 1, got -1"),
        ([(0.5, 0, 1)], r"write: descriptors must be \[n, 3\] .*, got \[\(0.5, 0, 1\)\]"),
        (np.zeros((1, 3)), r"write: descriptors must be \[n, 3\] .*, got float64"),
        (None, r"write: descriptors must be \[n, 3\] .* integers, got None"),
        (5, r"write: descriptors must be \[n, 3\] .* integers, got 5"),
        (
            [(np.uint64(1), 0, -1)],
            r"write: descriptors must be .*, got \[\(np.uint64\(1\), 0, -1\)\]",
        ),
        ([(10**5000, 0, 1)], r"write: descriptors must be \[n, 3\] .*, got "),
        (torch.zeros(1, 3, dtype=torch.bfloat16), r"write: descriptors must be .*, got tensor"),
        ([(1 << 63, 0, 1)], r"write: descriptors\[0\] local range 0x80{15} \+ 1 bytes"),
        ([(0, 0)], r"write: descriptors must be \[n, 3\] .* got shape \(1, 2\)"),
        ([(0, 0, 1), (0, 0)], r"write: descriptors must be \[n, 3\]"),
        ([(0, 0, 1 << 70)], r"write: descriptors must be \[n, 3\]"),
        ([("a", "b", "c")], r"write: descriptors must be \[n, 3\]"),
        (
            np.array([[2**64 - 1, 0, 2]], np.uint64),
            r"write: descriptors\[0\] local range 0xf{16} \+ 2 bytes",
        ),
    ],
)
def test_bad_descriptors(pair, descriptors, message):
    with pytest.raises(InvalidArgument, match=message):
        pair.near.write(pair.peer, descriptors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": [1, 2]}, "must be equally long, got 1, 1 and 2"),
        (
            {"remote_addresses": [[1]]},
            r"remote_addresses must be \[n\] integers, got shape \(1, 1\)",
        ),
        (
            {"local_addresses": torch.zeros(1)},
            r"local_addresses must be \[n\] integers .*, got float32",
        ),
        ({"sizes": -4}, r"sizes must be an integer in 0 to .*, got -4"),
        ({"sizes": True}, "sizes must be an integer in 0 to .*, got True"),
        ({"deadline_s": 0}, "deadline_s must be a finite number of seconds"),
        ({"deadline_s": float("nan")}, "deadline_s must be a finite number of seconds"),
        (
            {"deadline_s": float("inf")},
            "deadline_s must be a finite number of seconds >= 1e-06, got inf",
        ),
        ({"deadline_s": "2"}, "deadline_s must be a finite number of seconds >= 1e-06, got '2'"),
        (
            {"deadline_s": 10**400},
            "deadline_s must be a finite number of seconds >= 1e-06, got 1000",
        ),
        ({"deadline_s": 10**5000}, "deadline_s must be a finite number of seconds >= 1e-06, got "),
        ({"notify": "text"}, "notify must be bytes, got str"),
        ({"notify": bytes(65537)}, "notify must be at most 65536 bytes, got 65537"),
        ({"peer": "127.0.0.1:1"}, "peer must be a Peer that this engine opened"),
    ],
)
def test_bad_arguments_of_write_blocks(pair, change, message):
    good = {"peer": pair.peer, "local_addresses": [8], "remote_addresses": [8], "sizes": 1}
    with pytest.raises(InvalidArgument, match=f"^(write_blocks|write): .*({message})"):
        pair.near.write_blocks(**(good | change))


def test_numpy_scalars_are_accepted(pair):
    near, far = pair.regions(addressed(SIZE), untouched(SIZE))
    row = (np.uint64(near.address), far.address, np.int64(SIZE))  # numpy would make floats of it
    for deadline_s in (np.float32(20), np.int64(20)):
        far._buffer.owner[:] = UNTOUCHED
        pair.near.write(pair.peer, [row], deadline_s=deadline_s).wait(np.float32(20))
        assert (far._buffer.owner == addressed(SIZE)).all()


def test_peer_of_another_engine_is_rejected(pair):
    with pytest.raises(InvalidArgument, match="peer must be a Peer that this engine opened"):
        pair.far.write(pair.peer, [(1, 1, 1)])


@pytest.mark.parametrize(
    "name",
    ["", "host", "host:", ":80", "host:port", "host:65536", "host:-1", "a b:1", "::1", "[]:1",
     "h\0:1", "h\ud800:1", "host:1\n", "http://h:1", "\u00e9:1", "x" * 300 + ":1", "host:0080000",
     None, 7],
)  # fmt: skip
def test_malformed_names_are_rejected(engine, name):
    got = "'h.x00:1'$" if name == "h\0:1" else ""
    with pytest.raises(InvalidArgument, match=f'open: name must be "host:port", got {got}'):
        engine.open(name)
    if name is not None:
        with pytest.raises(InvalidArgument, match=f'Engine: name must be "host:port", got {got}'):
            TransferEngine(name)


def test_unusable_names_are_rejected(engine):
    with pytest.raises(InvalidArgument, match="name must have a port other than 0"):
        engine.open("127.0.0.1:0")
    with pytest.raises(Unavailable, match=r"cannot resolve no-such-host.invalid"):
        engine.open("no-such-host.invalid:80")
    with pytest.raises(OSError, match=f"bind to {engine.name}"):
        TransferEngine(engine.name)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "224.0.0.1", "255.255.255.255", "127.255.255.255", "[::]", "[ff02::1]",
     "[::ffff:0.0.0.0]", "[::ffff:224.0.0.1]", "[::ffff:255.255.255.255]"],
)  # fmt: skip
def test_unreachable_bind_addresses_are_rejected(host):
    with pytest.raises(InvalidArgument, match="name must be an address at which peers reach"):
        TransferEngine(f"{host}:0")


TRANSPORTS = "must be .* local, shm, cuda_ipc, rdma, tcp and file"


@pytest.mark.parametrize(
    ("name", "message", "wrongs"),
    [
        ("metadata", 'must be "p2p", .* got no URL', ["etcd"]),
        ("metadata", "must be", [np.zeros(2)]),
        ("transports", TRANSPORTS, [["RDMA"], [], "tcp", ["tcp", "nvlink"], 5, [["tcp"]], {}]),
        ("transports", TRANSPORTS, [np.zeros(2)]),
        ("max_connections", "must be an integer", [0, -1, 1.5, "many", True]),
        ("spin_us", "must be an integer", [-1, 0.5, 1_000_001, None]),
        ("reached_at", "must", ["10.0.0.1:4711", 7, [7], ["here"], ["here:0"]]),
        ("tls", "must be a Tls, got dict", [{}]),
        ("checksum", "must be True or False", [3]),
    ],
)
def test_bad_arguments_of_the_engine(name, message, wrongs):
    secret = b"0123456789abcdef" if name == "reached_at" else None
    for wrong in wrongs:
        with pytest.raises(InvalidArgument, match=f"TransferEngine: {name} {message}"):
            TransferEngine(secret=secret, **{name: wrong})


def test_cuda_ipc_alone_needs_a_driver(monkeypatch):
    monkeypatch.setattr(_host, "missing_cuda_driver", lambda: "libcuda.so.1: no such file")
    with pytest.raises(Unavailable, match="^TransferEngine: cuda_ipc alone .*: libcuda.so.1: no"):
        TransferEngine(transports=["cuda_ipc"])
    TransferEngine(transports=["shm", "cuda_ipc"]).close()


def test_a_named_transport_does_not_fall_back(engine):
    with TransferEngine(transports=["local"]) as local_only:
        with pytest.raises(TransferError, match="no engine of that name in this process"):
            local_only.open("127.0.0.1:9")
        assert local_only.open(engine.name).transport == "local"
        with pytest.raises(TransferError, match="no engine of that name in this process"):
            local_only.open(engine.name.replace("127.0.0.1", "localhost"))
        with TransferEngine(transports=["tcp"]) as tcp_only:
            assert tcp_only.open(engine.name).transport == "tcp"
            with pytest.raises(TransferError, match="connection refused"):
                tcp_only.open(local_only.name)
    assert engine.open(engine.name).transport == "local"


def test_bad_registrations(engine):
    memory = np.zeros(SIZE, np.uint8)
    region = engine.register(memory[16:64])
    assert (region.num_bytes, region.location, region.access) == (48, "cpu:0", "read_write")
    assert region.address == memory.ctypes.data + 16
    for part in (memory, memory[16:17], memory[:17], memory[63:], memory[20:30]):
        with pytest.raises(InvalidArgument, match="buffer must not overlap a registered one"):
            engine.register(part)
    engine.register(memory[:16])
    engine.register(memory[64:])
    region.close()
    engine.register(memory[20:30])
    with pytest.raises(InvalidArgument, match="buffer must not be empty"):
        engine.register(b"", "read")
    with pytest.raises(InvalidArgument, match='access must be "read" for read-only memory'):
        engine.register(b"constant")
    with pytest.raises(InvalidArgument, match=r"access must be one of .*, got 'rw'"):
        engine.register(memory, "rw")
    with pytest.raises(InvalidArgument, match=r"access must be one of .*, got \[\]"):
        engine.register(memory, [])
    with pytest.raises(InvalidArgument, match="must be packed"):
        engine.register(torch.zeros(4, 4).T)
    with pytest.raises(InvalidArgument, match="register: buffer must be .*, got int"):
        engine.register(5)
    with pytest.raises(InvalidArgument, match=r"must be .*, got ndarray \(cannot include dtype"):
        engine.register(np.zeros(3, "datetime64[s]"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a driver is here")
def test_cuda_memory_needs_the_driver(engine):
    class OnTheGpu:
        __cuda_array_interface__ = {  # noqa: RUF012 - an instance of numba's has it like this
            "shape": (4,), "typestr": "|u1", "data": (0x1000, False), "version": 3,
        }  # fmt: skip

    reasons = "(libcuda.so.1|built without cuda.h)"
    with pytest.raises(Unavailable, match=f"register: memory of cuda:0: {reasons}"):
        engine.register(OnTheGpu())
