"""A third machine in between, which does not know the secret: what it hands on leads nowhere."""

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable

import pytest

from mooncake_kernels.errors import TransferError

from ...security.test_relay import OTHER_ADDRESS, Between, engine, forms
from ..secret import NOT_ITS_ADDRESS, rejections
from ..support import UNTOUCHED, WAIT_S, untouched
from .hosts import CLONE_NEWNET, FAR, NEAR


def on_far(hosts, act: Callable[[], None]) -> threading.Thread:
    """Start a thread whose sockets are the far host's."""

    def run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        network = os.open(f"/proc/{hosts.pid}/ns/net", os.O_RDONLY)
        try:
            assert libc.setns(network, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        finally:
            os.close(network)
        act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@forms
@pytest.mark.parametrize("leads_back", [False, True])
def test_relay_on_another_host_learns_nothing(hosts, secret_only, leads_back):
    with (
        engine(secret_only, name=f"{NEAR}:0") as near,
        engine(secret_only, name=f"{NEAR}:0") as far,
    ):
        region = (near if leads_back else far).register(untouched(4096))
        between = Between(near.name if leads_back else far.name)
        listening: list[socket.socket] = []
        is_there = threading.Event()

        def relay() -> None:
            with socket.create_server((FAR, 0)) as server:
                listening.append(server)
                is_there.set()
                between(server.accept()[0])

        thread = on_far(hosts, relay)
        assert is_there.wait(WAIT_S)
        port = listening[0].getsockname()[1]
        why = "this engine itself answers" if leads_back else NOT_ITS_ADDRESS
        with pytest.raises(TransferError, match=why):
            near.open(f"{FAR}:{port}", deadline_s=WAIT_S)
        thread.join(WAIT_S)
        if not leads_back:
            assert rejections(far) == {OTHER_ADDRESS: 1}
        assert struct.pack("<Q", region.address) not in between.heard
        assert (region._buffer.owner == UNTOUCHED).all()
