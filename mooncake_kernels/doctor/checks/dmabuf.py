"""Checks of the two ways to register GPU memory with a NIC: dma-buf and nvidia_peermem."""

import gzip
import re
import zlib
from collections.abc import Collection, Iterator

from ..._machine_root import MachineRoot
from .. import ports
from ..finding import Finding, State, Topic
from .gpu import driver_version, has_open_modules

TOPIC = Topic(
    "gpu_registration",
    {
        "dmabuf_kernel": "ibv_reg_dmabuf_mr needs Linux 5.12 with DMA_SHARED_BUFFER",
        "dmabuf_driver": "only the open kernel modules export GPU memory as a dma-buf",
        "dmabuf_call": "without ibv_reg_dmabuf_mr a dma-buf cannot be registered",
        "peermem": "without dma-buf and nvidia_peermem, ibv_reg_mr of GPU memory fails: EFAULT",
    },
)
_FIRST_KERNEL = (5, 12)
_FIXES = {
    "dmabuf_kernel": "boot Linux 5.12 or later, with CONFIG_DMA_SHARED_BUFFER=y",
    "dmabuf_driver": "apt or dnf install nvidia-open, of NVIDIA's repository, then reboot",
    "dmabuf_call": "apt install libibverbs1 (dnf install libibverbs), version 34 or later",
}


def check(root: MachineRoot, gpus: Collection[str], has_call: bool | None) -> Iterator[Finding]:
    """Check the requirements of each way. One of them is enough; report if both fail."""
    if not gpus or not ports.devices(root):
        detail = "not looked at: it takes a GPU and an RDMA device"
        yield TOPIC.info("peermem", "GPU memory", detail)
        return
    is_peermem = _has_peermem(root)
    needs = [_kernel(root), _driver(root), _call(has_call)]
    for name, subject, state, detail in needs:
        if state is not State.WARNING:
            yield TOPIC.found(name, subject, state, detail)
        elif is_peermem:
            yield TOPIC.info(name, subject, detail, _FIXES[name])
        else:
            yield TOPIC.warning(name, subject, detail, _FIXES[name])
    yield _peermem(is_peermem, {state for _, _, state, _ in needs})


_Row = tuple[str, str, State, str]


def _kernel(root: MachineRoot) -> _Row:
    release = root.text("/proc/sys/kernel/osrelease") or ""
    number = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", release)
    if not number:
        return "dmabuf_kernel", "kernel", State.UNKNOWN, "/proc/sys/kernel/osrelease: no version"
    subject = f"Linux {release}"
    if (int(number[1]), int(number[2])) < _FIRST_KERNEL:
        return "dmabuf_kernel", subject, State.WARNING, "must be 5.12 or later"
    config = _kernel_config(root, release)
    if config is None:  # selected by what RDMA is built with, so there is no doubt
        return "dmabuf_kernel", subject, State.OK, "5.12 or later; its configuration is not here"
    if not re.search("^CONFIG_DMA_SHARED_BUFFER=y", config, re.M):
        return "dmabuf_kernel", subject, State.WARNING, "CONFIG_DMA_SHARED_BUFFER is not set"
    return "dmabuf_kernel", subject, State.OK, "5.12 or later, CONFIG_DMA_SHARED_BUFFER=y"


def _kernel_config(root: MachineRoot, release: str) -> str | None:
    text = root.text(f"/boot/config-{release}")
    packed = root.resolve("/proc/config.gz")
    if text is not None or packed is None:
        return text
    try:
        return gzip.decompress(root.path(packed).read_bytes()).decode("utf-8", "replace")
    except (OSError, EOFError, zlib.error):
        return None


def _driver(root: MachineRoot) -> _Row:
    version = driver_version(root)
    if version is None:
        return "dmabuf_driver", "NVIDIA driver", State.UNKNOWN, "no driver, or it names no version"
    if has_open_modules(root):
        return "dmabuf_driver", "NVIDIA driver", State.OK, f"{version}, open kernel modules"
    detail = f"{version}, proprietary kernel modules, must be the open ones"
    return "dmabuf_driver", "NVIDIA driver", State.WARNING, detail


def _call(has_call: bool | None) -> _Row:
    if has_call is None:
        return "dmabuf_call", "libibverbs", State.UNKNOWN, "libibverbs was not loaded"
    if has_call:
        return "dmabuf_call", "libibverbs", State.OK, "has ibv_reg_dmabuf_mr"
    return "dmabuf_call", "libibverbs", State.WARNING, "has no ibv_reg_dmabuf_mr"


def _has_peermem(root: MachineRoot) -> bool:
    loaded = re.search("^(nvidia_peermem|nv_peer_mem) ", root.text("/proc/modules") or "", re.M)
    return bool(loaded) or root.resolve("/sys/module/nvidia_peermem") is not None


def _peermem(is_loaded: bool, dmabuf: set[State]) -> Finding:
    if is_loaded:
        return TOPIC.ok("peermem", "nvidia_peermem", "loaded")
    if dmabuf == {State.OK}:
        return TOPIC.info("peermem", "nvidia_peermem", "not loaded; dma-buf does without it")
    fix = (
        "modprobe nvidia_peermem (Invalid argument: its build wants the peer memory of NVIDIA's"
        " OFED, or DOCA)"
    )
    if State.WARNING not in dmabuf:
        detail = "not loaded, and whether dma-buf is possible is not known"
        return TOPIC.unknown("peermem", "nvidia_peermem", detail, fix)
    detail = "not loaded, and dma-buf is not possible: GPU memory cannot be registered"
    return TOPIC.problem("peermem", "nvidia_peermem", detail, fix)
