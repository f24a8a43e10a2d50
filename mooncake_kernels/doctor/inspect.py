"""Examine this process: its libraries, what it may open, NVML's information."""

import ctypes
import importlib.metadata
import os

from .. import config, rdma
from .._machine_root import MachineRoot
from ..errors import Unavailable
from .commands import missing_commands
from .here import Here, Library

OPTIONAL_PACKAGES = (  # what the extras for users bring
    "fastapi", "gguf", "httpx", "jinja2", "matplotlib", "msgspec", "nvidia-ml-py",
    "prometheus-client", "pyzmq", "ray", "redis", "rich", "safetensors", "starlette",
    "tokenizers", "triton", "uvicorn",
)  # fmt: skip
INFINIBAND = "/dev/infiniband"


def inspect() -> Here:
    """Return the facts about this process on this machine."""
    return Here(
        libraries=(*_built(), *_loaded(), *_packages()),
        has_dmabuf_call=_has_dmabuf_call(),
        open_errors=_open_errors(),
        gpu_memory_bytes=_gpu_memory_bytes(),
        devices=_devices(),
        settings=config.problems(),
        missing_commands=missing_commands(),
    )


def _built() -> list[Library]:
    import torch

    from .. import _library

    for_cuda = f"torch {torch.__version__} was built for CUDA {torch.version.cuda}"
    return [
        Library("operators", True, f"_ops.so under torch {torch.__version__}"),
        Library(
            "cuda_kernels",
            _library.has_cuda,
            "compiled in" if _library.has_cuda else "_ops.so was built without nvcc",
        ),
        Library(
            "torch_cuda",
            torch.cuda.is_available(),
            for_cuda if torch.version.cuda else "torch was built for the CPU alone",
        ),
    ]


def _loaded() -> list[Library]:
    from .. import _host

    reasons = {
        "cuda_driver": _host.missing_cuda_driver(),
        "libibverbs": _host.missing_verbs(),
    }
    return [Library(check, not why, why or "loads") for check, why in reasons.items()]


def _packages() -> list[Library]:
    rows = []
    for package in OPTIONAL_PACKAGES:
        try:
            rows.append(Library("packages", True, importlib.metadata.version(package), package))
        except importlib.metadata.PackageNotFoundError:
            rows.append(Library("packages", False, "not installed", package))
    return rows


def _has_dmabuf_call() -> bool | None:
    try:
        return hasattr(ctypes.CDLL("libibverbs.so.1"), "ibv_reg_dmabuf_mr")
    except OSError:
        return None


def _open_errors() -> dict[str, str]:
    """Open what verbs opens: permission bits do not show what a container's cgroup forbids."""
    errors = {}
    for name in MachineRoot().names(INFINIBAND):
        if not name.startswith("uverbs"):
            continue
        try:
            os.close(os.open(f"{INFINIBAND}/{name}", os.O_RDWR | os.O_CLOEXEC))
            errors[name] = ""
        except OSError as error:
            errors[name] = error.strerror or str(error)
    return errors


def _devices() -> tuple[rdma.DeviceInfo, ...]:
    """Return verbs' descriptions; other checks report why they cannot be read."""
    try:
        return tuple(rdma.devices())
    except (Unavailable, OSError):
        return ()


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong),
                ("used", ctypes.c_ulonglong)]  # fmt: skip


def _gpu_memory_bytes() -> dict[str, int]:
    """Ask NVML, which comes with the driver; empty if it is missing or does not answer."""
    addresses = MachineRoot().names("/proc/driver/nvidia/gpus")
    try:
        return _ask_nvml(ctypes.CDLL("libnvidia-ml.so.1"), addresses) if addresses else {}
    except (OSError, AttributeError):
        return {}


def _ask_nvml(nvml: ctypes.CDLL, addresses: list[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    if nvml.nvmlInit_v2() != 0:
        return sizes
    for address in addresses:
        gpu, memory = ctypes.c_void_p(), _Memory()
        found = nvml.nvmlDeviceGetHandleByPciBusId_v2(address.encode(), ctypes.byref(gpu)) == 0
        if found and nvml.nvmlDeviceGetMemoryInfo(gpu, ctypes.byref(memory)) == 0:
            sizes[address] = memory.total
    nvml.nvmlShutdown()
    return sizes
