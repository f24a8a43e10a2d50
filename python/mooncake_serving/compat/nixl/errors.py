"""The exceptions of ``nixl._bindings``, and which of them a failure of our engine becomes."""

from mooncake_kernels.errors import FailureKind, InvalidArgument, TransferError


class nixlNotPostedError(Exception):  # noqa: N801
    """The transfer was not posted."""


class nixlInvalidParamError(ValueError):  # noqa: N801
    """An argument is wrong; the message names it, what it must be, and what it was."""


class nixlBackendError(Exception):  # noqa: N801
    """The engine, a disk or the peer refused or failed."""


class nixlNotFoundError(Exception):  # noqa: N801
    """There is no such agent, registered memory or backend."""


class nixlMismatchError(Exception):  # noqa: N801
    """These bytes are no metadata or descriptors of this library."""


class nixlNotAllowedError(Exception):  # noqa: N801
    """That would replace what is in use, or the peer does not trust this side."""


class nixlRepostActiveError(Exception):  # noqa: N801
    """The transfer is still running."""


class nixlUnknownError(Exception):  # noqa: N801
    """Unforeseen; nothing here raises it."""


class nixlNotSupportedError(Exception):  # noqa: N801
    """This library does not have it; the message says what."""


class nixlRemoteDisconnectError(Exception):  # noqa: N801
    """The peer is gone, was restarted, cannot be reached, or does not answer."""


class nixlCancelledError(Exception):  # noqa: N801
    """The transfer was cancelled, or this side closed what it needs."""


class nixlNoTelemetryError(Exception):  # noqa: N801
    """Telemetry is off, by ``NIXL_TELEMETRY_ENABLE`` or the agent's configuration."""


# A peer that fails so is forgotten: its addresses belong to a process that is gone or unreachable.
LOST = frozenset({FailureKind.GONE, FailureKind.DISCONNECTED, FailureKind.UNREACHABLE})

_CLASSES: dict[FailureKind, type[Exception]] = {
    **dict.fromkeys(LOST | {FailureKind.TIMED_OUT}, nixlRemoteDisconnectError),
    FailureKind.CANCELLED: nixlCancelledError,
    FailureKind.CLOSED: nixlCancelledError,
    FailureKind.DENIED: nixlNotAllowedError,
}


def as_nixl(error: Exception) -> Exception:
    """The exception that NIXL's callers expect for a failure of our engine, with its text."""
    if isinstance(error, TransferError):
        return _CLASSES.get(error.kind, nixlBackendError)(str(error))
    if isinstance(error, InvalidArgument):
        return nixlInvalidParamError(str(error))
    return nixlBackendError(str(error) or type(error).__name__)
