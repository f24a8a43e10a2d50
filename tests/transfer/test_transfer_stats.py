"""Statistics: of peers, of transports and of the paths to a peer."""

import math

import numpy as np
import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from .proxy import Proxy
from .support import (
    HEADER,
    RANGE,
    addressed,
    engine_pair,
    peer_process,
    raw_server,
    stall,
    untouched,
)

SIZE = 1 << 20
LARGE = 32 << 20  # of several pieces, by both lanes


def peer_of(engine: TransferEngine, name: str) -> dict:
    return engine.stats()["peers"][name]


def test_peers_and_transports(pair):
    near, far = pair.regions(addressed(SIZE), untouched(SIZE))
    pair.near.write(pair.peer, [(near.address, far.address, 1000)]).wait()
    pair.near.read(
        pair.peer, [(near.address, far.address, 10), (near.address + 20, far.address, 1)]
    ).wait()
    with pytest.raises(TransferError):
        pair.near.write(pair.peer, [(near.address, 1, 1)]).wait()
    stats = pair.near.stats()
    counters = stats["peers"][pair.far.name]
    assert stats["peers"] == {pair.far.name: counters}
    assert stats["transports"] == {pair.peer.transport: counters}
    latency, total_us = counters.pop("latency_us"), counters.pop("latency_total_us")
    assert counters == {
        "num_bytes_read": 11,
        "num_bytes_written": 1000,
        "num_requests": 3,
        "num_errors": 1,
        "num_retries": 0,
        "num_in_flight": 0,
        "num_bytes_in_flight": 0,
    }
    assert sum(latency.values()) == 3
    bounds = list(latency)
    assert bounds == [*(2**i for i in range(len(bounds) - 1)), math.inf]
    shortest = sum(n * (bound // 2) for bound, n in latency.items() if n)
    assert shortest <= total_us < sum(n * bound for bound, n in latency.items() if n)
    assert pair.far.stats() == {"peers": {}, "transports": {}, "paths": {}}


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_path_counters_add_up_to_the_peer(transport, direction):
    with engine_pair(transport) as pair:
        near, far = pair.regions(addressed(LARGE), untouched(LARGE))
        for size in (LARGE, 5):
            getattr(pair.near, direction)(pair.peer, [(near.address, far.address, size)]).wait()
        paths = pair.near.stats()["paths"][pair.far.name]
        assert list(paths) == [f"{transport}:0", f"{transport}:1"]
        moved, still = ("written", "read") if direction == "write" else ("read", "written")
        assert sum(path[f"num_bytes_{moved}"] for path in paths.values()) == LARGE + 5
        assert sum(path["num_pieces"] for path in paths.values()) > 2
        for path in paths.values():
            assert path[f"num_bytes_{still}"] == 0
            assert path["num_retries"] == path["num_reconnects"] == path["num_failures"] == 0


def test_in_flight_counters_drop_on_completion():
    with raw_server(stall) as name, TransferEngine() as engine:
        region = engine.register(addressed(SIZE))
        peer = engine.open(name)
        tickets = [engine.write(peer, [(region.address, 1, n)]) for n in (1000, 234)]
        counters = peer_of(engine, name)
        assert (counters["num_in_flight"], counters["num_bytes_in_flight"]) == (2, 1234)
        assert counters["num_requests"] == 0
        assert tickets[1].cancel()
        counters = peer_of(engine, name)
        assert (counters["num_in_flight"], counters["num_bytes_in_flight"]) == (1, 1000)
        assert counters["num_requests"] == counters["num_errors"] == 1
        peer.close()
        counters = peer_of(engine, name)
        assert (counters["num_in_flight"], counters["num_bytes_in_flight"]) == (0, 0)
        assert counters["num_requests"] == counters["num_errors"] == 2


def test_rejected_requests_are_not_counted(tcp_pair):
    near, far = tcp_pair.regions(addressed(SIZE), untouched(SIZE))
    host_peer = tcp_pair.peer._peer
    tcp_pair.peer.close()
    columns = np.array([[near.address], [far.address], [8]])
    with pytest.raises(ValueError, match="^write: peer must be open"):
        tcp_pair.near._engine.submit(host_peer, "write", *columns, None, 1.0, None, False)
    counters = peer_of(tcp_pair.near, tcp_pair.far.name)
    assert counters["num_in_flight"] == counters["num_requests"] == 0


def test_lost_connection_counts_failure_retry_and_reconnect():
    with TransferEngine() as far, TransferEngine(transports=["tcp"]) as near:
        there, here = far.register(untouched(SIZE)), near.register(addressed(SIZE))
        row = (here.address, there.address, SIZE)
        with Proxy(far.name) as proxy, near.open(proxy.name) as peer:
            near.write(peer, [row]).wait()
            flow = proxy.relays[0].up
            flow.hold(100)  # in the middle of a frame
            ticket = near.write(peer, [row])
            flow.wait(lambda flow: flow.num_taken > len(flow.passed))
            proxy.cut()
            ticket.wait()
            counters = peer_of(near, proxy.name)
            assert (counters["num_requests"], counters["num_errors"]) == (2, 0)
            assert counters["num_retries"] == 1
            lead = near.stats()["paths"][proxy.name]["tcp:0"]
            assert lead["num_retries"] == lead["num_reconnects"] == lead["num_failures"] == 1
            assert (lead["num_bytes_written"], lead["num_pieces"]) == (2 * SIZE, 2)


def test_bytes_moved_by_failed_request_are_counted():
    with TransferEngine(transports=["tcp"]) as near, TransferEngine() as far:
        source, target = near.register(untouched(1000)), far.register(addressed(1000))
        with Proxy(far.name) as proxy:
            peer = near.open(proxy.name)
            proxy.relays[0].up.hold(
                HEADER.size + RANGE.size
            )  # the read passes, its notification does not
            row = (source.address, target.address, 1000)
            with pytest.raises(TransferError) as caught:
                near.read(peer, [row], notify=b"x", deadline_s=0.5).wait()
            assert caught.value.num_bytes_done == 1000
            assert peer_of(near, proxy.name)["num_bytes_read"] == 1000
            lead = near.stats()["paths"][proxy.name]["tcp:0"]
            assert (lead["num_bytes_read"], lead["num_pieces"], lead["num_retries"]) == (1000, 1, 0)


def test_counters_for_a_killed_peer():
    with TransferEngine() as near, peer_process(SIZE) as other:
        here = near.register(addressed(SIZE))
        peer = near.open(other.name)
        other.process.kill()
        other.process.join()
        with pytest.raises(TransferError):
            near.write(peer, [(here.address, other.address, SIZE)]).wait()
        lead = near.stats()["paths"][other.name]["shm:0"]
        assert lead["num_failures"] == 1 + lead["num_retries"] > 1
        assert lead["num_reconnects"] == lead["num_pieces"] == 0
        assert peer_of(near, other.name)["num_errors"] == 1


def test_reopened_peer_shares_counters_by_name(pair):
    near, far = pair.regions(addressed(SIZE), untouched(SIZE))
    row = (near.address, far.address, 100)
    for _ in range(3):
        with pair.near.open(pair.far.name) as again:
            pair.near.write(again, [row]).wait()
            pair.near.write(pair.peer, [row]).wait()
    assert list(pair.near.stats()["peers"]) == [pair.far.name]
    assert peer_of(pair.near, pair.far.name)["num_bytes_written"] == 600
    paths = pair.near.stats()["paths"][pair.far.name]
    assert sum(path["num_bytes_written"] for path in paths.values()) == 600
    pair.near.close()
    assert peer_of(pair.near, pair.far.name)["num_bytes_written"] == 600
