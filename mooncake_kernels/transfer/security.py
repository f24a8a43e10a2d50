"""How engines authenticate each other and hide their traffic: secret and TLS."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import config
from ..errors import InvalidArgument

FilePath = str | os.PathLike[str]


@dataclass(frozen=True)
class Tls:
    """The TLS 1.3 credentials of an engine: PEM files, read when the engine is created.

    An engine is both client and server, and presents the same certificate as either.

    Attributes:
        certificate: this engine's certificate, and those between it and the CA's.
        key: its private key, not encrypted.
        ca: certificates of the CAs that may have signed a peer's. It is verified on both sides.
            None: any certificate is accepted, and only a secret authenticates the peer.
        verify_host: whether the certificate of a peer that is opened must be for the host in its
            name (a subjectAltName, of DNS or IP). It matters only with ``ca``.
    """

    certificate: FilePath
    key: FilePath
    ca: FilePath | None = None
    verify_host: bool = True


def as_secret(secret: Any) -> bytes | None:
    """The secret, from the argument or the settings; no message contains it."""
    if secret is None:
        return _secret_of_settings()
    if not isinstance(secret, str | bytes):
        raise InvalidArgument(
            f"TransferEngine: secret must be bytes or str, got {type(secret).__name__}"
        )
    if isinstance(secret, bytes):
        return secret
    try:
        return secret.encode("utf-8", "surrogateescape")  # as the variable's bytes arrive
    except UnicodeEncodeError:
        raise InvalidArgument("TransferEngine: secret must be text that UTF-8 can hold") from None


def _secret_of_settings() -> bytes | None:
    settings = config.current()
    if settings.secret and settings.secret_file:
        raise InvalidArgument(
            "TransferEngine: MOONCAKE_KERNELS_SECRET and MOONCAKE_KERNELS_SECRET_FILE must not "
            "both be set"
        )
    if settings.secret:
        return as_secret(settings.secret)
    if not settings.secret_file:
        return None
    expected = "TransferEngine: MOONCAKE_KERNELS_SECRET_FILE must be a file with a secret, got"
    try:
        secret = Path(settings.secret_file).expanduser().read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise InvalidArgument(f"{expected} {error}") from None
    if not secret:
        raise InvalidArgument(f"{expected} {settings.secret_file!r}, which is empty")
    return secret


def as_tls(tls: Any) -> tuple[bytes, bytes, bytes, bool] | None:
    """The fields of a ``Tls``, as the host code takes them; an empty path means no CA."""
    if tls is None:
        return None
    if not isinstance(tls, Tls):
        raise InvalidArgument(f"TransferEngine: tls must be a Tls, got {type(tls).__name__}")
    certificate, key = (_as_path(field, getattr(tls, field)) for field in ("certificate", "key"))
    ca = b"" if tls.ca is None else _as_path("ca", tls.ca)
    if not isinstance(tls.verify_host, bool):
        raise InvalidArgument(
            f"TransferEngine: tls.verify_host must be a bool, got {tls.verify_host!r}"
        )
    return certificate, key, ca, tls.verify_host


def _as_path(field: str, path: Any) -> bytes:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InvalidArgument(f"TransferEngine: tls.{field} must be a path, got {path!r}")
    return os.fsencode(path)
