"""LayerStream: refusals and failures. test_layer_stream.py tests what it does."""

import _thread
import copy
import pickle
import threading

import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels.kv import ready_flags


@pytest.fixture
def stream():
    return mk.LayerStream(4)


def test_wait_is_interrupted_by_ctrl_c(stream):
    timer = threading.Timer(0.05, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        stream.wait_on_host(0, 1)
    timer.join()


@pytest.mark.parametrize("num_resting", [0, 2])
def test_memory_of_a_dead_stream_is_reused(monkeypatch, num_resting):
    """But only after others: a kernel that is late must not signal to the next stream."""
    monkeypatch.setattr(ready_flags, "_lenders", {})
    monkeypatch.setattr(ready_flags, "_NUM_RESTING", num_resting)
    stream = mk.LayerStream(77)
    stream.signal_from_host(5, 9)
    address = stream.flags.data_ptr()
    del stream
    for _ in range(num_resting):
        assert mk.LayerStream(77).flags.data_ptr() != address
    streams = [mk.LayerStream(77) for _ in range(3)]
    assert address in [stream.flags.data_ptr() for stream in streams]
    assert not any(stream.flags.any() for stream in streams)


def test_streams_of_all_lengths_share_few_allocation_sizes(monkeypatch):
    """An engine that makes one for each number of chunks keeps little for good."""
    monkeypatch.setattr(ready_flags, "_lenders", {})
    for num_layers in range(1, 600):
        stream = mk.LayerStream(num_layers)
        assert stream.flags.shape == (num_layers,) and not stream.flags.any()
        stream.signal_from_host(num_layers - 1, num_layers)
    assert len(ready_flags._lenders) == 8  # 8 words to 1,024
    monkeypatch.setattr(ready_flags, "_lenders", {})
    addresses = {mk.LayerStream(200_000).flags.data_ptr() for _ in range(40)}
    assert len(addresses) <= 32


def test_stream_works_in_inference_mode():
    with torch.inference_mode():
        stream = mk.LayerStream(2)
        stream.begin_waits()
    stream.begin_waits()
    stream.signal_from_host(0, 2)
    with torch.inference_mode():
        stream.wait_layer(0, torch.zeros(2))
        stream.reset()
        late = mk.LayerStream(2, timeout_s=0.02)
        late.begin_waits()
        with pytest.raises(TimeoutError, match="layer 0 must be ready for step 1"):
            late.wait_layer(0, torch.zeros(2))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_stream_cannot_be_copied(stream, duplicate):
    with pytest.raises(TypeError, match="cannot be copied"):
        duplicate(stream)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda s: s.wait_layer(7), r"LayerStream.wait_layer: layer must be in \[0, 4\), got 7"),
        (lambda s: s.signal_layer(-1), r"LayerStream.signal_layer: layer .* got -1"),
        (lambda s: s.signal_from_host(True, 1), r"signal_from_host: layer .* got True"),
        (lambda s: s.signal_from_host(1, 0), r"signal_from_host: step must be in .* got 0"),
        (lambda s: s.is_ready(1.0, 1), r"LayerStream.is_ready: layer .* got 1.0"),
        (lambda s: s.begin_waits(-3), r"LayerStream.begin_waits: step .* got -3"),
        (lambda s: s.wait_on_host(1, 1, 0), r"LayerStream.wait_on_host: timeout_s .* got 0"),
        (lambda s: s.reset(-1), r"LayerStream.reset: step must be in \[0, .* got -1"),
        (lambda s: mk.LayerStream(10**5000), r"LayerStream: num_layers .* got a huge int"),
        (lambda s: mk.LayerStream(0), r"LayerStream: num_layers .* got 0"),
        (lambda s: mk.LayerStream(2, "meta"), r"LayerStream: device must be .* got 'meta'"),
        (lambda s: mk.LayerStream(2, 1.5), r"LayerStream: device must be .* got 1.5"),
        (lambda s: mk.LayerStream(2, timeout_s=float("inf")), r"timeout_s .* got inf"),
        (lambda s: mk.LayerStream(2, timeout_s=float("nan")), r"timeout_s .* got nan"),
    ],
)
def test_bad_arguments_are_rejected(stream, call, message):
    with pytest.raises(mk.InvalidArgument, match=message):
        call(stream)
    stream.check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_missing_gpu_is_reported_as_unavailable():
    with pytest.raises(mk.Unavailable, match="LayerStream: "):
        mk.LayerStream(2, "cuda:0")
