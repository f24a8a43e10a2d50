"""LayerStream: a waiter goes on when its layer is there, and not before. Every wait is bounded."""

import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk

NUM_LAYERS = 4
SOON_S = 0.02  # for what must not come


@pytest.fixture
def stream():
    return mk.LayerStream(NUM_LAYERS)


@pytest.fixture
def start():
    """start(body, *arguments) runs it in a thread; returns a function that joins it in a minute."""
    with ThreadPoolExecutor(4) as threads:

        def start(body, *arguments):
            future = threads.submit(body, *arguments)
            return lambda timeout_s=60: future.result(timeout_s)

        yield start


@pytest.fixture
def start_waiting(start):
    """As start, for a body that must still be waiting a moment later."""

    def start_waiting(body, *arguments):
        begun = threading.Event()
        join = start(lambda: (begun.set(), body(*arguments)))
        assert begun.wait(60)
        with pytest.raises(NotYet):
            join(SOON_S)
        return join

    return start_waiting


def test_loader_and_reader_threads_stay_in_step(stream, start):
    """A forward pass reads each layer when it is there; no layer is written before it was read."""
    cache, read = torch.zeros(NUM_LAYERS, 1 << 12), mk.LayerStream(1)
    num_steps = 50

    def load():
        for step in range(1, num_steps + 1):
            stream.begin_signals()
            for layer in range(NUM_LAYERS):
                cache[layer].fill_(step * NUM_LAYERS + layer)
                stream.signal_layer(layer)
            read.wait_on_host(0, step)

    join = start(load)
    for step in range(1, num_steps + 1):
        stream.begin_waits()
        for layer in range(NUM_LAYERS):
            stream.wait_layer(layer)
            assert bool((cache[layer] == step * NUM_LAYERS + layer).all())
        read.signal_from_host(0, step)
    join()
    assert stream.flags.tolist() == [num_steps] * NUM_LAYERS


def test_signal_may_come_first_or_from_the_host(stream, start):
    stream.begin_signals()
    stream.signal_layer(1)
    stream.signal_from_host(2, 1)
    stream.begin_waits()
    stream.wait_layer(1)
    stream.wait_layer(2)
    assert [stream.is_ready(layer, 1) for layer in range(4)] == [False, True, True, False]
    assert not stream.is_ready(1, 2)
    join = start(stream.wait_layer, 0)
    stream.flags[0] = 1  # as a NIC would
    join()


def test_wait_without_begin_waits_returns_immediately(stream, start_waiting):
    for layer in range(NUM_LAYERS):
        stream.wait_layer(layer)
    stream.begin_waits()
    for layer in (3, 1, 2, 0):
        join = start_waiting(stream.wait_layer, layer)
        stream.signal_from_host(layer, 1)
        join()
    for _ in range(3):
        for layer in range(NUM_LAYERS):
            stream.wait_layer(layer)


CALLS = st.sampled_from(["begin_signals", "begin_waits", "signal", "host"])


@given(st.lists(st.tuples(CALLS, st.integers(0, 1)), max_size=40))
@settings(max_examples=100, deadline=None)
def test_readiness_matches_the_loop(calls):
    """Every order of calls: a wait would pass exactly if ``flags[layer] >= wait_step``."""
    stream = mk.LayerStream(2)
    flags, signal_step, wait_step = [0, 0], 0, 0
    for call, layer in calls:
        if call == "begin_signals":
            stream.begin_signals()
            signal_step += 1
        elif call == "begin_waits":
            stream.begin_waits()
            wait_step += 1
        elif call == "signal":
            stream.signal_layer(layer)
            flags[layer] = signal_step
        else:
            stream.signal_from_host(layer, signal_step + 1)
            flags[layer] = signal_step + 1
        assert stream.flags.tolist() == flags
        for i in range(2):
            if flags[i] >= wait_step:
                stream.wait_layer(i)
            else:
                assert not stream.is_ready(i, wait_step)


def test_steps_may_be_numbered_by_the_host(stream, start_waiting):
    stream.begin_waits(7)
    stream.signal_from_host(0, 6)
    join = start_waiting(stream.wait_layer, 0)
    stream.begin_signals(7)
    stream.signal_layer(0)
    join()
    join = start_waiting(stream.wait_on_host, 0, 8)
    stream.begin_signals()
    stream.signal_layer(0)
    join()
    assert stream.flags.tolist() == [8, 0, 0, 0]


def test_timeout_names_the_missing_layer(stream):
    late = mk.LayerStream(NUM_LAYERS, timeout_s=SOON_S)
    late.begin_waits(3)
    late.signal_from_host(2, 2)
    message = r"LayerStream.wait_layer: layer 2 must be ready for step 3 within 0.02 s, got .* 2$"
    with pytest.raises(TimeoutError, match=message):
        late.wait_layer(2)
    for again in (late.check, lambda: late.wait_layer(1), lambda: late.wait_on_host(1, 1)):
        with pytest.raises(TimeoutError, match=message):
            again()
    late.reset(5)
    late.check()
    late.begin_waits()
    late.signal_from_host(1, 6)
    late.wait_layer(1)


def test_host_may_wait_again_after_a_timeout(stream):
    with pytest.raises(TimeoutError, match="LayerStream.wait_on_host: layer 3 .* step 1 .* step 0"):
        stream.wait_on_host(3, 1, SOON_S)
    stream.check()
    stream.signal_from_host(3, 1)
    stream.wait_on_host(3, 1, SOON_S)


def test_abort_ends_every_wait(stream, start):
    stream.begin_waits()
    joins = [start(stream.wait_layer, 0), start(stream.wait_on_host, 1, 1)]
    stream.abort()
    for join in joins:
        with pytest.raises(RuntimeError, match=r"abort\(\) was called"):
            join()
    with pytest.raises(RuntimeError, match=r"abort\(\) was called"):
        stream.check()
    stream.reset()
    stream.check()
    stream.wait_layer(0)
