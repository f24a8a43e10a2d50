"""An engine's settings for the store: ``kv_connector_extra_config``."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import parse_qsl, urlencode

from mooncake_kernels.errors import InvalidArgument

from ..store_url import StoreUrl, parse_store_url
from ..tier_store import TierStore
from .handoff_step import parse_handoff

MAX_THREADS = 64
OLD_NAMES = {"pool": "shm:PATH", "capacity_bytes": "shm:PATH?size=BYTES"}


@dataclass(frozen=True)
class Settings:
    """The settings by name.

    Attributes:
        url: of the store, see ``open_store``; "": there is none.
        namespace: of the keys; engines with different ones do not share blocks.
        verify: share of the loads that compare checksums.
        adapters_by_name: in all engines of the namespace, at any time, LoRA adapters of one name
            have the same weights.
        num_threads: of a worker that load, and that save.
        handoff: between engines that prefill and that decode, see ``HandoffOptions``; None: none.
    """

    url: str = ""
    namespace: str = ""
    verify: float = 1.0
    adapters_by_name: bool = False
    num_threads: int = 2
    handoff: Mapping[str, Any] | None = None

    @property
    def store_url(self) -> StoreUrl:
        return parse_store_url(self.url)


def parse(config: Mapping[str, Any]) -> Settings:
    """Take the settings from the configuration.

    Raises:
        InvalidArgument: a setting is unknown, missing or has a wrong value.
    """
    types = {field.name: field.type for field in fields(Settings)}
    for name, value in config.items():
        if name in OLD_NAMES:
            raise _wrong(
                f"{name!r} must be", f"part of 'url', such as \"{OLD_NAMES[name]}\"", value
            )
        if name not in types:
            raise _wrong("must have", f"no others than {', '.join(types)}", name)
        if name == "handoff":
            parse_handoff(value)
            continue
        is_right = isinstance(value, (int, float) if types[name] is float else types[name])  # type: ignore[arg-type]
        if not is_right or isinstance(value, bool) != (types[name] is bool):
            shown = type(value).__name__ if name == "url" else value  # it may have a password
            raise _wrong(f"{name!r} must be", types[name].__name__, shown)  # type: ignore[union-attr]
    if not config.get("url") and "handoff" not in config:
        raise _wrong("must have", "'url', which names the store, or 'handoff'", sorted(config))
    settings = Settings(**config)
    if not 0 <= settings.verify <= 1:
        raise _wrong("'verify' must be", "from 0 to 1", settings.verify)
    if not 1 <= settings.num_threads <= MAX_THREADS:
        raise _wrong("'num_threads' must be", f"from 1 to {MAX_THREADS}", settings.num_threads)
    if settings.url:
        parse_store_url(settings.url)
    return settings


def _wrong(what: str, wanted: str, value: Any) -> InvalidArgument:
    return InvalidArgument(f"kv_connector_extra_config: {what} {wanted}, got {value!r}")


def without_pool(url: str) -> str:
    """Return the URL of a cluster for a process that only looks up: it offers no memory."""
    address, _, query = url.partition("?")
    kept = [
        (name, value)
        for name, value in parse_qsl(query, keep_blank_values=True)
        if name not in ("size", "pool", "engine")
    ]
    return address + (f"?{urlencode(kept)}" if kept else "")


# A process opens a store once: a second time, its disk would be in use, and its pool another one.
_opened: dict[tuple[str, str, float], list[Any]] = {}  # stores, and how many have them
_opened_lock = threading.Lock()


def acquire_store(url: str, namespace: str, verify: float) -> TierStore:
    """Open a store, or return the one that is open in this process. ``release_store`` closes it.

    Raises:
        InvalidArgument, OSError, Unavailable: as ``open_store``.
    """
    with _opened_lock:
        entry = _opened.get((url, namespace, verify))
        if entry is None:
            entry = _opened[url, namespace, verify] = [TierStore(url, namespace, verify=verify), 0]
        entry[1] += 1
        return entry[0]


def release_store(store: TierStore) -> None:
    """Close a store that no one else in this process has acquired."""
    with _opened_lock:
        for key, entry in _opened.items():
            if entry[0] is store:
                entry[1] -= 1
                if entry[1] == 0:
                    del _opened[key]
                    store.close()
                return
