"""``after``: local memory is not touched before the GPU has done the preceding work."""

import time

import numpy as np
import pytest
import torch

from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable

from ...fake_cuda.gpus import GPUS, IS_FAKE
from ...fake_cuda.new_process import in_new_process
from ..support import UNTOUCHED, WAIT_S, addressed, engine_pair, untouched

SIZE = 1 << 20


@pytest.fixture
def late(pair, driver):
    """A region whose bytes a stalled stream has yet to write; the target's region; that stream."""
    near, data, far = (GPUS.allocate(SIZE) for _ in range(3))
    data.put(addressed(SIZE))
    pair.regions(near.buffer, far.buffer)
    stream = driver.stream()
    stream.stall()
    stream.copy(near.buffer, data.buffer)
    yield near, far, stream
    stream.close()


def test_a_write_waits_for_an_event(pair, late, driver):
    near, far, stream = late
    event = stream.record()
    row = [(near.address, far.address, SIZE)]
    ticket = pair.near.write(pair.peer, row, after=event, notify=b"here")
    stream.forget(event)  # it may be gone, or recorded anew, as soon as the call returns
    time.sleep(0.02)
    assert not ticket.done and (far.get() == UNTOUCHED).all()
    assert pair.far.receive_notifications() == []
    stream.release()
    ticket.wait(WAIT_S)
    assert np.array_equal(far.get(), addressed(SIZE))
    assert pair.far.receive_notifications(WAIT_S) == [(pair.near.name, b"here")]


def test_a_read_waits_for_an_event(pair, driver):
    near, far = GPUS.allocate(SIZE), GPUS.allocate(SIZE)
    pair.regions(near.buffer, far.buffer)
    far.put(addressed(SIZE))
    stream = driver.stream()
    stream.stall()
    event = stream.record()
    ticket = pair.near.read(pair.peer, [(near.address, far.address, SIZE)], after=event)
    time.sleep(0.02)
    assert not ticket.done and (near.get() == UNTOUCHED).all()
    stream.release()
    ticket.wait(WAIT_S)
    assert np.array_equal(near.get(), addressed(SIZE))
    stream.forget(event)
    stream.close()


def test_write_of_host_memory_waits_for_an_event(pair, driver):
    near, far = untouched(4096), untouched(4096)
    local, remote = pair.regions(near, far)
    stream = driver.stream()
    stream.stall()
    event = stream.record()
    ticket = pair.near.write(pair.peer, [(local.address, remote.address, 4096)], after=event)
    time.sleep(0.02)
    assert not ticket.done
    near[:] = addressed(4096)
    stream.release()
    ticket.wait(WAIT_S)
    assert np.array_equal(far, addressed(4096))
    stream.forget(event)
    stream.close()


def test_deadline_expires_while_waiting_for_event(pair, late):
    near, far, stream = late
    event = stream.record()
    row = [(near.address, far.address, SIZE)]
    ticket = pair.near.write(pair.peer, row, after=event, deadline_s=0.1)
    with pytest.raises(TransferError, match=r"deadline of 0\.1 s passed") as error:
        ticket.wait(WAIT_S)
    assert error.value.timed_out and error.value.num_bytes_done == 0
    stream.release()
    assert (far.get() == UNTOUCHED).all()
    pair.near.write(pair.peer, row, after=event).wait(WAIT_S)  # what was late is there by now
    assert np.array_equal(far.get(), addressed(SIZE))
    stream.forget(event)


def test_waiting_transfer_can_be_cancelled_or_lose_its_region(pair, late, driver):
    near, far, stream = late
    event = stream.record()
    row = [(near.address, far.address, SIZE)]
    ticket = pair.near.write(pair.peer, row, after=event)
    time.sleep(0.02)
    assert ticket.cancel()
    other = GPUS.allocate(4096)
    region = pair.near.register(other.buffer)
    ticket = pair.near.write(pair.peer, [(other.address, far.address, 4096)], after=event)
    time.sleep(0.02)
    region.close()
    with pytest.raises(TransferError, match="a region in use was closed"):
        ticket.wait(WAIT_S)
    assert (far.get() == UNTOUCHED).all()
    stream.release()
    stream.forget(event)


