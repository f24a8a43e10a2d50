"""Facts about this process and its libraries that files do not show, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..rdma import DeviceInfo


@dataclass(frozen=True)
class Library:
    """Whether something the package can use is available, with its version or the reason why not.

    Attributes:
        check: the check's name: "operators", "cuda_kernels", "torch_cuda", "cuda_driver",
            "libibverbs", or "packages" for each optional one.
        name: the package's name; empty for the others.
    """

    check: str
    here: bool
    detail: str
    name: str = ""


@dataclass(frozen=True)
class Here:
    """This process. The default is what is known of a captured machine: nothing.

    Attributes:
        libraries: what the package can use.
        has_dmabuf_call: whether libibverbs has ``ibv_reg_dmabuf_mr``; None if it does not load.
        open_errors: for files of /dev/infiniband, why they could not be opened; an empty text if
            they could.
        gpu_memory_bytes: memory of each GPU, by PCI address.
        devices: libibverbs' descriptions, if it was queried.
        settings: what is wrong with variables MOONCAKE_KERNELS_*; None if not looked at.
        missing_commands: commands of fixes that are not installed, and how to install each.
    """

    libraries: tuple[Library, ...] = ()
    has_dmabuf_call: bool | None = None
    open_errors: Mapping[str, str] = field(default_factory=dict)
    gpu_memory_bytes: Mapping[str, int] = field(default_factory=dict)
    devices: tuple[DeviceInfo, ...] = ()
    settings: Mapping[str, str] | None = None
    missing_commands: Mapping[str, str] = field(default_factory=dict)
