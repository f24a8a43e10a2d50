"""A forked child has copies of the parent's handles: it can use none, and closes none."""

import gc
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest

from mooncake_kernels import InvalidArgument, rdma

ROOT = Path(__file__).parents[3]
GIVES_BACK = (
    *("ibv_dereg_mr", "ibv_destroy_qp", "ibv_destroy_cq", "ibv_destroy_comp_channel"),
    *("ibv_dealloc_pd", "ibv_close_device"),
)


def in_child(call) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_forked_child_cannot_use_parents_objects(connection):
    near = connection.near

    def use():
        for call in (
            near.queue.poll,
            near.queue.queue_pair,
            near.device.completion_queue,
            lambda: near.device.register(bytearray(8)),
            lambda: connection.write([]),
            lambda: near.region.remote,
        ):
            with pytest.raises(InvalidArgument, match="used in the process that made it"):
                call()

    in_child(use)


@pytest.mark.parametrize("how", ["close", "forget"])
def test_forked_child_does_not_close_parents_objects(world, connection, how):
    before = {verb: world.calls(verb) for verb in GIVES_BACK}
    near, far = connection.near, connection.far
    cache = rdma.RegistrationCache([near.device])
    lease, idle = cache.lease(np.zeros(100)), np.zeros(200)
    cache.lease(idle).close()

    def end():
        nonlocal cache, lease, idle
        del idle
        if how == "close":
            for handle in (lease, cache, near.region, near.pair, near.queue, near.device):
                handle.close()
        del lease, cache
        for side in (near, far):
            side.__dict__.clear()
        gc.collect()

    in_child(end)
    assert {verb: world.calls(verb) for verb in GIVES_BACK} == before
    connection.near.queue.wait(connection.write([(0, 0, 100)]))
    lease.close()
    cache.close()


@pytest.mark.parametrize("closed", ["queue", "device"])
def test_forked_child_closes_a_queue_locked_by_another_thread(connection, closed):
    """Its copy of the lock stays held: nobody in the child will release it."""

    def close():
        signal.alarm(20)
        getattr(connection.near, closed).close()

    with connection.near.queue._lock:
        in_child(close)


def test_forked_child_opens_its_own_device(world):
    def use():
        with rdma.open("fake1") as device:
            assert rdma.probe(device, bytearray(10)) == ""

    with rdma.open("fake0"):
        in_child(use)


PREPARES = """
import errno, sys
sys.path.append(sys.argv[1])
from tests.rdma.fake.world import World
world = World()
from mooncake_kernels import rdma
if sys.argv[2] != "unneeded":
    world.set_option("fork_status", 0)
if sys.argv[2] == "refused":
    world.fail("ibv_fork_init", errno.EINVAL)
rdma.devices()
for name in ("fake0", "fake1"):
    with rdma.open(name) as device, device.register(bytearray(100)):
        pass
verbs = [call["verb"] for call in world.log()]
prepared = [] if sys.argv[2] == "unneeded" else ["ibv_fork_init"]
assert verbs == [*prepared, "ibv_reg_mr_iova2", "ibv_reg_mr_iova2"], verbs
world.check()
"""


@pytest.mark.parametrize("case", ["granted", "refused", "unneeded"])
def test_fork_support_is_enabled_before_registration(case):
    """On old kernels a fork would part the NIC's memory from this process's."""
    command = [sys.executable, "-c", PREPARES, str(ROOT), case]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
