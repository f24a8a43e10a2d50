"""Every environment variable of the project, in two frozen dataclasses.

``Settings`` is read when a feature first needs it, never at import. ``BuildSettings`` is read only
by setup.py, which loads this file by path (it imports nothing but the standard library). An absent
variable means the default; a malformed one raises, naming the variable and the value.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIX = "MOONCAKE_KERNELS_"
NO_SUCH_SETTING = "there is no such setting"
MAX_INT = 2**31 - 1  # limit of the compiled code
MAX_USER_ID = 2**32 - 2  # 2**32 - 1 means no user


def _positive_int(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_INT:
        raise ValueError
    return value


def _integer_in(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return parse


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _part_of_a_day(text: str) -> float:
    value = float(text)
    if not 0.001 <= value <= 86_400:
        raise ValueError
    return value


def _word(text: str) -> str:
    if text.split() != [text]:
        raise ValueError
    return text


def _printable(text: str) -> str:
    if not (text.isascii() and (text.isprintable() or not text)):
        raise ValueError
    return text


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return parse


def _set_of(*choices: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(word for word in text.split(",") if word)
        if not set(words) <= set(choices):
            raise ValueError
        return words

    return parse


def is_user_id(number: int) -> bool:
    """Whether a user of this machine may have this number."""
    return 0 <= number <= MAX_USER_ID


def _user_ids(text: str) -> tuple[int, ...]:
    users = tuple(int(word) for word in text.split(",") if word)
    if not all(is_user_id(user) for user in users):
        raise ValueError
    return users


def _setting(
    default: Any, parse: Callable[[str], Any], expected: str, doc: str, *, shown: bool = True
) -> Any:
    metadata = {"parse": parse, "expected": expected, "doc": doc}
    return field(default=default, repr=shown, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Settings of the running package."""

    threads: int = _setting(
        0,
        lambda text: int(text) if text == "0" else _positive_int(text),
        f"an integer in [0, {MAX_INT}]",
        "threads of host functions outside torch (hashing); 0: one per CPU that it may use",
    )
    listen_host: str = _setting(
        "127.0.0.1",
        _word,
        "an address",
        "address a TransferEngine listens on when its name gives none",
    )
    deadline_s: float = _setting(
        30.0,
        _positive_float,
        "a number > 0",
        "seconds a transfer may take when the call gives none",
    )
    transfer_lanes: int = _setting(
        2,
        _positive_int,
        f"an integer in [1, {MAX_INT}]",
        "connections of a TransferEngine to a peer, each with a thread, for large transfers; "
        "if not 1, up to three more over tcp, for small ones of several threads",
    )
    rdma_gid_index: int = _setting(
        -1,
        _integer_in(-1, 255),
        "an integer in [-1, 255]",
        "GID, by its place in the port's table, that a TransferEngine's NICs use; -1: chosen",
    )
    rdma_traffic_class: int = _setting(
        0,
        _integer_in(0, 255),
        "an integer in [0, 255]",
        "traffic class of a TransferEngine's packets over NICs: 4 times the DSCP",
    )
    rdma_service_level: int = _setting(
        0,
        _integer_in(0, 15),
        "an integer in [0, 15]",
        "service level of a TransferEngine's packets over NICs",
    )
    metadata_ttl_s: float = _setting(
        15.0,
        _part_of_a_day,
        "a number of seconds from 0.001 to 86400",
        "seconds for which a metadata server remembers an engine that has died",
    )
    secret: str = _setting(
        "",
        str,
        "text",
        "what TransferEngines that may use each other's memory have in common; empty: nothing",
        shown=False,
    )
    secret_file: str = _setting(
        "",
        str,
        "a path",
        "the same, as a file's content but for the line's end",
    )
    admin_token: str = _setting(
        "",
        _printable,
        "printable ASCII",
        "token of the store's admin server, for `mooncake-store` and `compat.mooncake.store`; "
        "empty: `--token-file`, or the one that `mooncake-store serve` saves",
        shown=False,
    )
    directory: str = _setting(
        "",
        _printable,
        "a URL",
        "directory of `mooncake-store serve`, which may have a password, unlike a command line",
        shown=False,
    )
    metadata_server: str = _setting(
        "",
        _printable,
        "a URL",
        "metadata server of `python -m mooncake_kernels bandwidth`, likewise",
        shown=False,
    )
    secret_only: int = _setting(
        0,
        _integer_in(0, 1),
        "0 or 1",
        "1: TransferEngines with a secret and without certificates do without TLS",
    )
    local_users: tuple[int, ...] = _setting(
        (),
        _user_ids,
        f"a comma-separated list of integers in [0, {MAX_USER_ID}]",
        "ids of other users whose processes may connect to a TransferEngine within its machine",
    )
    engine_copies: int = _setting(
        0,
        _integer_in(0, 1),
        "0 or 1",
        "1: vLLM's offloading, and SGLang's staging between prefill and decode, copy with our "
        "kernels",
    )
    calibration: str = _setting(
        "~/.cache/mooncake-kernels/calibration.json",
        str,
        "a path",
        'the table of `python -m mooncake_kernels calibrate`, by which "auto" chooses; empty: none',
    )
    require: tuple[str, ...] = _setting(
        (),
        _set_of("cuda", "triton", "model", "rdma", "redis", "valkey", "chromium"),
        "a comma-separated list of cuda, triton, model, rdma, redis, valkey, chromium",
        "tests: what must be there, so that a skip becomes a failure",
    )


