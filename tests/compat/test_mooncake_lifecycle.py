"""initialize, and the queries about an engine as a whole."""

import gc
import json
import socket
import subprocess
import sys

import pytest

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.transfer import nics
from mooncake_serving.compat.mooncake import TransferEngine

from ..metadata.support import free_port
from .support import SIZE, in_threads, refused, side, start, untouched


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.delenv("MC_TRANSFER_TIMEOUT", raising=False)
    engine = TransferEngine()
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("hostname", "host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.2:0", "127.0.0.2"),
        ("localhost", "localhost"),
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
        ("[::1]:0", "[::1]"),
    ],
)
def test_hostname_is_combined_with_the_assigned_port(engine, hostname, host):
    start(engine, hostname)
    port = engine.get_rpc_port()
    assert engine.get_engine().name == f"{host}:{port}"
    with side(untouched(SIZE)) as other:  # vLLM puts no brackets around an address
        assert other.engine.send_probe(f"{host.strip('[]')}:{port}") == 0
        assert other.engine.send_probe(f"{host}:{port}") == 0


def test_taken_port_is_replaced_with_a_free_one(engine, caplog):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        start(engine, f"127.0.0.1:{port}")
        assert engine.get_rpc_port() not in (0, port)
        assert f"127.0.0.1:{port} is taken" in caplog.text
    again = start(TransferEngine(), f"127.0.0.1:{port}")
    assert again.get_rpc_port() == port
    again.close()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("", "P2PHANDSHAKE", "tcp", ""), "host:port"),
        (("0.0.0.0", "P2PHANDSHAKE", "tcp", ""), "at which peers reach this engine"),
        (("127.0.0.1:x", "P2PHANDSHAKE", "tcp", ""), "host:port"),
        (("127.0.0.1:123:npu_0", "P2PHANDSHAKE", "tcp", ""), "host:port"),
        (("no.such.host.invalid", "P2PHANDSHAKE", "tcp", ""), "cannot resolve"),
        (("192.0.2.1", "P2PHANDSHAKE", "tcp", ""), "192.0.2.1"),
        ((None, "P2PHANDSHAKE", "tcp", ""), "local_hostname must be a string"),
        (
            ("127.0.0.1", "p2phandshake", "tcp", ""),
            r'must be "P2PHANDSHAKE", redis://.* no client of etcd here, got etcd://p2p',
        ),
        (("127.0.0.1", "10.0.0.1:2379", "tcp", ""), "got etcd://10.0.0.1:2379"),
        (("127.0.0.1", "etcd://10.0.0.1:2379", "tcp", ""), "got etcd://10.0.0.1:2379"),
        (("127.0.0.1", "etcd://u:hidden@h:1", "tcp", ""), r"got etcd://\*\*\*@h:1"),
        (("127.0.0.1", "redis://127.0.0.1:1", "tcp", ""), "metadata server redis://127.0.0.1:1"),
        (("127.0.0.1", "http://127.0.0.1:1/metadata", "tcp", ""), "server http://127.0.0.1:1/meta"),
        (("127.0.0.1", "redis://h:x", "tcp", ""), "metadata must be .* with a port that is none"),
        (("127.0.0.1", None, "tcp", ""), "metadata_server must be a string"),
        (("127.0.0.1", "P2PHANDSHAKE", "efa", ""), "'efa'; MC_FORCE_TCP=1 makes any"),
        (("127.0.0.1", "P2PHANDSHAKE", "nvlink", ""), "protocol must be one of tcp, rdma for now"),
        (("127.0.0.1", "P2PHANDSHAKE", "", ""), "protocol must be one of tcp"),
        (("127.0.0.1", "P2PHANDSHAKE", None, ""), "protocol must be a string"),
        (("127.0.0.1", "P2PHANDSHAKE", "tcp", 5), "device_name must be a string"),
        (
            ("127.0.0.1", "P2PHANDSHAKE", "rdma", "no_such_0"),
            r"device_name must be RDMA devices of this machine, .* got 'no_such_0'",
        ),
    ],
)
def test_arguments_that_initialize_rejects(engine, caplog, arguments, reason):
    refused(caplog, -1, reason, engine.initialize, *arguments)
    assert engine.get_engine() is None
    start(engine)  # a refusal leaves nothing behind


