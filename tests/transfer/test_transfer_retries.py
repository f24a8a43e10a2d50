"""Lost connections: their requests move to others, as often as allowed."""

import numpy as np
import pytest

from mooncake_kernels import config
from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from .proxy import Proxy
from .support import addressed, eventually, untouched

SIZE = 8 << 20
HELD = 1 << 17  # what passes of a connection, which is lost in the middle of its first piece then


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_transfer_survives_losing_all_lanes_at_once(direction, lanes):
    with (
        config.override(transfer_lanes=lanes),
        TransferEngine() as far,
        Proxy(far.name, limit=HELD) as proxy,
        TransferEngine(transports=["tcp"]) as near,
    ):
        source, target = addressed(SIZE), untouched(SIZE)
        here, there = (source, target) if direction == "write" else (target, source)
        row = (near.register(here).address, far.register(there).address, SIZE)
        ticket = getattr(near, direction)(near.open(proxy.name), [row])
        eventually(lambda: len(proxy.relays) == lanes)
        eventually(lambda: all(moved(relay) > HELD // 2 for relay in proxy.relays))
        assert not ticket.done
        proxy.limit = None
        proxy.cut()
        ticket.wait()
        assert len(proxy.relays) > lanes
        np.testing.assert_array_equal(target, source)


def moved(relay) -> int:
    return len(relay.up.passed) + len(relay.down.passed)


@pytest.mark.usefixtures("one_lane")
def test_transfer_fails_after_losing_every_connection():
    with (
        TransferEngine() as far,
        Proxy(far.name, limit=HELD) as proxy,
        TransferEngine(transports=["tcp"]) as near,
    ):
        here, there = near.register(addressed(SIZE)), far.register(untouched(SIZE))
        ticket = near.write(near.open(proxy.name), [(here.address, there.address, SIZE)])
        for number in range(4):
            eventually(lambda number=number: len(proxy.relays) == number + 1)
            eventually(lambda: moved(proxy.relays[-1]) > HELD // 2)
            assert not ticket.done
            proxy.cut()
        with pytest.raises(TransferError, match="connection closed by peer"):
            ticket.wait()
        assert len(proxy.relays) == 4
