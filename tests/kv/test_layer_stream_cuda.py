"""LayerStream among CUDA graphs, streams and the host.

Kernels that are launched while another one waits have been launched before, because the first
launch of a kernel may wait for the device.
"""

import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels.kv.ready_flags import signal_flag

from ..conftest import HAS_CUDA, skip

NUM_LAYERS, ROW = 3, 1 << 16


@pytest.fixture(autouse=True)
def _gpu():
    if not HAS_CUDA:
        skip("cuda", "torch finds no CUDA device")
    if not torch.ops.mooncake_kernels.has_cuda():
        skip("cuda", "_ops.so was built without nvcc")


def capture(body):
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        body()
    return graph


class Reader:
    """A graph that copies each layer of a cache when it is there, and tells that it has."""

    def __init__(self, timeout_s=30.0):
        self.cache, self.out = (torch.zeros(NUM_LAYERS, ROW, device="cuda") for _ in range(2))
        self.loaded = mk.LayerStream(NUM_LAYERS, "cuda", timeout_s=timeout_s)
        self.copied = mk.LayerStream(NUM_LAYERS, "cuda")
        self.cache.add_(0)
        self.out[0].copy_(self.cache[0])
        self.graph = capture(self.read)

    def read(self):
        self.loaded.begin_waits()
        self.copied.begin_signals()
        for layer in range(NUM_LAYERS):
            self.loaded.wait_layer(layer)
            self.out[layer].copy_(self.cache[layer])
            self.copied.signal_layer(layer)


def test_the_host_loads_while_a_graph_runs():
    reader, side = Reader(), torch.cuda.Stream()
    for step in range(1, 5):
        rows = (torch.arange(NUM_LAYERS) + 10.0 * step)[:, None].expand(-1, ROW)
        rows = rows.contiguous().pin_memory()
        reader.graph.replay()
        for layer in range(NUM_LAYERS):
            with torch.cuda.stream(side):
                reader.cache[layer].copy_(rows[layer], non_blocking=True)
            side.synchronize()
            assert not reader.copied.is_ready(layer, step)
            reader.loaded.signal_from_host(layer, step)
            reader.copied.wait_on_host(layer, step)
        torch.cuda.synchronize()
        assert torch.equal(reader.out.cpu(), rows)
    reader.loaded.check()


def test_signals_before_a_graph_and_a_replay_without_a_step():
    reader = Reader()
    for step in (1, 2):
        reader.cache.fill_(step)
        torch.cuda.synchronize()
        for layer in (2, 0, 1):
            reader.loaded.signal_from_host(layer, step)
        reader.graph.replay()
        torch.cuda.synchronize()
        assert bool((reader.out == step).all())
    eager = capture(lambda: reader.loaded.wait_layer(0))  # nothing begins: it does not wait
    eager.replay()
    torch.cuda.synchronize()
    reader.loaded.check()


@pytest.mark.parametrize("reader_first", [True, False])
def test_two_graphs_on_two_streams(reader_first):
    reader = Reader()

    def write():
        reader.loaded.begin_signals()
        for layer in range(NUM_LAYERS):
            reader.cache[layer].add_(1)
            reader.loaded.signal_layer(layer)

    jobs = [
        (capture(write), torch.cuda.Stream()),
        (reader.graph, torch.cuda.Stream()),
    ]
    for step in range(1, 5):
        for graph, stream in reversed(jobs) if reader_first else jobs:
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert bool((reader.out == step).all())
    reader.loaded.check()


def test_two_eager_streams():
    reader, side = Reader(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for step in range(1, 4):
        reader.loaded.begin_waits(10 * step)
        reader.loaded.wait_layer(1)
        reader.out[1].copy_(reader.cache[1])
        with torch.cuda.stream(side):
            reader.loaded.begin_signals(10 * step)
            reader.cache[1].add_(1)
            reader.loaded.signal_layer(1)
        torch.cuda.synchronize()
        assert bool((reader.out[1] == step).all()) and reader.loaded.is_ready(1, 10 * step)
    reader.loaded.check()


def test_graph_times_out_once_and_recovers_after_reset():
    reader = Reader(timeout_s=0.05)
    reader.loaded.signal_from_host(0, 1)
    reader.graph.replay()
    torch.cuda.synchronize()
    message = "LayerStream.wait_layer: layer 1 must be ready for step 1 .* got .* step 0"
    for call in (reader.loaded.check, lambda: reader.loaded.wait_layer(0)):
        with pytest.raises(TimeoutError, match=message):
            call()
    reader.loaded.reset(5)
    for layer in range(NUM_LAYERS):
        reader.loaded.signal_from_host(layer, 6)
    reader.graph.replay()
    torch.cuda.synchronize()
    reader.loaded.check()


def test_abort_releases_a_waiting_graph():
    reader = Reader()
    reader.graph.replay()
    reader.loaded.abort()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"abort\(\) was called"):
        reader.loaded.check()


def test_step_number_cannot_be_captured():
    stream = mk.LayerStream(1, "cuda")

    def body():
        stream.begin_waits()
        with pytest.raises(mk.InvalidArgument, match="begin_waits: step must be None in a graph"):
            stream.begin_waits(3)

    capture(body)


def test_flags_must_be_in_device_accessible_memory():
    assert mk.LayerStream(1, "cuda").flags.is_pinned()
    with pytest.raises(mk.InvalidArgument, match="signal_flag: flags must be in memory that cuda"):
        signal_flag(torch.zeros(1, dtype=torch.int64), 0, 1, torch.zeros(1, device="cuda"))
