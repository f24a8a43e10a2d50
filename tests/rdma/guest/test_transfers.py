"""Bytes between two NICs, bitwise, in all sizes and orders."""

import threading

import numpy as np
import pytest

import mooncake_kernels as mk
from mooncake_kernels.reachability import probe_all

from .links import Link, noise

SIZES = [1, 7, 64, 4095, 4096, 4097, 65_536, 1_000_003]


@pytest.fixture(scope="module")
def link():
    with Link(max_immediates=64) as link:
        yield link


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("verb", ["write", "read", "immediate"])
def test_sizes(link, size, verb):
    source, target = (link.b, link.a) if verb == "read" else (link.a, link.b)
    source.memory[:] = noise(len(source.memory), size)
    target.memory[:] = 0xEE
    rows = [(3, 5, size)]
    if verb == "read":
        token = link.a.read(link.b, [(5, 3, size)])
    elif verb == "write":
        token = link.a.write(link.b, rows)
    else:
        token = link.a.write(link.b, rows, immediate=size)
    completion = link.a.queue.wait(token)
    assert completion.num_bytes == size
    assert (target.memory[5 : 5 + size] == source.memory[3 : 3 + size]).all()
    assert (target.memory[:5] == 0xEE).all() and (target.memory[5 + size :] == 0xEE).all()
    if verb == "immediate":
        (told,) = link.b.queue.poll(timeout_s=10.0)
        assert (told.immediate, told.token, told.num_bytes) == (size, None, size)


@pytest.mark.parametrize("reads", [False, True])
def test_sixty_four_mebibytes(reads):
    with Link(num_bytes=64 << 20) as link:
        source, target = (link.b, link.a) if reads else (link.a, link.b)
        source.memory[:] = noise(64 << 20)
        move = link.a.read if reads else link.a.write
        completion = link.a.queue.wait(move(link.b, [(0, 0, 64 << 20)]), timeout_s=120.0)
        assert completion.num_bytes == 64 << 20
        assert (target.memory == source.memory).all()


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("max_sends, max_sges", [(1, 1), (4, 2), (64, 16)])
def test_one_transfer_of_many_ranges(reads, max_sends, max_sges):
    """Scattered here, contiguous there and the other way, more than the queue pair holds."""
    with Link(max_sends=max_sends, max_sges=max_sges) as link:
        link.a.memory[:], link.b.memory[:] = noise(1 << 20, 1), noise(1 << 20, 2)
        expected_a, expected_b = link.a.memory.copy(), link.b.memory.copy()
        order = np.random.default_rng(3).permutation(500)
        rows = [(1000 * int(i), 700 * at, 700) for at, i in enumerate(order)]
        for here, there, size in rows:
            if reads:
                expected_a[here : here + size] = expected_b[there : there + size]
            else:
                expected_b[there : there + size] = expected_a[here : here + size]
        token = (link.a.read if reads else link.a.write)(link.b, rows)
        completion = link.a.queue.wait(token)
        assert completion.num_bytes == 500 * 700
        assert (link.a.memory == expected_a).all() and (link.b.memory == expected_b).all()


def test_transfers_complete_in_order_and_exactly_once(link):
    link.a.memory[:] = noise(1 << 20)
    tokens = [link.a.write(link.b, [(i * 100, i * 100, 100)]) for i in range(1000)]
    seen = []
    while len(seen) < len(tokens):
        completions = link.a.queue.poll(timeout_s=10.0)
        assert completions and all(completion.ok for completion in completions)
        seen += [completion.token for completion in completions]
    assert seen == tokens
    assert (link.b.memory[:100_000] == link.a.memory[:100_000]).all()


def test_immediates_arrive_in_order_after_their_data(link):
    link.b.memory[:] = 0
    for i in range(50):
        link.a.memory[i] = i + 1
        link.a.write(link.b, [(i, i, 1)], immediate=0xFFFF_0000 + i)
    link.a.write(link.b, [], immediate=5)  # nothing but the immediate
    told = []
    while len(told) < 51:
        for completion in link.b.queue.poll(timeout_s=10.0):
            told.append(completion.immediate)
            assert (link.b.memory[: min(len(told), 50)] > 0).all()
    assert told == [0xFFFF_0000 + i for i in range(50)] + [5]
    done = []
    while len(done) < 51:
        done += link.a.queue.poll(timeout_s=10.0)
    assert all(completion.ok for completion in done)


def test_empty_transfer_completes_at_once(link):
    completion = link.a.queue.wait(link.a.write(link.b, []))
    assert completion.ok and completion.num_bytes == 0
    completion = link.a.queue.wait(link.a.write(link.b, [(0, 0, 0)]))
    assert completion.ok and completion.num_bytes == 0


def test_threads_share_a_queue_pair(link):
    link.a.memory[:] = noise(1 << 20)
    link.b.memory[:] = 0
    tokens: list[int] = []

    def work(part: int) -> None:
        for i in range(50):
            at = part * 100_000 + i * 1000
            tokens.append(link.a.write(link.b, [(at, at, 1000)]))

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    seen: set[int] = set()
    while len(seen) < 200:
        completions = link.a.queue.poll(timeout_s=10.0)
        assert completions and all(completion.ok for completion in completions)
        seen |= {completion.token for completion in completions}
    for thread in threads:
        thread.join()
    assert seen == set(tokens)
    for part in range(4):
        span = slice(part * 100_000, part * 100_000 + 50_000)
        assert (link.b.memory[span] == link.a.memory[span]).all()


def test_probe_of_a_soft_roce_nic():
    with mk.rdma.open("rxe2") as device:
        memory = noise(5000)
        before = memory.copy()
        assert mk.rdma.probe(device, memory) == ""
        assert (memory == before).all()
        assert mk.rdma.probe(device, bytearray(1)) == ""


def test_topology_discovers_and_probes_the_nics():
    topo = mk.Topology.discover()
    assert [nic.name for nic in topo.nics] == ["rxe0", "rxe1", "rxe2", "rxe3"]
    assert {nic.name for nic in topo.choose_nics("cpu:0")[:2]} == {"rxe0", "rxe1"}
    assert {nic.name for nic in topo.choose_nics("cpu:1")[:2]} == {"rxe2", "rxe3"}
    topo.mark_unreachable("cpu:0", "rxe1", "was so yesterday")
    reasons = probe_all(topo)
    assert reasons == {("cpu:0", f"rxe{i}"): "" for i in range(4)}
    assert not topo.unreachable
    with pytest.raises(mk.InvalidArgument, match=r"cpu:0, cpu:1, got 'cuda:5'"):
        probe_all(topo, locations=["cuda:5"])
