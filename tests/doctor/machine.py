"""Machines as files: a healthy host of eight GPUs and eight RoCE NICs, for tests to break."""

from pathlib import Path

from mooncake_kernels._machine_root import MachineRoot
from mooncake_kernels.doctor import Finding, Here, Library, State, examine

HERE = Here(
    libraries=(
        Library("operators", True, "_ops.so"),
        Library("cuda_kernels", True, "compiled in"),
        Library("torch_cuda", True, "torch for CUDA"),
        Library("cuda_driver", True, "loads"),
        Library("libibverbs", True, "loads"),
        Library("packages", True, "3.9.0", "triton"),
    ),
    has_dmabuf_call=True,
    settings={},
)
NUM_PAIRS = 8
GIB = 1 << 30
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (x)\n"
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 2023\n"
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            65536                1048576              files
Max locked memory         unlimited            unlimited            bytes
Max address space         unlimited            unlimited            bytes
"""
MEMINFO = """\
MemTotal:       1056759808 kB
HugePages_Total:    1024
HugePages_Free:      512
Hugepagesize:       2048 kB
"""


def gpu(pair: int) -> str:
    return f"0000:{pair}3:00.0"


def nic(pair: int) -> str:
    return f"0000:{pair}4:00.0"


def bridges(pair: int) -> list[str]:
    """The root port, and the switch's upstream and two downstream ports."""
    return [f"0000:{pair}0:01.0", f"0000:{pair}1:00.0", f"0000:{pair}2:00.0", f"0000:{pair}2:01.0"]