def test_initialize_ext(engine, caplog):
    refused(
        caplog,
        -1,
        "metadata server redis://127.0.0.1:1",
        engine.initialize_ext,
        *("127.0.0.1", "127.0.0.1:1", "tcp", "", "redis"),
    )
    assert engine.initialize_ext("127.0.0.1", "P2PHANDSHAKE", "tcp", None, "etcd") == 0


@pytest.mark.parametrize("protocol", ["rdma", "efa", "nvlink_intra"])
def test_mc_force_tcp_makes_any_protocol_tcp(engine, monkeypatch, protocol):
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, "mlx5_0,mlx5_1") == 0


def test_rdma_does_not_fall_back(engine, monkeypatch, caplog):
    monkeypatch.setattr(nics, "_missing", lambda _: "this machine has no RDMA device")
    arguments = ("127.0.0.1", "P2PHANDSHAKE", "rdma", "")
    refused(caplog, -1, "this machine has no RDMA device", engine.initialize, *arguments)
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    assert engine.initialize(*arguments) == 0


@pytest.mark.parametrize(("text", "timeout_s"), [(None, 30), ("60", 60), ("0", 5), ("5", 5)])
def test_mc_transfer_timeout(engine, monkeypatch, text, timeout_s):
    if text is not None:
        monkeypatch.setenv("MC_TRANSFER_TIMEOUT", text)
    assert start(engine)._running().timeout_s == timeout_s


