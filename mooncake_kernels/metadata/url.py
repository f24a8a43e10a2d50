"""URLs of metadata servers. Passwords and other secrets in them are never shown."""

import re
from base64 import b64encode
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ..errors import InvalidArgument, Unavailable
from .untrusted import printable

FORMS = '"p2p", "redis://host:port/db" or "http://host:port/metadata"'
DEFAULT_PREFIX = "mooncake/"
SENTINEL_PORT = 26379
LOGIN = ("db", "username", "password")
OPTIONS = {  # of the query, besides prefix, by scheme
    "redis": LOGIN,
    "rediss": (*LOGIN, "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"),
    "unix": LOGIN,
    "redis+sentinel": LOGIN,
    "http": (),
    "https": ("ssl_ca_certs",),
}


@dataclass(frozen=True, repr=False)
class MetadataUrl:
    """A checked URL.

    Attributes:
        parts: the URL; its query has become ``options``.
        prefix: of all keys.
        options: of the connection.
        sentinels: hosts and ports of the sentinels that know a service's current master, if the URL
            names any; ``parts`` has the first, and the service as its path.
    """

    parts: SplitResult
    prefix: str
    options: dict[str, str]
    sentinels: tuple[tuple[str, int], ...] = ()

    @property
    def login(self) -> tuple[str, str]:
        """User and password, empty if there are none."""
        user, password = self.parts.username or "", self.parts.password or ""
        return (
            unquote(user) or self.options.get("username", ""),
            unquote(password) or self.options.get("password", ""),
        )

    def error(self, words: str) -> Unavailable:
        """Make an error about the server, without secrets, which it may have quoted."""
        user, password = self.login
        for secret in (password or user, basic(user, password)):  # a user alone may be a token
            words = words.replace(secret, "***") if secret else words
        return Unavailable(f"metadata server {self}: {printable(words)}")

    def __str__(self) -> str:
        """Return it without secrets."""
        if self.parts.scheme == "unix":
            return f"unix://{self.parts.path}"
        hosts = self.sentinels or ((self.parts.hostname or "", self.parts.port),)
        address = ",".join(_address(host, port) for host, port in hosts)
        return f"{self.parts.scheme}://{address}{self.parts.path}"

    def __repr__(self) -> str:
        """Return it without secrets, too."""
        return f"MetadataUrl({self})"


def has_secret(value: str) -> bool:
    """Whether a text may be a URL with a login, or another secret, in it."""
    try:
        parts = urlsplit(value)
    except ValueError:
        return "@" in value
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    return "@" in value or "password" in options


def without_secrets(value: str) -> str:
    """A text that may be a URL, for an error: without a login, and without options."""
    scheme, found, rest = value.partition("://")
    if not found:
        scheme, rest = "", value
    _, has_login, address = rest.rpartition("@")
    login = "***@" if has_login else ""
    return printable(f"{scheme}{found}{login}{address.partition('?')[0]}")


def _address(host: str, port: int | None) -> str:
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{port}" if port else host


def basic(user: str, password: str) -> str:
    """A login in HTTP's basic form."""
    return b64encode(f"{user}:{password}".encode()).decode() if user or password else ""


def parse_url(
    op: str,
    argument: str,
    value: Any,
    forms: str = FORMS,
    schemes: Collection[str] = tuple(OPTIONS),
) -> MetadataUrl:
    """Check a URL; errors do not quote it.

    Args:
        op: the call it is an argument of.
        argument: its name.
        value: of the argument.
        forms: what it must be, for the text of an error.
        schemes: the allowed ones of ``OPTIONS``.
    """

    def refuse(why: str) -> InvalidArgument:
        return InvalidArgument(f"{op}: {argument} must be {forms}, got {why}")

    if not isinstance(value, str):
        raise refuse(f"a {type(value).__name__}")
    try:
        parts, sentinels = _split(value)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise refuse("no URL, or one with a port that is none") from None
    if parts.scheme not in schemes:
        raise refuse("a URL of another scheme" if "://" in value else "no URL")
    if parts.scheme == "unix" and (host or not parts.path.startswith("/")):
        raise refuse("a unix:// URL without an absolute path")
    if parts.scheme != "unix" and (not host or port == 0):
        raise refuse("a URL without a host, or with port 0")
    # An unquoted "/", "?" or "#" in a password would end up in these.
    if parts.fragment or "@" in parts.path or not re.fullmatch("[!-~]*", value):
        raise refuse("a URL with characters that must be quoted (%XX)")
    if sentinels and not re.fullmatch(r"/[A-Za-z0-9._-]+", parts.path):
        raise refuse("sentinels without the name of a service")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    database = parts.path[1:] if parts.scheme in ("redis", "rediss") else ""
    if not re.fullmatch(r"[0-9]{0,9}", database + options.get("db", "")):
        raise refuse("a database that is no number")
    if database and options.get("db"):
        raise refuse("two databases")
    prefix = options.pop("prefix", DEFAULT_PREFIX)
    if not re.fullmatch(r"[!-~]{0,200}", prefix):
        raise refuse("a prefix that is not printable ASCII without spaces")
    if not set(options) <= set(OPTIONS[parts.scheme]):
        raise refuse(f"options other than {', '.join(('prefix', *OPTIONS[parts.scheme]))}")
    return MetadataUrl(parts._replace(query=""), prefix, options, sentinels)


def _split(value: str) -> tuple[SplitResult, tuple[tuple[str, int], ...]]:
    """Split a URL; of several hosts, which only sentinels have, it keeps the first one."""
    start = "redis+sentinel://"
    if not value.lower().startswith(start):
        return urlsplit(value), ()
    # Before urlsplit sees them: brackets in the middle are an error to newer versions of it.
    authority, rest = re.findall(r"([^/?#]*)(.*)", value[len(start) :], re.DOTALL)[0]
    login, at, hosts = authority.rpartition("@")
    each = [urlsplit(f"//{host}") for host in hosts.split(",")]
    if any(not one.hostname or one.port == 0 for one in each):
        raise ValueError("a sentinel without a host, or with port 0")
    sentinels = tuple((str(one.hostname), one.port or SENTINEL_PORT) for one in each)
    return urlsplit(f"{start}{login}{at}{each[0].netloc}{rest}"), sentinels
