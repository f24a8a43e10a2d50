"""Debian's packages, fetched once into the cache: a kernel and its modules, and pyverbs.

The packages are unpacked, never installed: a machine that does not boot the kernel should not
install it, and python3-pyverbs would pull in rdma-core and udev, which upgrades half of systemd.
"""

import contextlib
import fcntl
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import NoGuest

NEEDED = {  # program: Debian's package
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "depmod": "kmod",
    "ip": "iproute2",
    "rdma": "iproute2",
    "tc": "iproute2",
    "setpriv": "util-linux",
}
KERNEL = "linux-image-amd64"  # its sister linux-image-cloud-amd64 has no rdma_rxe
# Modules that no guest asks for, a third of the 400 MB.
UNWANTED = ("sound", "drivers/media", "drivers/gpu/drm/amd", "drivers/net/wireless")


def check_programs() -> None:
    """Raise NoGuest with the apt line for missing packages."""
    missing = [program for program in NEEDED if not shutil.which(program)]
    if missing:
        packages = " ".join(dict.fromkeys(NEEDED[program] for program in missing))
        raise NoGuest(
            f"no {', '.join(missing)}: apt-get install --no-install-recommends {packages}"
        )


def kernel(cache: Path, given: Path | None) -> Path:
    """Return the folder of a bootable kernel: boot/, lib/modules/, vmlinux."""
    folder = given.resolve() if given else cache / "kernel"
    if (folder / "vmlinux").exists():
        return folder
    with locked(cache):
        if given:
            make_bootable(folder)
        elif not folder.exists():
            with unfinished(folder) as partial:
                download(newest_kernel(), partial, "./boot", "./lib")
                make_bootable(partial)
    return folder


def pyverbs(cache: Path) -> Path:
    """Return a folder with nothing but Debian's pyverbs, to be put on Python's path."""
    folder = cache / "pyverbs"
    if folder.exists():
        return folder
    with locked(cache):
        if not folder.exists():
            with unfinished(folder) as partial, tempfile.TemporaryDirectory(dir=cache) as package:
                download("python3-pyverbs", Path(package), "./usr/lib")
                inside = Path(package, "usr/lib/python3/dist-packages/pyverbs")
                inside.rename(partial / "pyverbs")
    return folder


@contextlib.contextmanager
def locked(cache: Path) -> Iterator[None]:
    """Let one run at a time change the cache; the others wait, and find the result."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Yield a folder that gets its name when the block succeeds, and is deleted otherwise."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def apt(*words: str, cwd: Path | None = None) -> str:
    """Return what an apt program prints, or raise NoGuest with its error message."""
    # As root, apt would fetch as a user who may not write here.
    options = ["-q", "-o", "APT::Sandbox::User=root", "-o", "Acquire::http::Timeout=30"]
    if not shutil.which(words[0]):
        raise NoGuest(f"no {words[0]}: give the folder of an unpacked kernel by --kernel")
    done = subprocess.run([words[0], *options, *words[1:]], cwd=cwd, text=True, capture_output=True)
    if done.returncode:
        why = done.stderr.strip() or f"exit status {done.returncode}"
        raise NoGuest(f"{' '.join(words)} failed (apt-get update may help): {why}")
    return done.stdout


def newest_kernel() -> str:
    """Return the package that KERNEL, an empty metapackage, depends on."""
    found = re.findall(r"Depends: (linux-image-[0-9]\S*)", apt("apt-cache", "depends", KERNEL))
    if not found:
        raise NoGuest(f"apt knows no {KERNEL}: run apt-get update, or use --kernel")
    return found[-1]


def download(package: str, folder: Path, *parts: str) -> None:
    """Fetch a package and unpack these parts of it."""
    apt("apt-get", "download", package, cwd=folder)
    (archive,) = folder.glob("*.deb")
    skipped = [f"--exclude=./lib/modules/*/kernel/{name}" for name in UNWANTED]
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE
    ) as tar:
        unpack = ["tar", "-x", "-C", str(folder), *skipped, *parts]
        subprocess.run(unpack, stdin=tar.stdout, check=True)
    archive.unlink()


def make_bootable(folder: Path) -> None:
    """Add the list of the modules' dependencies, and the kernel as a plain ELF file."""
    try:
        (version,) = os.listdir(folder / "lib" / "modules")
        image = (folder / "boot" / f"vmlinuz-{version}").read_bytes()
    except (OSError, ValueError) as error:
        raise NoGuest(f"{folder} is no unpacked kernel package: {error}") from None
    subprocess.run(["depmod", "-b", str(folder), version], check=True)
    partial = folder / "vmlinux.partial"
    partial.write_bytes(unpacked(image) or image)
    partial.rename(folder / "vmlinux")


def unpacked(image: bytes) -> bytes | None:
    """Return the ELF file in a bzImage, if it is packed with xz as Debian 12's are.

    It boots by PVH, which saves the seconds that a guest without KVM needs to unpack it.
    """
    # Documentation/arch/x86/boot.rst: setup_sects, payload_offset, payload_length
    start = (image[0x1F1] + 1) * 512 + int.from_bytes(image[0x248:0x24C], "little")
    payload = image[start : start + int.from_bytes(image[0x24C:0x250], "little")]
    if not payload.startswith(b"\xfd7zXZ\0"):
        return None
    return lzma.LZMADecompressor().decompress(payload)
