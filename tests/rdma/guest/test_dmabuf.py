"""dma-bufs up to the kernel's answer: soft-RoCE's driver does not support them, and says so."""

import errno
import fcntl
import os
import struct
from pathlib import Path

import numpy as np
import pytest

import mooncake_kernels as mk

from .links import shell

SIZE = 1 << 20


@pytest.fixture
def dmabuf():
    """A real one, of the kernel's virtual display driver."""
    shell("modprobe vgem")
    cards = sorted(Path("/dev/dri").glob("card*"))
    if not cards:
        pytest.skip("the kernel has no vgem")
    card = os.open(cards[-1], os.O_RDWR)
    create = bytearray(struct.pack("IIIIIIQ", SIZE // 4096, 1024, 32, 0, 0, 0, 0))
    fcntl.ioctl(card, 0xC02064B2, create)  # DRM_IOCTL_MODE_CREATE_DUMB
    handle = struct.unpack("IIIIIIQ", create)[4]
    export = bytearray(struct.pack("IIi", handle, os.O_CLOEXEC | os.O_RDWR, 0))
    fcntl.ioctl(card, 0xC00C642D, export)  # DRM_IOCTL_PRIME_HANDLE_TO_FD
    fd = struct.unpack("IIi", export)[2]
    yield fd
    os.close(fd)
    os.close(card)


def test_kernel_error_is_reported(dmabuf):
    with mk.rdma.open("rxe0") as device:
        with pytest.raises(OSError, match=r"ibv_reg_dmabuf_mr: 1048576 bytes of the dma-buf") as e:
            device.register_dmabuf(dmabuf, SIZE)
        assert e.value.errno == errno.EOPNOTSUPP
        device.register(np.zeros(100, np.uint8)).close()  # and the device goes on


def test_invalid_dmabuf_is_rejected():
    with mk.rdma.open("rxe0") as device:
        with pytest.raises(mk.InvalidArgument, match="num_bytes must be an integer in 1 to"):
            device.register_dmabuf(0, 0)
        with pytest.raises(mk.InvalidArgument, match="fd must be an integer in 0 to .*, got -1"):
            device.register_dmabuf(-1, SIZE)
        with pytest.raises(OSError):
            device.register_dmabuf(987_654, SIZE)
