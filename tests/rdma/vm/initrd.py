"""The guest's first files: busybox, and the modules that it needs before it sees the host's."""

import lzma
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

MODULES = [
    *("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay", "virtio_net"),
    # rdma_rxe asks for crc32_generic by an alias that nobody answers here, and fails without.
    *("crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm"),
    *("cls_flower", "act_mirred", "act_gact", "act_skbedit", "sch_ingress", "sch_tbf", "veth"),
]


def with_dependencies(modules: Path) -> list[Path]:
    """Return the files of MODULES in load order; built-in modules have none."""
    needs = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[Path(path).name.split(".")[0].replace("-", "_")] = [path, *others.split()]
    ordered = [path for name in MODULES for path in reversed(needs.get(name, []))]
    return [modules / path for path in dict.fromkeys(ordered)]


def write(kernel: Path, init: Path, archive: Path) -> None:
    """Write the initrd. It takes a tenth of a second, so each run makes a new one, never stale."""
    (modules,) = (kernel / "lib" / "modules").iterdir()
    with tempfile.TemporaryDirectory(dir=archive.parent) as name:
        root = Path(name)
        for folder in ("bin", "dev", "proc", "sys", "host", "up", "newroot", "modules"):
            (root / folder).mkdir()
        shutil.copy(shutil.which("busybox"), root / "bin" / "busybox")
        (root / "bin" / "sh").symlink_to("busybox")
        shutil.copy(init, root / "init")
        (root / "init").chmod(0o755)
        for number, file in enumerate(with_dependencies(modules)):
            target = root / "modules" / f"{number:03}-{file.name.removesuffix('.xz')}"
            if file.suffix == ".xz":
                target.write_bytes(lzma.decompress(file.read_bytes()))
            else:
                shutil.copy(file, target)
        names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
        with open(archive, "wb") as output:
            subprocess.run(
                ["cpio", "-o", "-H", "newc", "-R", "0:0", "--quiet"],
                cwd=root,
                input=os.fsencode(names + "\n"),
                stdout=output,
                check=True,
            )
