"""Wrong arguments: the error names each, its value and what is valid, and nothing is done."""

import numpy as np
import pytest

from mooncake_kernels import InvalidArgument, rdma

WRONG = [None, "x", 1.5, [], 1 << 80]


@pytest.mark.parametrize("value", WRONG)
def test_integers(connection, value):
    near = connection.near
    calls = {
        "number": near.device.port,
        "depth": near.device.completion_queue,
        "port": lambda v: near.queue.queue_pair(port=v),
        "max_sends": lambda v: near.queue.queue_pair(max_sends=v),
        "max_sges": lambda v: near.queue.queue_pair(max_sges=v),
        "max_immediates": lambda v: near.queue.queue_pair(max_immediates=v),
        "timeout": lambda v: near.pair.connect(near.pair.endpoint, timeout=v),
        "max_piece_bytes": lambda v: near.device.register(bytearray(8), max_piece_bytes=v),
        "num_bytes": lambda v: near.device.register_dmabuf(3, v),
        "fd": lambda v: near.device.register_dmabuf(v, 8),
        "max_bytes": lambda v: rdma.RegistrationCache([near.device], max_bytes=v),
        "device": rdma.flush_writes,
    }
    for name, call in calls.items():
        with pytest.raises(InvalidArgument, match=f": {name} must be an integer in"):
            call(value)
    assert near.pair.connected


@pytest.mark.parametrize("value", [None, "x", float("nan"), -1, float("inf")])
def test_seconds(connection, value):
    near = connection.near
    token = connection.write([(0, 0, 8)])
    for call in (
        lambda: near.queue.poll(timeout_s=value),
        lambda: near.queue.poll(spin_s=value),
        lambda: near.queue.wait(token, timeout_s=value),
        lambda: near.device.wait_event(value),
        lambda: rdma.probe(near.device, bytearray(8), timeout_s=value),
    ):
        with pytest.raises(InvalidArgument, match="_s must be a finite number of seconds >="):
            call()
    near.queue.wait(token)


def test_objects(connection):
    near, far = connection.near, connection.far
    rows = [(near.region.address, far.region.address, 8)]
    calls = {
        "name": lambda: rdma.open(5),
        "peer": lambda: near.pair.connect(near.pair.endpoint.to_bytes()),
        "region": lambda: near.pair.write(near.memory, far.region.remote, rows),
        "remote": lambda: near.pair.write(near.region, far.region, rows),
        "immediate": lambda: near.pair.write(near.region, far.region.remote, [], immediate="7"),
        "ranges": lambda: near.pair.write(near.region, far.region.remote, None),
        "devices\\[1\\]": lambda: rdma.register([near.device, "fake1"], bytearray(8)),
        "access": lambda: near.device.register(bytearray(8), {}),
        "relaxed_ordering": lambda: near.device.register(bytearray(8), relaxed_ordering="no"),
        "device": lambda: rdma.probe(None, bytearray(8)),
        "gid_index": lambda: near.queue.queue_pair(gid_index=-1),
        "buffer": lambda: rdma.RegistrationCache([near.device]).invalidate((1,)),
    }
    for name, call in calls.items():
        with pytest.raises(InvalidArgument, match=f": {name} must be"):
            call()


@pytest.mark.parametrize(
    "column",
    [np.array([8.0]), np.array(["8"]), np.array([None]), np.array([-8]), np.array([[8]]),
     np.array([8, 8])],
)  # fmt: skip
def test_columns(connection, column):
    near, far = connection.near, connection.far
    good = [np.array([near.region.address]), np.array([far.region.address])]
    with pytest.raises(InvalidArgument, match="ranges"):
        near.pair.write(near.region, far.region.remote, (*good, column))
    with pytest.raises(InvalidArgument, match="ranges must be"):
        near.pair.write(near.region, far.region.remote, tuple(good))


def test_generators_of_devices(world):
    devices = [rdma.open(f"fake{i}") for i in range(3)]
    regions = rdma.register((device for device in devices), bytearray(8))
    assert [region.device.name for region in regions] == ["fake0", "fake1", "fake2"]
    with rdma.RegistrationCache(device for device in devices) as cache:
        assert len(cache.lease(bytearray(8)).regions) == 3
    for device in devices:
        device.close()
