"""Checks of what is compiled in, loads, is installed, and is set."""

from collections.abc import Collection, Iterator

from ..._machine_root import MachineRoot
from ...config import NO_SUCH_SETTING, PREFIX
from .. import pci, ports
from ..finding import Finding, State, Topic
from ..here import Here, Library

TOPIC = Topic(
    "libraries",
    {
        "operators": "without _ops.so there is no kernel at all",
        "cuda_kernels": "without them KV blocks on a GPU are moved by Triton, or not at all",
        "torch_cuda": "without it no tensor can be on a GPU",
        "cuda_driver": "without libcuda.so.1 GPU memory can be neither copied nor registered",
        "libibverbs": "without libibverbs.so.1 there is no RDMA",
        "packages": "each is needed by a part of the project only",
        "settings": "a malformed one fails the call that reads it, an unknown one does nothing",
        "verbs_provider": "without its provider library libibverbs does not list the device",
    },
)
_VERBS = "apt install libibverbs1 ibverbs-providers (dnf install libibverbs)"
_REBUILD = "install NVIDIA's CUDA toolkit, then, in the clone: pip install -e ."
_FIXES = {
    "cuda_kernels": _REBUILD,
    "operators": "in the clone: pip install -e .",
    "torch_cuda": "pip install --force-reinstall torch (the build for the driver's CUDA), after"
    " the driver itself",
    "cuda_driver": "install the driver of the GPU (in a container: docker run --gpus all)",
    "libibverbs": _VERBS,
}
# The kernel driver of a PCI function, and rdma-core's provider for it.
_PROVIDERS = {
    "mlx5_core": "mlx5",
    "mlx4_core": "mlx4",
    "bnxt_en": "bnxt_re",
    "ice": "irdma",
    "efa": "efa",
}


def check(root: MachineRoot, here: Here, gpus: Collection[str]) -> Iterator[Finding]:
    """Report on each library and setting; if a library's hardware is present, absence is bad."""
    if not here.libraries:
        detail = "not looked at: a captured machine does not tell its libraries"
        yield TOPIC.info("operators", "libraries", detail)
    has_gpu, has_nic = bool(gpus), bool(ports.devices(root))
    for library in here.libraries:
        yield _library(library, has_gpu, has_nic)
    if here.settings is not None and not here.settings:
        yield TOPIC.ok("settings", f"{PREFIX}*", "well formed")
    for name, wrong in (here.settings or {}).items():
        state = State.WARNING if wrong == NO_SUCH_SETTING else State.PROBLEM
        yield TOPIC.found("settings", name, state, wrong, f"unset {name}")
    yield from _providers(root)


def _library(library: Library, has_gpu: bool, has_nic: bool) -> Finding:
    check = library.check
    subject = library.name or check
    if library.here:
        return TOPIC.ok(check, subject, library.detail)
    if library.name:
        return TOPIC.info(check, subject, library.detail, f"pip install {library.name}")
    if not (has_nic if check == "libibverbs" else has_gpu):
        return TOPIC.info(check, subject, library.detail)
    state = State.WARNING if check == "cuda_kernels" else State.PROBLEM
    fix = _REBUILD if library.detail.startswith("built without") else _FIXES[check]
    return TOPIC.found(check, subject, state, library.detail, fix)


def _providers(root: MachineRoot) -> Iterator[Finding]:
    folder = "/etc/libibverbs.d"
    known = {
        words[1]
        for name in root.names(folder)
        for line in (root.text(f"{folder}/{name}") or "").splitlines()
        if len(words := line.split()) == 2 and words[0] == "driver"
    }
    for device in ports.devices(root):
        address = ports.address_of(root, device)
        provider = _PROVIDERS.get(pci.driver_of(root, address) or "" if address else "")
        if provider is None:
            continue
        if provider in known:
            yield TOPIC.ok("verbs_provider", device, f"{folder} names {provider}")
        else:
            detail = f"no file of {folder} names its provider {provider}"
            yield TOPIC.warning("verbs_provider", device, detail, _VERBS)