@pytest.mark.parametrize("text", ["", "soon", "-3", "2.5"])
def test_a_malformed_timeout_is_refused(engine, monkeypatch, caplog, text):
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", text)
    arguments = ("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    reason = f"MC_TRANSFER_TIMEOUT must be whole seconds, got '{text}'"
    refused(caplog, -1, reason, engine.initialize, *arguments)


def test_only_one_of_many_threads_can_initialize(engine, caplog):
    results = in_threads(8, lambda _: engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
    assert sorted(results) == [-1] * 7 + [0]
    assert caplog.text.count("it is initialized, as 127.0.0.1:") == 7


INTEGERS = {
    "get_rpc_port": (-1, ()),
    "register_memory": (-1, (4096, 1)),
    "unregister_memory": (-1, (4096,)),
    "batch_register_memory": (-1, ([], [])),
    "batch_unregister_memory": (-1, ([],)),
    "allocate_managed_buffer": (0, (1,)),
    "free_managed_buffer": (-1, (4096, 1)),
    "get_first_buffer_address": (0, ("h:1",)),
    "write_bytes_to_buffer": (-1, (4096, b"1", 1)),
    "transfer_sync_write": (-1, ("h:1", 1, 1, 1)),
    "transfer_sync_read": (-1, ("h:1", 1, 1, 1)),
    "transfer_sync": (-1, ("h:1", 1, 1, 1, TransferEngine.TransferOpcode.Read)),
    "batch_transfer_sync_write": (-1, ("h:1", [1], [1], [1])),
    "batch_transfer_sync_read": (-1, ("h:1", [1], [1], [1])),
    "batch_transfer_sync": (-1, ("h:1", [1], [1], [1], TransferEngine.TransferOpcode.Read)),
    "batch_transfer_async_write": (0, ("h:1", [1], [1], [1])),
    "batch_transfer_async_read": (0, ("h:1", [1], [1], [1])),
    "batch_transfer_async": (0, ("h:1", [1], [1], [1], TransferEngine.TransferOpcode.Read)),
    "transfer_submit_write": (0, ("h:1", 1, 1, 1)),
    "send_probe": (-1, ("h:1",)),
}


@pytest.mark.parametrize("method", INTEGERS)
def test_before_initialize_and_after_close(engine, caplog, method):
    code, arguments = INTEGERS[method]
    refused(caplog, code, "call initialize first", getattr(engine, method), *arguments)
    start(engine).close()
    refused(caplog, code, "call initialize first", getattr(engine, method), *arguments)


def test_non_integers_raise_before_initialize(engine):
    with pytest.raises(InvalidArgument, match="^get_notifies: call initialize first"):
        engine.get_notifies()
    with pytest.raises(InvalidArgument, match="^read_bytes_from_buffer: call initialize first"):
        engine.read_bytes_from_buffer(4096, 1)
    assert engine.get_engine() is None


def test_engine_can_be_reinitialized_after_close(engine, caplog):
    port = free_port()
    start(engine, f"127.0.0.1:{port}")
    engine.close()
    engine.close()
    start(engine, f"127.0.0.1:{port}")
    assert engine.get_rpc_port() == port
    engine.close()
    start(engine, "127.0.0.2")
    assert engine.allocate_managed_buffer(1) > 0
    first = engine.get_first_buffer_address
    refused(caplog, 0, "connection refused", first, f"127.0.0.1:{port}")  # it is that no more


def test_dropped_engine_is_closed_unless_shared():
    engine = start(TransferEngine())
    name = f"127.0.0.1:{engine.get_rpc_port()}"
    with mk.TransferEngine() as other:
        other.open(name).close()
        del engine
        gc.collect()
        with pytest.raises(mk.TransferError, match="connection refused"):
            other.open(name)
        shared = start(TransferEngine()).get_engine()
        gc.collect()
        other.open(shared.name).close()
        shared.close()


def test_process_exits_cleanly_without_close():
    program = (
        "from mooncake_serving.compat.mooncake import TransferEngine\n"
        "engine, dropped = TransferEngine(), TransferEngine()\n"
        "for one in (engine, dropped):\n"
        "    assert one.initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp', '') == 0\n"
        "assert dropped.send_probe(f'localhost:{engine.get_rpc_port()}') == 0\n"
        "del dropped, one\n"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_probes(engine, caplog):
    start(engine)
    with side(untouched(SIZE)) as other:
        name = f"127.0.0.1:{other.port}"
        assert engine.send_probe(name) == 0
    refused(caplog, -102, "connection refused", engine.send_probe, name)
    refused(caplog, -101, "host:port", engine.send_probe, "nonsense")
    refused(caplog, -101, "cannot resolve", engine.send_probe, "no.such.host.invalid:1")
    refused(caplog, -101, "peer_server_name must be a string", engine.send_probe, 4711)
    refused(caplog, 0, "segment_name must be a string", engine.get_first_buffer_address, None)
    for huge in ("h" * 100_000, "127.0.0.1:" + "1" * 100_000):
        refused(caplog, -101, 'name must be "host:port", got', engine.send_probe, huge)
        assert len(caplog.text) < 2000


def test_the_local_topology(engine, caplog):
    everything = json.loads(engine.get_local_topology())  # also before initialize
    assert "cpu:0" in everything and all(len(lists) == 2 for lists in everything.values())
    assert engine.get_local_topology("") == engine.get_local_topology()
    none = json.loads(engine.get_local_topology("no_such_0, no_such_1"))
    assert all(lists == [[], []] for lists in none.values())
    assert "this machine has no ['no_such_0', 'no_such_1']" in caplog.text
    for wrong in (5, 0, b"mlx5_0", ["mlx5_0"]):
        with pytest.raises(InvalidArgument, match="device_name must be a string"):
            engine.get_local_topology(wrong)


def test_cuda_calls_without_a_gpu_are_unavailable(engine):
    memory = untouched(8)
    assert start(engine).register_memory(memory.ctypes.data, 8) == 0
    with side(untouched(8)) as there:
        peer = f"127.0.0.1:{there.port}"
        for direction in ("write", "read"):
            one = getattr(engine, f"transfer_{direction}_on_cuda")
            many = getattr(engine, f"batch_transfer_{direction}_on_cuda")
            for call, row in (
                (one, (memory.ctypes.data, there.address, 8)),
                (many, ([memory.ctypes.data], [there.address], [8])),
            ):
                with pytest.raises(mk.Unavailable, match=r"no GPU is in use|without cuda\.h"):
                    call(peer, *row, stream_ptr=0)
        there.sees(untouched(8))
    assert engine.check_transfers_on_cuda() == 0


def test_warmup_efa_segment_is_a_no_op(engine):
    assert engine.warmup_efa_segment("127.0.0.1:1") == 0
