"""What a program decides by: the kind of each failure, and that none has none by accident."""

import ast
import ctypes
import os
import re
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from mooncake_kernels.errors import FailureKind, TransferError
from mooncake_kernels.transfer import TransferEngine

from ..conftest import skip
from ..pages import ROOT
from .handshake import (
    FULL,
    STILL_BUSY,
    Hello,
    answer,
    hear_hello,
    receive_exactly,
)
from .support import (
    ACK,
    HEADER,
    WAIT_S,
    addressed,
    close_when_it_opens,
    raw_server,
    send_last,
    untouched,
)

SIZE = 1 << 16
CLONE_NEWNET = 0x40000000


def failure(call) -> TransferError:
    with pytest.raises(TransferError) as caught:
        call()
    return caught.value


# --- The table of the page, and the sources


def test_documentation_lists_every_failure_kind():
    page = (ROOT / "docs/transfer/transfer.md").read_text()
    rows = re.findall(r"^\| `([A-Z_]+)` \|(.*)\|$", page, re.M)
    assert [name for name, _ in rows] == [kind.name for kind in FailureKind]
    for name, cells in rows:
        assert len(cells.split(" | ")) == 3 and all(cells.split(" | ")), name


def test_failure_kind_numbers_match_the_engine():
    header = (ROOT / "csrc/transfer/base/error.h").read_text()
    body = header[
        header.index("enum class FailureKind") : header.index("FailureKind kind_of_errno")
    ]
    numbers = {
        re.sub(r"(?<!^)([A-Z])", r"_\1", name).upper(): int(number)
        for name, number in re.findall(r"^  k(\w+) = (\d+),", body, re.M)
    }
    assert numbers == {kind.name: int(kind) for kind in FailureKind}


def test_every_error_reason_of_the_engine_has_a_kind():
    """An ErrorReason cannot be made without one; OTHER is only what comes from elsewhere."""
    header = (ROOT / "csrc/transfer/base/error.h").read_text()
    [made] = re.findall(r"^  ErrorReason\(([^)]+)\)", header, re.M)
    assert made == "std::string text, FailureKind kind"
    others = {
        str(path.relative_to(ROOT / "csrc")): found
        for folder in ("transfer", "served", "host")
        for path in sorted((ROOT / "csrc" / folder).rglob("*"))
        if path.suffix in (".cc", ".h")
        if (found := path.read_text().count("FailureKind::kOther"))
    }
    # The default of an empty reason; an unknown errno, an unknown exception; no rejection.
    assert others == {
        "transfer/base/error.cc": 2,
        "transfer/base/error.h": 1,
        "transfer/wire/reject_reason.cc": 1,
    }


def calls_without_kind(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "TransferError"
        and "kind" not in [keyword.arg for keyword in node.keywords]
    ]


def test_every_python_failure_has_a_kind():
    folders = (ROOT / "mooncake_kernels", ROOT / "python/mooncake_serving")
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    assert [call for path in paths for call in calls_without_kind(path)] == []


# --- Requests


@pytest.mark.parametrize("number", [*range(20), 2**32, 2**64 - 1])
def test_peer_may_report_only_its_own_failure_kinds(number):
    """It may not claim that its initiator has cancelled, or that a deadline has passed."""
    its = {7: FailureKind.BUSY, 8: FailureKind.EXHAUSTED, 10: FailureKind.DENIED}
    its |= {11: FailureKind.INCOMPATIBLE, 12: FailureKind.INACCESSIBLE, 13: FailureKind.DEVICE}
    ack = bytearray(ACK.pack(1, 2, 1, 0))
    ack[24:32] = number.to_bytes(8, "little")

    def behave(connection):
        answer(connection)
        receive_exactly(connection, HEADER.size)
        send_last(connection, bytes(ack) + b"no")

    with raw_server(behave) as name, TransferEngine() as engine:
        region = engine.register(untouched(SIZE))
        with engine.open(name) as peer:
            read = engine.read(peer, [(region.address, 4096, 100)], deadline_s=WAIT_S)
            assert failure(read.wait).kind is its.get(number, FailureKind.REFUSED)


# --- Peers


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_restarted_or_exited_peer_is_gone(transport):
    with TransferEngine(transports=[transport]) as engine:
        region = engine.register(addressed(SIZE))
        first = TransferEngine()
        peer = engine.open(first.name)
        write = (region.address, first.register(untouched(SIZE)).address, SIZE)
        engine.write(peer, [write]).wait()
        first.close()
        assert failure(lambda: engine.write(peer, [write]).wait()).kind is FailureKind.GONE
        with TransferEngine(first.name) as again:
            again.register(untouched(SIZE))
            error = failure(lambda: engine.write(peer, [write]).wait())
            assert error.cause == "the peer was restarted; open it again"
            assert error.kind is FailureKind.GONE


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_open_is_gone_when_no_one_listens(transport):
    with TransferEngine() as other:
        name = other.name
    with TransferEngine(transports=[transport]) as engine:
        assert failure(lambda: engine.open(name, deadline_s=5)).kind is FailureKind.GONE


