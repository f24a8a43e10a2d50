"""``mooncake.mooncake_config``: the configuration of a store in a file or the environment."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_kernels.errors import InvalidArgument

from .sizes import parse_size

DEFAULT_GLOBAL_SEGMENT_SIZE = 3355443200
DEFAULT_LOCAL_BUFFER_SIZE = 1 << 30
_parse_segment_size = parse_size  # the name by which Mooncake's tests call it
_REQUIRED = ("local_hostname", "metadata_server", "master_server_address")
_FLAGS = dict.fromkeys(("true", "1", "yes", "on", "enable"), True)
_FLAGS |= dict.fromkeys(("false", "0", "no", "off", "disable", "", "none"), False)
_VARIABLES = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "master_server_address": "MOONCAKE_MASTER",
    "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
    "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "enable_client_http_server": "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",
    "client_http_port": "MOONCAKE_CLIENT_HTTP_PORT",
}


@dataclass
class MooncakeConfig:
    """The arguments of a store's ``setup``, in names of their own.

    Attributes:
        local_hostname, metadata_server, protocol: as of ``setup``; the protocol in lower case.
        global_segment_size, local_buffer_size: bytes.
        device_name: ``rdma_devices`` of ``setup``.
        master_server_address: ``master_server_addr`` of ``setup``.
        enable_ssd_offload, ssd_offload_path, tenant_id: as of ``setup``.
        enable_client_http_server, client_http_port: as of ``setup``.

    Raises:
        ValueError: names the wrong one.
    """

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: str | None
    master_server_address: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = 9300

    def __post_init__(self) -> None:
        for name in ("protocol", *_REQUIRED):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                kind = "Invalid protocol" if name == "protocol" else f"Config field {name!r}"
                raise ValueError(f"{kind}: must be a non-empty string, got {value!r:.80}")
        self.protocol = self.protocol.strip().lower()
        for name in ("global_segment_size", "local_buffer_size"):
            if (size := getattr(self, name)) < 0:
                raise ValueError(f"Invalid {name}: must be non-negative, got {size}")

    @staticmethod
    def from_file(file_path: str) -> "MooncakeConfig":
        """Read it from a JSON file.

        Raises:
            ValueError: a field is missing or wrong.
            OSError: the file cannot be read.
        """
        with open(file_path) as file:
            config = json.load(file)
        for name in _REQUIRED:
            if name not in config:
                raise ValueError(f"Missing required config field: {name}")
        return _made_of(config)

    @staticmethod
    def load_from_env() -> "MooncakeConfig":
        """Read it from the file that ``MOONCAKE_CONFIG_PATH`` names, or from ``MOONCAKE_MASTER``
        and the variables of the other fields.

        Raises:
            ValueError: neither is set, or a field is wrong.
            OSError: the file cannot be read.
        """
        path = os.environ.get("MOONCAKE_CONFIG_PATH")
        if path is not None:
            return MooncakeConfig.from_file(path)
        if not os.environ.get("MOONCAKE_MASTER"):
            raise ValueError(
                "Neither the environment variable 'MOONCAKE_CONFIG_PATH' nor 'MOONCAKE_MASTER' is "
                "set."
            )
        config = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"}
        set_here = {field: os.environ.get(name) for field, name in _VARIABLES.items()}
        return _made_of(config | {f: value for f, value in set_here.items() if value is not None})


def _made_of(config: Mapping[str, Any]) -> MooncakeConfig:
    values: dict[str, Any] = {
        "global_segment_size": DEFAULT_GLOBAL_SEGMENT_SIZE,
        "local_buffer_size": DEFAULT_LOCAL_BUFFER_SIZE,
        "protocol": "tcp",
        "device_name": "",
    }
    values |= {name: config[name] for name in _VARIABLES if name in config}
    reads: dict[str, Callable[[Any], Any]] = {
        "global_segment_size": parse_size,
        "local_buffer_size": parse_size,
        "enable_ssd_offload": _parse_flag,
        "enable_client_http_server": _parse_flag,
        "client_http_port": int,
    }
    for name, default in (("ssd_offload_path", ""), ("tenant_id", "default")):
        if values.get(name, "") is None:
            values[name] = default
        reads[name] = str
    return MooncakeConfig(**{n: reads.get(n, _as_it_is)(value) for n, value in values.items()})


def _as_it_is(value: Any) -> Any:
    return value


def _parse_flag(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return bool(value)
    known = _FLAGS.get(str(value).strip().lower())
    if known is None:
        raise InvalidArgument(f"flag must be true or false, got {value!r:.80}")
    return known
