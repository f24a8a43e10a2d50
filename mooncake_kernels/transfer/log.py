"""What the transfer engine logs, and the fields of its records, as in docs/transfer/metrics.md."""

import contextlib
import logging

from .. import _host
from ..errors import InvalidArgument, TransferError

_log = logging.getLogger("mooncake_kernels.transfer")


def opened(engine: str, peer: str, transport: str) -> None:
    """Log the transport by which a peer is reached."""
    _log.info(
        "%s reaches %s by %s",
        engine,
        peer,
        transport,
        extra={"engine": engine, "peer": peer, "transport": transport},
    )


def nic_left_out(engine: str, reason: str) -> None:
    """Log which NIC the engine does without, and why."""
    _log.warning(
        "%s: a NIC is left out: %s",
        engine,
        reason,
        extra={"engine": engine, "cause": reason},
    )


def without_nics(engine: str, reason: str) -> None:
    """Log why NICs of the engine, all or some, cannot use a region."""
    _log.warning(
        "%s: NICs cannot use a region: %s",
        engine,
        reason,
        extra={"engine": engine, "cause": reason},
    )


def not_opened(engine: str, error: TransferError) -> None:
    """Log why a peer could not be opened."""
    fields = {"engine": engine, "peer": error.peer, "cause": error.cause}
    _log.debug("%s does not reach %s: %s", engine, error.peer, error.cause, extra=fields)


def failed(transport: str, error: TransferError) -> None:
    """Log why a request failed. The caller gets the error; this is for readers of the log."""
    fields = {
        "peer": error.peer,
        "transport": transport,
        "cause": error.cause,
        "num_bytes": error.num_bytes_total,
        "num_bytes_done": error.num_bytes_done,
        "timed_out": error.timed_out,
    }
    _log.debug("%s", error, extra=fields)


def rejected(engine: _host.TransferEngine) -> None:
    """Log, when an engine closes, which connections it has rejected."""
    with contextlib.suppress(InvalidArgument):  # a forked child: the parent owns them
        for cause, count in engine.rejections().items():
            _log.warning(
                "%s has turned %d connections away: %s",
                engine.name,
                count,
                cause,
                extra={"engine": engine.name, "cause": cause, "count": count},
            )


def kept(engine: str) -> None:
    """Log that memory of a closed engine is never freed."""
    _log.warning(
        "%s: a stopped peer on this machine uses memory: it is kept",
        engine,
        extra={"engine": engine},
    )