def test_requests_ahead_finish_before_the_event_wait(pair, late):
    near, far, stream = late
    first, second = untouched(SIZE), untouched(SIZE)
    first[:] = addressed(SIZE)
    local, remote = pair.regions(first, second)
    event = stream.record()
    ahead = [pair.near.write(pair.peer, [(local.address, remote.address, SIZE)]) for _ in range(4)]
    behind = pair.near.write(pair.peer, [(near.address, far.address, SIZE)], after=event)
    for ticket in ahead:
        ticket.wait(WAIT_S)
    assert np.array_equal(second, addressed(SIZE)) and not behind.done
    stream.release()
    behind.wait(WAIT_S)
    assert np.array_equal(far.get(), addressed(SIZE))
    stream.forget(event)


def test_driver_error_in_event_query_fails_the_request(pair, late, driver):
    near, far, stream = late
    event = stream.record()
    driver.fail("cuEventQuery", 700)
    ticket = pair.near.write(pair.peer, [(near.address, far.address, SIZE)], after=event)
    with pytest.raises(TransferError, match="cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS"):
        ticket.wait(WAIT_S)
    stream.release()
    stream.forget(event)


def test_after_rejects_non_events(pair):
    local, remote = pair.regions(untouched(16), untouched(16))
    for wrong in ("now", 0, -1, 1 << 64, 1.5, True, object()):
        with pytest.raises(InvalidArgument, match=r"write: after must be a torch\.cuda\.Event"):
            pair.near.write(pair.peer, [(local.address, remote.address, 16)], after=wrong)


def _write_after_an_event() -> int:
    with engine_pair("local") as pair:
        local, remote = pair.regions(untouched(16), untouched(16))
        with pytest.raises(Unavailable, match="after: no GPU is in use in this process"):
            pair.near.write(pair.peer, [(local.address, remote.address, 16)], after=1 << 20)
        return GPUS.driver.get("cuInit")


def test_after_without_cuda_context_is_rejected(driver):
    assert in_new_process(_write_after_an_event) == 0


class TorchLike:
    """What is looked at of torch's streams and events."""

    def __init__(self, handle: int):
        self.cuda_stream = self.cuda_event = handle
        self.device_index, self.device = 0, torch.device("cuda:0")


@pytest.mark.parametrize("kind", ["Stream", "Event"])
def test_after_accepts_torch_like_streams_and_events(pair, late, monkeypatch, kind):
    near, far, stream = late
    monkeypatch.setattr(torch.cuda, kind, TorchLike)
    event = stream.record()
    after = TorchLike(stream.handle if kind == "Stream" else event)
    row = [(near.address, far.address, SIZE)]
    ticket = pair.near.write(pair.peer, row, after=after)
    stream.stall()  # what comes into the stream later is not waited for
    time.sleep(0.02)
    assert not ticket.done and (far.get() == UNTOUCHED).all()
    stream.release()
    ticket.wait(WAIT_S)
    assert np.array_equal(far.get(), addressed(SIZE))
    with pytest.raises(InvalidArgument, match="after must be a recorded event"):
        monkeypatch.setattr(torch.cuda, "Stream", int)
        monkeypatch.setattr(torch.cuda, "Event", TorchLike)
        pair.near.write(pair.peer, row, after=TorchLike(0))
    stream.release()
    stream.forget(event)


def test_after_rejects_stream_under_graph_capture(pair, late, driver, monkeypatch):
    """An event in it would be part of the graph, and nobody could ask for it."""
    near, far, stream = late
    monkeypatch.setattr(torch.cuda, "Stream", TorchLike)
    driver.set(is_capturing=1)
    recorded = driver.get("cuEventRecord")
    with pytest.raises(Unavailable, match="captured into a graph"):
        row = [(near.address, far.address, SIZE)]
        pair.near.write(pair.peer, row, after=TorchLike(stream.handle))
    assert driver.get("cuEventRecord") == recorded
    driver.set(is_capturing=0)
    stream.release()


@pytest.mark.skipif(IS_FAKE, reason="torch knows no made-up GPU")
@pytest.mark.parametrize("kind", ["stream", "event", "handle"])
def test_torch_streams_and_events(pair, kind):
    near, far = GPUS.allocate(SIZE), GPUS.allocate(SIZE)
    pair.regions(near.buffer, far.buffer)
    data = torch.from_numpy(addressed(SIZE)).cuda()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
        near.buffer.copy_(data, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    after = {"stream": stream, "event": event, "handle": event.cuda_event}[kind]
    row = [(near.address, far.address, SIZE)]
    pair.near.write(pair.peer, row, after=after).wait(WAIT_S)
    assert np.array_equal(far.get(), addressed(SIZE))
    unrecorded = torch.cuda.Event()
    with pytest.raises(InvalidArgument, match="after must be a recorded event"):
        pair.near.write(pair.peer, row, after=unrecorded)
