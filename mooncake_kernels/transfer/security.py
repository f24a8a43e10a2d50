"""How engines authenticate each other and hide their traffic: secret, TLS, users of a machine."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import config
from ..errors import InvalidArgument, shown
from .arguments import as_address

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


@dataclass(frozen=True)
class Trust:
    """Whom an engine lets in, and how they prove to be that, as the host code takes it."""

    secret: bytes | None
    secret_only: bool
    tls: tuple[bytes, bytes, bytes, bool] | None
    local_users: tuple[int, ...]
    reached_at: tuple[str, ...]

    @classmethod
    def of(
        cls, secret: Any, secret_only: Any, tls: Any, local_users: Any, reached_at: Any
    ) -> "Trust":
        """From the arguments of a ``TransferEngine``, and the settings."""
        found, files = as_secret(secret), as_tls(tls)
        alone = found is not None and files is None
        return cls(
            found,
            _as_secret_only(secret_only, alone=alone),
            files,
            _as_local_users(local_users),
            _as_addresses(reached_at),
        )


def _as_secret_only(secret_only: Any, *, alone: bool) -> bool:
    if secret_only is None:
        return config.current().secret_only == 1 and alone
    if not isinstance(secret_only, bool):
        raise InvalidArgument(
            f"TransferEngine: secret_only must be a bool, got {shown(secret_only)}"
        )
    if secret_only and not alone:
        raise InvalidArgument(
            "TransferEngine: secret_only must be False without a secret and with tls, got True"
        )
    return secret_only


def _as_local_users(users: Any) -> tuple[int, ...]:
    if users is None:
        return config.current().local_users
    is_list = isinstance(users, Collection) and not isinstance(users, str | bytes)
    is_id = is_list and all(
        isinstance(user, int) and not isinstance(user, bool) and config.is_user_id(user)
        for user in users
    )
    if not is_id:
        raise InvalidArgument(
            "TransferEngine: local_users must be a list of user ids in "
            f"[0, {config.MAX_USER_ID}], got {shown(users)}"
        )
    return tuple(users)


def _as_addresses(addresses: Any) -> tuple[str, ...]:
    if not isinstance(addresses, Collection) or isinstance(addresses, str | bytes):
        raise InvalidArgument(
            f'TransferEngine: reached_at must be a list of "host:port", got {shown(addresses)}'
        )
    return tuple(as_address("TransferEngine", "reached_at", address) for address in addresses)


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