def space(acs: int = 0, device_control: int = 0x2910) -> bytes:
    """A configuration space: PCI Express at 0x60, after one other; ACS at 0x148, after AER."""
    data = bytearray(4096)
    data[0x34] = 0x40
    data[0x40:0x42] = bytes([0x01, 0x60])
    data[0x60] = 0x10
    data[0x68:0x6A] = device_control.to_bytes(2, "little")
    data[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")
    data[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
    data[0x14E:0x150] = acs.to_bytes(2, "little")
    return bytes(data)


class Disk:
    """A folder that holds one machine at a time: only what differs from the last one is written."""

    def __init__(self, folder: Path):
        self.root = MachineRoot(folder)
        self._files: dict[str, bytes] = {}
        self._links: dict[str, str] = {}

    def write(self, files: dict[str, bytes], links: dict[str, str]) -> MachineRoot:
        for old, new in ((self._files, files), (self._links, links)):
            for name in [name for name, content in old.items() if new.get(name) != content]:
                self._remove(name)
                del old[name]
        for name in files.keys() - self._files.keys():
            path = self._path(name)
            path.write_bytes(files[name])
            path.chmod(0o666)
        for name in links.keys() - self._links.keys():
            self._path(name).symlink_to(links[name])
        self._files, self._links = dict(files), dict(links)
        return self.root

    def _path(self, name: str) -> Path:
        path = self.root.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _remove(self, name: str) -> None:
        """Remove a file or link, and the folders that become empty."""
        path = self.root.root / name.lstrip("/")
        path.unlink()
        for parent in path.parents:
            if parent == self.root.root or any(parent.iterdir()):
                return
            parent.rmdir()


class Machine:
    """Files and links, by their names on the machine."""

    def __init__(self, disk: Disk):
        self.disk = disk
        self.here = HERE
        self.files: dict[str, str | bytes] = {}
        self.links: dict[str, str] = {}

    def remove(self, prefix: str) -> None:
        """Remove a file or folder."""
        for names in (self.files, self.links):
            for name in [name for name in names if f"{name}/".startswith(f"{prefix}/")]:
                del names[name]

    def root(self) -> MachineRoot:
        """Write everything, in place of the machine that the disk held."""
        files = {
            name: content.encode() if isinstance(content, str) else content
            for name, content in self.files.items()
        }
        return self.disk.write(files, self.links)

    def findings(self, *only: str) -> list[Finding]:
        return examine(self.root(), self.here, frozenset(only))

    def bad(self) -> list[Finding]:
        """The failures that all checks find."""
        return [f for f in self.findings() if f.state in (State.PROBLEM, State.WARNING)]


def healthy(disk: Disk) -> Machine:
    machine = Machine(disk)
    _kernel(machine)
    for pair in range(NUM_PAIRS):
        _pair(machine, pair)
    return machine


def _kernel(machine: Machine) -> None:
    machine.files |= {
        "/proc/driver/nvidia/version": OPEN,
        "/proc/modules": "mlx5_ib 475136 0 - Live 0x0\nnvidia_peermem 16384 0 - Live 0x0\n",
        "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda1 iommu=pt",
        "/proc/meminfo": MEMINFO,
        "/proc/self/limits": LIMITS,
        "/proc/self/status": "Uid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\n"
        "Groups:\t1000 27\nCapEff:\t0000000000000000\n",
        "/proc/self/uid_map": "         0          0 4294967295\n",
        "/proc/self/cgroup": "0::/user.slice\n",
        "/proc/self/mounts": "/dev/sda1 / ext4 rw 0 0\n"
        "tmpfs /dev/shm tmpfs rw,nosuid,size=528379904k 0 0\n",
        "/proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
        "/proc/sys/kernel/numa_balancing": "0\n",
        "/proc/sys/vm/max_map_count": "262144\n",
        "/proc/sys/vm/overcommit_memory": "0\n",
        "/boot/config-6.8.0-45-generic": "CONFIG_DMA_SHARED_BUFFER=y\n",
        "/etc/libibverbs.d/mlx5.driver": "driver mlx5\n",
        "/sys/fs/cgroup/user.slice/pids.max": "max\n",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never\n",
        "/dev/infiniband/rdma_cm": "",
        "/sys/devices/system/node/node0/cpulist": "0-63\n",
        "/sys/devices/system/node/node1/cpulist": "64-127\n",
    }


def _pair(machine: Machine, pair: int) -> None:
    """A GPU and a NIC under one switch."""
    port, up, left, right = bridges(pair)
    above = f"/sys/devices/pci0000:{pair}0/{port}/{up}"
    for address, path in ((port, above[: -len(up) - 1]), (up, above), (left, f"{above}/{left}"),
                          (right, f"{above}/{right}")):  # fmt: skip
        _function(machine, address, path, "0x060400", "0x1000", space())
    gpu_path, nic_path = f"{above}/{left}/{gpu(pair)}", f"{above}/{right}/{nic(pair)}"
    _function(machine, gpu(pair), gpu_path, "0x030200", "0x10de", space())
    _function(machine, nic(pair), nic_path, "0x020000", "0x15b3", space())
    machine.links[f"{gpu_path}/driver"] = "/sys/bus/pci/drivers/nvidia"
    machine.links[f"{nic_path}/driver"] = "/sys/bus/pci/drivers/mlx5_core"
    machine.files |= {
        "/sys/bus/pci/drivers/nvidia/bind": "",
        "/sys/bus/pci/drivers/mlx5_core/bind": "",
        f"{gpu_path}/numa_node": f"{pair // 4}\n",
        f"{nic_path}/numa_node": f"{pair // 4}\n",
        f"{gpu_path}/resource": "0x0000000092000000 0x0000000092ffffff 0x0000000000040200\n"
        f"0x0000300000000000 0x{0x3000_0000_0000 + 128 * GIB - 1:016x} 0x000000000014220c\n",
    }
    _rdma(machine, pair, nic_path)


def _function(
    machine: Machine, address: str, path: str, kind: str, vendor: str, config: bytes
) -> None:
    group = f"/sys/kernel/iommu_groups/{address}"
    machine.files |= {
        f"{path}/class": f"{kind}\n",
        f"{path}/vendor": f"{vendor}\n",
        f"{path}/config": config,
        f"{path}/current_link_speed": "32.0 GT/s PCIe\n",
        f"{path}/max_link_speed": "32.0 GT/s PCIe\n",
        f"{path}/current_link_width": "16\n",
        f"{path}/max_link_width": "16\n",
        f"{group}/type": "identity\n",
    }
    machine.links[f"/sys/bus/pci/devices/{address}"] = path
    machine.links[f"{path}/iommu_group"] = group


def _rdma(machine: Machine, pair: int, nic_path: str) -> None:
    device, netdev = f"mlx5_{pair}", f"eth{pair}"
    ib, net = f"{nic_path}/infiniband/{device}", f"{nic_path}/net/{netdev}"
    port = f"{ib}/ports/1"
    gids = [
        ("fe80:0000:0000:0000:0ac0:ebff:fe00:0001", "IB/RoCE v1"),
        ("fe80:0000:0000:0000:0ac0:ebff:fe00:0001", "RoCE v2"),
        (f"0000:0000:0000:0000:0000:ffff:0a00:{pair:02x}01", "IB/RoCE v1"),
        (f"0000:0000:0000:0000:0000:ffff:0a00:{pair:02x}01", "RoCE v2"),
    ]
    for index in range(64):
        in_use = index < len(gids)
        text, kind = gids[index] if in_use else ("0000:" * 7 + "0000", "")
        machine.files[f"{port}/gids/{index}"] = text + "\n"
        if in_use:
            machine.files[f"{port}/gid_attrs/types/{index}"] = kind + "\n"
            machine.files[f"{port}/gid_attrs/ndevs/{index}"] = netdev + "\n"
    machine.files |= {
        f"{port}/state": "4: ACTIVE\n",
        f"{port}/phys_state": "5: LinkUp\n",
        f"{port}/rate": "400 Gb/sec (4X NDR)\n",
        f"{port}/link_layer": "Ethernet\n",
        f"{net}/mtu": "9000\n",
        f"{net}/operstate": "up\n",
        f"{net}/flags": "0x1003\n",
        f"{net}/dev_port": "0\n",
        f"/sys/class/infiniband_verbs/uverbs{pair}/ibdev": device + "\n",
        f"/dev/infiniband/uverbs{pair}": "",
    }
    machine.here = Here(
        **{**vars(machine.here), "open_errors": {**machine.here.open_errors, f"uverbs{pair}": ""}}
    )
    machine.links |= {
        f"/sys/class/infiniband/{device}": ib,
        f"/sys/class/net/{netdev}": net,
        f"{ib}/device": nic_path,
        f"{net}/device": nic_path,
    }
