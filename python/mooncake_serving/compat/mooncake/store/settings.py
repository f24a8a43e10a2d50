"""The arguments of ``setup``."""

import contextlib
import dataclasses
import numbers
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mooncake_kernels.errors import InvalidArgument

from ..codes import as_flag
from ..sizes import parse_size
from .codes import warn_once

SHARED_MEMORY = "/dev/shm"
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_OTHER_NAMES = {"device_name": "rdma_devices", "master_server_address": "master_server_addr"}
_SIZES = ("global_segment_size", "local_buffer_size")
_DEFAULT_BYTES = 16 << 20


@dataclass(frozen=True)
class Settings:
    """The arguments of ``setup``, in Mooncake's order.

    Attributes:
        local_hostname: name of this process, and where it listens.
        metadata_server: "P2PHANDSHAKE", ``redis://...`` or ``http://...``, see ``TransferEngine``.
        global_segment_size: bytes of the pool, if this process makes it; an existing pool keeps its
            size.
        local_buffer_size: bytes for data in flight between hosts to memory that is not registered.
        protocol: "tcp", or "rdma"; any if the environment has ``MC_FORCE_TCP``.
        rdma_devices: the devices that "rdma" uses between hosts; empty: all.
        master_server_addr: the file of the pool that the processes of this host share, "" for the
            one of this user; or the URL of a directory, ``redis://...``: the store of many hosts;
            or the ``host:port`` of a ``master``, which knows one.
        engine: ignored, with a warning: a store has an engine of its own.
        enable_ssd_offload: whether what the pool evicts goes to a disk, see ``ssd_offload``.
        ssd_offload_path: the folder for that; "": what the environment says. Ignored without.
        tenant_id: whose objects are visible.
        enable_client_http_server: whether to serve health and metrics, see ``serve_http``.
        client_http_port: where, on 127.0.0.1; 0: a free port.
    """

    local_hostname: str
    metadata_server: str = field(repr=False)  # may have a password, as master_server_addr may
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    rdma_devices: str
    master_server_addr: str = field(repr=False)
    engine: Any = None
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = 9300

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Settings":
        """Make the settings from a dict, whose numbers and flags may be strings, sizes with units.

        Two have the names of configuration files, too, which LMCache passes. A name that is not
        known is ignored, with a warning: the dict may be for a later version of Mooncake.

        Raises:
            InvalidArgument: a name is missing, or a size is not one.
        """
        values: dict[str, Any] = {
            "global_segment_size": _DEFAULT_BYTES,
            "local_buffer_size": _DEFAULT_BYTES,
            "protocol": "tcp",
            "rdma_devices": "",
            "master_server_addr": "",
        }
        known = {field.name: field.type for field in dataclasses.fields(cls)}
        for given, value in config.items():
            name = _OTHER_NAMES.get(given, given)
            if name not in known:
                if value:
                    warn_once(f"setup: {given!r:.80} is ignored: it is no name of setup")
                continue
            if isinstance(value, str):
                value = _of_text(name, known[name], value)
            values[name] = value
        missing = [name for name in ("local_hostname", "metadata_server") if name not in values]
        if missing:
            raise InvalidArgument(f"config must have {' and '.join(missing)}, got {[*config]}")
        return cls(**values)

    def checked(self) -> "Settings":
        """The same in Python's own types, unless it has a wrong type, or is not supported.

        Raises:
            InvalidArgument: names the wrong setting.
        """
        settings = dataclasses.replace(
            self, **{f.name: _as_type(f, getattr(self, f.name)) for f in dataclasses.fields(self)}
        )
        for name in ("global_segment_size", "local_buffer_size"):
            if getattr(settings, name) < 0:
                raise InvalidArgument(f"{name} must not be negative, got {getattr(settings, name)}")
        if settings.engine is not None:
            warn_once("setup: engine is ignored: a store has an engine of its own")
        if not 0 <= settings.client_http_port <= 65_535:
            raise InvalidArgument(
                f"client_http_port must be from 0 to 65535, got {settings.client_http_port}"
            )
        return settings

    @property
    def namespace(self) -> str:
        """The namespace of all values of the tenant."""
        return f"mooncake/{self.tenant_id}"

    @property
    def path(self) -> str:
        """The file of the pool of this host, see ``default_path``."""
        return self.master_server_addr or default_path()


def _of_text(name: str, kind: Any, text: str) -> Any:
    """The value of a text, or the text if there is none."""
    if name in _SIZES:
        return parse_size(text, name)
    if kind is int and text.strip().isdecimal():
        return int(text)
    return _FLAGS.get(text.strip().lower(), text) if kind is bool else text


def _as_type(field: dataclasses.Field, value: Any) -> Any:
    if field.type is bool:
        return as_flag(field.name, value)
    if field.type is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if field.type is str and isinstance(value, str):
        return str(value)
    if field.type in (int, str):
        kind = "int" if field.type is int else "str"
        raise InvalidArgument(f"{field.name} must be of type {kind}, got {value!r:.80}")
    return value


def default_path() -> str:
    """Return the path of a pool in a folder of this user, which is made if it is not there.

    The folder is not below ``$XDG_RUNTIME_DIR``, which belongs to this user as well, but is a tenth
    of the memory, and goes when its user logs out.

    Raises:
        InvalidArgument: what is there may be of others: anyone may make a file of any name in
            shared memory.
        OSError: the folder cannot be made.
    """
    user = os.geteuid()
    folder = f"{SHARED_MEMORY}/mooncake-store-{user}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    about = os.lstat(folder)
    kind, mode = stat.S_IFMT(about.st_mode), stat.S_IMODE(about.st_mode)
    if kind != stat.S_IFDIR or about.st_uid != user or mode & 0o077:
        found = "a folder" if kind == stat.S_IFDIR else "no folder"
        raise InvalidArgument(
            f"master_server_addr must be a path, unless {folder} is a folder that only user {user} "
            f"can use (mode 0700), and it is {found} of user {about.st_uid} with mode {mode:04o}, "
            "got ''"
        )
    return f"{folder}/pool"
