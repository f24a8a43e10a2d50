"""Large payloads are lent to the kernel: it may send their memory later, and says when it has.

A cable between two namespaces copies what it carries. The kernel says so, and no more is lent; a
slow one takes long enough to be seen with what was lent before.
"""

import os
import time

import numpy as np
import pytest

from mooncake_kernels import config
from mooncake_kernels.errors import TransferError

from ..lent import lends, needs_lending
from ..support import UNTOUCHED, WAIT_S, eventually
from .hosts import content, transfers
from .test_outages import FAST, SLOW

pytestmark = needs_lending


@pytest.fixture
def slow(hosts):
    """Transfers by a single connection, and a slow cable."""
    with config.override(transfer_lanes=1), transfers(hosts) as both:
        hosts.both(SLOW)
        yield both


@pytest.mark.parametrize("direction", ["write", "read"])
def test_zero_copy_is_disabled_once_kernel_copies(slow, direction):
    sender = os.getpid() if direction == "write" else slow.hosts.pid
    assert not lends(sender)
    ticket = slow.start(direction, key=1)
    eventually(lambda: lends(sender))
    slow.hosts.both(FAST)
    ticket.wait()
    slow.check(direction, key=1)
    eventually(lambda: not lends(sender))
    slow.start(direction, key=2).wait()
    slow.check(direction, key=2)
    assert not lends(sender)


@pytest.mark.parametrize("ends", ["cancel", "deadline"])
def test_memory_written_after_a_failed_request_is_not_sent(slow, ends):
    ticket = slow.start("write", key=1, deadline_s=0.3 if ends == "deadline" else WAIT_S)
    eventually(lambda: lends() and slow.begun("write"))
    if ends == "cancel":
        ticket.cancel()
    with pytest.raises(TransferError):
        ticket.wait(WAIT_S)
    source, target = slow.sides("write")
    source[:] = 0xAA ^ content(1)
    slow.hosts.both(FAST)
    time.sleep(0.3)  # what was under way has arrived
    assert not lends()
    assert ((target == content(1)) | (target == UNTOUCHED)).all()
    slow.start("write", key=2).wait()
    np.testing.assert_array_equal(target, content(2))
