"""Shared by the tests of the secret: engines that know it, others, and the errors of each."""

import pytest

from mooncake_kernels.errors import FailureKind, TransferError
from mooncake_kernels.transfer import TransferEngine

from .support import WAIT_S, eventually

OURS = b"what all of us know, and others do not"
THEIRS = b"what others know, and none of us does"
ANOTHER = "the peer's secret is another"
NONE = "the peer has no secret"
NOT_ITS_ADDRESS = "the engine that answers is not of this address, unless its reached_at says so"
UNWANTED = "the peer has a secret, this engine has none"
TLS_ONLY = "the peer speaks TLS only"
NO_TLS = "the peer speaks no TLS"
UNWANTED_TLS = "the peer speaks TLS only, this engine does not"


def initiator(secret: bytes | None, **options) -> TransferEngine:
    """Over tcp, and without TLS unless told otherwise, as raw peers are."""
    options = {"secret_only": True, **options} if secret else options
    return TransferEngine(transports=["tcp"], secret=secret, **options)


def rejections(engine: TransferEngine, count: int = 1) -> dict[str, int]:
    """What an engine has rejected, once it has: that may be after the other side knows."""
    eventually(lambda: sum(engine.rejections().values()) >= count)
    return engine.rejections()


def cause_of_opening(engine: TransferEngine, name: str) -> str:
    with pytest.raises(TransferError) as caught:
        engine.open(name, deadline_s=WAIT_S)
    if caught.value.cause in (ANOTHER, NONE, UNWANTED, TLS_ONLY, NO_TLS):
        assert caught.value.kind is FailureKind.DENIED
    return caught.value.cause
