"""Writes and reads with GPU memory at either end: every byte in its place."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_kernels.transfer import TransferEngine

from ...fake_cuda.gpus import GPUS, IS_FAKE
from ..support import UNTOUCHED, WAIT_S, Pair, addressed, untouched

MIB = 1 << 20
BETWEEN = [("gpu", "gpu"), ("gpu", "host"), ("host", "gpu")]


class Host:
    """Host memory, with the face of ``Memory``."""

    def __init__(self, num_bytes: int):
        self.buffer = untouched(num_bytes)
        self.address = self.buffer.ctypes.data
        self.num_bytes = num_bytes

    def put(self, data):
        self.buffer[:] = data

    def get(self):
        return self.buffer.copy()


def memory(kind: str, num_bytes: int, device: int = 0):
    return Host(num_bytes) if kind == "host" else GPUS.allocate(num_bytes, device)


def move(pair: Pair, verb: str, rows, **options):
    ticket = (pair.near.write if verb == "write" else pair.near.read)(pair.peer, rows, **options)
    ticket.wait(WAIT_S)


def test_region_reports_its_location(pair):
    near = pair.near.register(GPUS.allocate(4096, device=1).buffer)
    assert near.location == f"cuda:{1 % GPUS.count}"
    pair.far.register(GPUS.allocate(4096).buffer)
    pair.far.register(untouched(4096))
    if pair.peer.transport != "tcp":
        assert [r.location for r in pair.near.regions(pair.peer)] == ["cuda:0", "cpu:0"]


@pytest.mark.parametrize("num_bytes", [1, 4096, 3 * MIB + 5, 21 * MIB])
@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.parametrize("kinds", BETWEEN, ids="-".join)
def test_bytes_arrive(pair, kinds, verb, num_bytes):
    near, far = (memory(kind, num_bytes + 7, device) for device, kind in enumerate(kinds))
    pair.regions(near.buffer, far.buffer)
    source, target = (near, far) if verb == "write" else (far, near)
    source.put(addressed(num_bytes + 7))
    move(pair, verb, [(near.address + 3, far.address + 5, num_bytes)])
    first, last = (3, 5) if verb == "write" else (5, 3)
    expected = untouched(num_bytes + 7)
    expected[last : last + num_bytes] = addressed(num_bytes + 7)[first : first + num_bytes]
    assert np.array_equal(target.get(), expected)


@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.parametrize("kinds", BETWEEN, ids="-".join)
def test_checksums_of_memory_of_gpus(pair, kinds, verb):
    num_bytes = 5 * MIB + 3  # more than is summed in one step
    near, far = (memory(kind, num_bytes, device) for device, kind in enumerate(kinds))
    pair.regions(near.buffer, far.buffer)
    source, target = (near, far) if verb == "write" else (far, near)
    source.put(addressed(num_bytes))
    cuts = [0, 1, 4096, 5 * MIB + 1, num_bytes]
    rows = [(near.address + a, far.address + a, b - a) for a, b in itertools.pairwise(cuts)]
    move(pair, verb, rows, checksum=True)
    assert np.array_equal(target.get(), addressed(num_bytes))


@pytest.mark.parametrize("has_no_batch", [0, 1])
@pytest.mark.parametrize("verb", ["write", "read"])
def test_many_small_blocks(pair, verb, has_no_batch):
    if IS_FAKE:
        GPUS.driver.set(has_no_batch=has_no_batch)
    size, count = 257, 9000
    near, far = GPUS.allocate(size * count), GPUS.allocate(size * count, device=1)
    pair.regions(near.buffer, far.buffer)
    source, target = (near, far) if verb == "write" else (far, near)
    source.put(addressed(size * count))
    order = np.random.default_rng(7).permutation(count)
    local, remote = near.address + np.arange(count) * size, far.address + order * size
    call = pair.near.write_blocks if verb == "write" else pair.near.read_blocks
    call(pair.peer, local, remote, size).wait(WAIT_S)
    blocks = addressed(size * count).reshape(count, size)
    expected = np.empty_like(blocks)
    if verb == "write":
        expected[order] = blocks
    else:
        expected = blocks[order]
    assert np.array_equal(target.get().reshape(count, size), expected)


@settings(
    max_examples=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_one_request_over_all_kinds_of_memory(pair, data):
    size = 1 << 16
    sides = [[memory("gpu", size), memory("host", size), memory("gpu", size, 1)] for _ in "ab"]
    regions = [
        engine.register(item.buffer)
        for engine, side in zip((pair.near, pair.far), sides, strict=True)
        for item in side
    ]
    verb = data.draw(st.sampled_from(["write", "read"]))
    sources, targets = sides if verb == "write" else sides[::-1]
    for i, source in enumerate(sources):
        source.put(np.roll(addressed(size), i * 1000))
    expected = [untouched(size) for _ in targets]
    rows = []
    for target_index in range(3):
        cuts = sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=8)))
        for begin, end in list(itertools.pairwise(cuts))[::2]:
            source_index = data.draw(st.integers(0, 2))
            at = data.draw(st.integers(0, size - (end - begin)))
            taken = np.roll(addressed(size), source_index * 1000)[at : at + end - begin]
            expected[target_index][begin:end] = taken
            ends = sources[source_index].address + at, targets[target_index].address + begin
            rows.append((*(ends if verb == "write" else ends[::-1]), end - begin))
    move(pair, verb, rows)
    for target, wanted in zip(targets, expected, strict=True):
        assert np.array_equal(target.get(), wanted)
    for region in regions:
        region.close()


def test_notification_arrives_after_the_data(pair):
    near, far = GPUS.allocate(2 * MIB), GPUS.allocate(2 * MIB)
    pair.regions(near.buffer, far.buffer)
    for step in range(5):
        near.put(np.roll(addressed(2 * MIB), step))
        ticket = pair.near.write(
            pair.peer, [(near.address, far.address, 2 * MIB)], notify=b"%d" % step
        )
        assert pair.far.receive_notifications(WAIT_S) == [(pair.near.name, b"%d" % step)]
        assert np.array_equal(far.get(), np.roll(addressed(2 * MIB), step))
        ticket.wait(WAIT_S)


def test_part_of_an_allocation_can_be_registered(pair):
    near, far = GPUS.allocate(8192), GPUS.allocate(8192)
    near.put(addressed(8192))
    inner = far.part(4096, 6144)
    pair.regions(near.part(1024, 3072).buffer, inner.buffer)
    move(pair, "write", [(near.address + 1024, inner.address, 2048)])
    assert np.array_equal(inner.get(), addressed(8192)[1024:3072])
    assert (far.get()[:4096] == UNTOUCHED).all() and (far.get()[6144:] == UNTOUCHED).all()


@pytest.mark.parametrize("at", [0, 4096, 4099])
def test_files(gpus, tmp_path, at):
    num_bytes = 9 * MIB + 77
    path = tmp_path / "pool"
    path.write_bytes(bytes(num_bytes + 8192))
    near = memory("gpu", num_bytes)
    near.put(addressed(num_bytes))
    host = memory("host", 5000)
    host.put(addressed(5000))
    with TransferEngine() as engine, engine.open(f"file:{path}") as peer:
        engine.register(near.buffer)
        engine.register(host.buffer)
        rows = [(near.address, at, num_bytes - 100), (host.address, at + num_bytes - 100, 100)]
        engine.write(peer, rows).wait(WAIT_S)
        written = np.fromfile(path, np.uint8)[at : at + num_bytes]
        assert np.array_equal(written[:-100], addressed(num_bytes)[:-100])
        assert np.array_equal(written[-100:], addressed(5000)[:100])
        near.put(untouched(num_bytes))
        host.put(untouched(5000))
        engine.read(peer, rows).wait(WAIT_S)
        assert np.array_equal(near.get()[:-100], addressed(num_bytes)[:-100])
        assert (near.get()[-100:] == UNTOUCHED).all()
        assert np.array_equal(host.get()[:100], addressed(5000)[:100])