@pytest.mark.parametrize(
    ("greeting", "kind"),
    [
        (Hello(flags=1).packed(), FailureKind.DENIED),
        (Hello(flags=2).packed(), FailureKind.DENIED),
    ],
)
def test_greetings(greeting, kind):
    def behave(connection):
        hear_hello(connection)
        send_last(connection, greeting)

    with raw_server(behave) as name, TransferEngine() as engine:
        assert failure(lambda: engine.open(name, deadline_s=WAIT_S)).kind is kind


@pytest.mark.parametrize("verdict", [STILL_BUSY, FULL])
def test_peer_out_of_connections_is_busy(verdict):
    with raw_server(lambda c: answer(c, verdict=verdict)) as name, TransferEngine() as engine:
        assert failure(lambda: engine.open(name, deadline_s=WAIT_S)).kind is FailureKind.BUSY


def test_this_side_is_closed():
    silent = socket.create_server(("127.0.0.1", 0))
    name = f"127.0.0.1:{silent.getsockname()[1]}"
    with silent, TransferEngine(transports=["tcp"]) as engine:
        close_when_it_opens(engine, name)
        assert failure(lambda: engine.open(name, deadline_s=WAIT_S)).kind is FailureKind.CLOSED


# --- Files


def test_files(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * SIZE))
    with TransferEngine() as engine:
        region = engine.register(addressed(SIZE))

        def opened(name):
            return failure(lambda: engine.open(f"file:{name}")).kind

        assert opened(tmp_path / "none") is FailureKind.GONE
        assert opened(tmp_path) is FailureKind.REFUSED
        assert opened("/dev/full") is FailureKind.REFUSED
        with engine.open(f"file:{path}") as peer:
            beyond = (region.address, SIZE + 1, SIZE)
            assert failure(engine.read(peer, [beyond]).wait).kind is FailureKind.REFUSED


# --- The network of a process that has one of its own


def in_own_network(body) -> None:
    """Run it in a forked process with nothing but a loopback device, which is down."""
    if os.geteuid() != 0:
        skip("root", "a network namespace is made by root")
    pid = os.fork()
    if not pid:
        status = 1
        try:
            if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
                status = 77
            else:
                body()
                status = 0
        except BaseException:  # noqa: BLE001 - the parent shows it
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 77:
        skip("root", "network namespaces are not allowed here")
    assert status == 0


def raise_loopback() -> None:
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 1)  # SIOCSIFFLAGS: IFF_UP
        fcntl.ioctl(any_socket, 0x8914, request)


def test_forked_unreachable_network_is_reported():
    def body():
        with TransferEngine("127.0.0.1:4711", transports=["tcp"]) as engine:
            error = failure(lambda: engine.open("10.1.2.3:4711", deadline_s=5))
            assert error.kind is FailureKind.UNREACHABLE, (error.kind, str(error))

    in_own_network(body)


def only_port(number: int) -> None:
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(f"{number} {number}")


def test_forked_open_waits_for_a_free_local_port():
    """It is waited for until the deadline, in `open` as in a request."""

    def body():
        raise_loopback()
        only_port(40000)
        with TransferEngine("127.0.0.1:4711", transports=["tcp"]) as far:
            taken = socket.create_connection(("127.0.0.1", 4711))
            with TransferEngine("127.0.0.1:4712", transports=["tcp"]) as engine:
                error = failure(lambda: engine.open(far.name, deadline_s=0.3))
                assert error.kind is FailureKind.EXHAUSTED and not error.timed_out, error
                assert error.cause.startswith("deadline of 0.3 s passed: ")
                assert "ephemeral ports" in error.cause
                # An end that resets leaves no TIME_WAIT, which would keep the port.
                reset = np.array([1, 0], np.int32).tobytes()
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                threading.Timer(0.2, taken.close).start()
                with engine.open(far.name, deadline_s=WAIT_S) as peer:
                    assert peer.transport == "tcp"

    in_own_network(body)


def test_forked_unroutable_address_fails_at_once():
    """It looks the same to connect(2) as a lack of ports."""

    def body():
        raise_loopback()
        Path("/proc/sys/net/ipv6/conf/lo/disable_ipv6").write_text("1")
        with TransferEngine("127.0.0.1:4711", transports=["tcp"]) as engine:
            error = failure(lambda: engine.open("[::1]:4712", deadline_s=3600))
            assert error.kind is FailureKind.UNREACHABLE, (error.kind, str(error))

    if not Path("/proc/sys/net/ipv6").exists():
        skip("ipv6", "there is no IPv6")
    in_own_network(body)
