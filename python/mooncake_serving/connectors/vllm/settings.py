"""An engine's settings for the store: ``kv_connector_extra_config``."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.store import Store


@dataclass(frozen=True)
class Settings:
    """The settings by name.

    Attributes:
        pool: path of the pool that the engines of this host share, such as /dev/shm/kv.
        capacity_bytes: of the pool, if it has to be made; 0: it must exist.
        namespace: of the keys; engines with different ones do not share blocks.
        verify: share of the blocks whose checksum is compared when they are loaded.
        adapters_by_name: in all engines of the namespace, at any time, LoRA adapters of one name
            have the same weights.
    """

    pool: str
    capacity_bytes: int = 0
    namespace: str = ""
    verify: float = 0.0
    adapters_by_name: bool = False


def parse(config: Mapping[str, Any]) -> Settings:
    """Take the settings from the configuration.

    Raises:
        InvalidArgument: a setting is unknown, missing or of another type.
    """
    types = {field.name: field.type for field in fields(Settings)}
    for name, value in config.items():
        if name not in types:
            raise _wrong("must have", f"no others than {', '.join(types)}", name)
        is_right = isinstance(value, (int, float) if types[name] is float else types[name])  # type: ignore[arg-type]
        if not is_right or isinstance(value, bool) != (types[name] is bool):
            raise _wrong(f"{name!r} must be", types[name].__name__, value)  # type: ignore[union-attr]
    if not config.get("pool"):
        raise _wrong("must have", "'pool', the path of the store's pool", dict(config))
    if config.get("capacity_bytes", 0) < 0:
        raise _wrong("'capacity_bytes' must be", "at least 0", config["capacity_bytes"])
    return Settings(**config)


def _wrong(what: str, wanted: str, value: Any) -> InvalidArgument:
    return InvalidArgument(f"kv_connector_extra_config: {what} {wanted}, got {value!r}")


def open_store(settings: Settings, namespace: str) -> Store:
    """Open the pool of this host; it is made if it does not exist and a capacity is given."""
    options: dict[str, Any] = {"namespace": f"{settings.namespace}/{namespace}"}
    options["verify"] = settings.verify
    with contextlib.suppress(FileNotFoundError):
        return Store.open(settings.pool, **options)
    if settings.capacity_bytes == 0:
        raise _wrong("'capacity_bytes' must be", f"given, for there is no {settings.pool} yet", 0)
    with contextlib.suppress(FileExistsError):  # another process has made it meanwhile
        return Store.create(settings.capacity_bytes, settings.pool, **options)
    return Store.open(settings.pool, **options)
