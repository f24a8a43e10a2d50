"""Shared by the tests of the secret: engines that know it, others, and the errors of each."""

import time

import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from .support import WAIT_S

OURS = b"what all of us know, and others do not"
THEIRS = b"what others know, and none of us does"
ANOTHER = "the peer's secret is another"
NONE = "the peer has no secret"
UNWANTED = "the peer has a secret, this engine has none"


def initiator(secret: bytes | None) -> TransferEngine:
    return TransferEngine(transports=["tcp"], secret=secret)


def rejections(engine: TransferEngine, count: int = 1) -> dict[str, int]:
    """What an engine has rejected, once it has: that may be after the other side knows."""
    until = time.monotonic() + WAIT_S
    while sum(engine.rejections().values()) < count and time.monotonic() < until:
        time.sleep(0.001)
    return engine.rejections()


def cause_of_opening(engine: TransferEngine, name: str) -> str:
    with pytest.raises(TransferError) as caught:
        engine.open(name, deadline_s=WAIT_S)
    return caught.value.cause