@dataclass(frozen=True)
class BuildSettings:
    """Settings of setup.py."""

    torch: str = _setting(
        "",
        str,
        "a folder",
        "folder of the torch package to build against; empty: the installed one",
    )
    cuda: str = _setting(
        "auto",
        _one_of("auto", "0", "1"),
        "auto, 0 or 1",
        "compile the CUDA kernels: if nvcc is found, never, or fail without nvcc",
    )
    cuda_archs: tuple[str, ...] = _setting(
        ("80", "90", "100"),
        lambda text: tuple(str(_positive_int(a)) for a in text.split(",")),
        "a comma-separated list like 80,90,100",
        "GPU architectures; PTX is embedded for the last",
    )
    sanitize: tuple[str, ...] = _setting(
        (),
        _set_of("address", "undefined", "thread"),
        "a comma-separated list of address, undefined, thread",
        "sanitizers to build with",
    )
    coverage: int = _setting(
        0,
        _integer_in(0, 1),
        "0 or 1",
        "1: the host code counts which of its lines and branches run, see tests/coverage",
    )


def read(kind: type, environ: Mapping[str, str] | None = None) -> Any:
    """Read one of the dataclasses above from the environment.

    Args:
        kind: ``Settings`` or ``BuildSettings``.
        environ: the variables; ``os.environ`` if None.

    Raises:
        ValueError: a variable is malformed; the message names it, what it must be and its value.
    """
    environ = os.environ if environ is None else environ
    values = {}
    for item in dataclasses.fields(kind):
        name = PREFIX + item.name.upper()
        if name in environ:
            try:
                values[item.name] = item.metadata["parse"](environ[name])
            except ValueError:
                expected = item.metadata["expected"]
                got = repr(environ[name]) if item.repr else "something else"  # a secret
                raise ValueError(f"{name} must be {expected}, got {got}") from None
    return kind(**values)


_current: Settings | None = None


def current() -> Settings:
    """Return the current settings: from the environment, read once, unless overridden."""
    global _current
    if _current is None:
        _current = read(Settings)
    return _current


@contextlib.contextmanager
def override(**changes: Any) -> Iterator[Settings]:
    """Change settings within a ``with`` block, for the whole process.

    Args:
        **changes: fields of ``Settings`` and their values.

    Raises:
        ValueError: a value is not what its variable may be.
        TypeError: there is no such setting.
    """
    global _current
    before = current()
    after = dataclasses.replace(before, **changes)
    for item in dataclasses.fields(after):
        if item.name in changes:
            _check(item, changes[item.name])
    _current = after
    try:
        yield _current
    finally:
        _current = before


def _check(item: Any, value: Any) -> None:
    """Raise ValueError unless a setting's variable could give it this value."""
    try:
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        is_good = item.metadata["parse"](text) == value
    except (TypeError, ValueError):
        is_good = False
    if not is_good:
        got = f"{value!r:.80}" if item.repr else type(value).__name__  # a secret is not shown
        raise ValueError(f"override: {item.name} must be {item.metadata['expected']}, got {got}")


def problems() -> dict[str, str]:
    """Return what is wrong with each variable of ours that is malformed, or that nothing reads."""
    known = {name for name, _, _ in table()}
    found = {}
    for name in sorted(name for name in os.environ if name.startswith(PREFIX)):
        if name not in known:
            found[name] = NO_SUCH_SETTING
            continue
        try:
            for kind in (Settings, BuildSettings):
                read(kind, {name: os.environ[name]})
        except ValueError as error:
            found[name] = str(error)
    return found


def table() -> list[tuple[str, str, str]]:
    """Return (variable, default, meaning) of every setting, as in the README's table."""
    rows = []
    for kind in (Settings, BuildSettings):
        for item in dataclasses.fields(kind):
            words = item.default if isinstance(item.default, tuple) else (item.default,)
            default = ",".join(str(word) for word in words)
            rows.append((PREFIX + item.name.upper(), default, item.metadata["doc"]))
    return rows
