"""Memory that an agent has registered, and whether descriptors are inside of it."""

import bisect
import threading
from collections import Counter

import numpy as np

from mooncake_kernels.buffers import Buffer, gpu_memory_at
from mooncake_kernels.errors import CudaError, InvalidArgument, Unavailable
from mooncake_kernels.transfer import Region, TransferEngine

from ..mapped_memory import MappedMemory
from .descriptors import DescList, nixl_mem_t
from .errors import nixlBackendError, nixlInvalidParamError, nixlNotFoundError

Row = tuple[int, int, int]  # address, bytes, device


class Ranges:
    """Ranges of memory, of which some may contain others.

    Args:
        rows: ``[n, 3]`` uint64 (address, bytes, device).
    """

    def __init__(self, rows: np.ndarray):
        order = np.argsort(rows[:, 0], kind="stable")
        begins, ends = rows[order, 0], rows[order, 0] + rows[order, 1]
        # Adjacent and overlapping ones are one: one begins where all before it have ended.
        reached = np.maximum.accumulate(ends)
        firsts = np.flatnonzero(np.append(True, begins[1:] > reached[:-1])[: len(begins)])
        self.begins = begins[firsts]
        self.ends = reached[np.append(firsts, len(begins))[1:] - 1]

    def rows(self) -> np.ndarray:
        """``[n, 3]`` uint64: as rows that do not touch, of device 0."""
        return np.column_stack([self.begins, self.ends - self.begins, np.zeros_like(self.begins)])

    def first_outside(self, rows: np.ndarray) -> int | None:
        """The index of the first row that is not inside one range; None if all are."""
        if not len(rows):
            return None
        if not len(self.begins):
            return 0
        places = np.searchsorted(self.begins, rows[:, 0], side="right").astype(np.int64) - 1
        ends = rows[:, 0] + rows[:, 1]
        is_inside = (places >= 0) & (ends <= self.ends[places]) & (ends >= rows[:, 0])
        return None if is_inside.all() else int(np.argmin(is_inside))

    def check(self, op: str, rows: np.ndarray, owner: str) -> None:
        """Refuse descriptors that are not inside.

        Raises:
            nixlNotFoundError: one is not; the message names it.
        """
        outside = self.first_outside(rows)
        if outside is not None:
            address, num_bytes, _ = rows[outside].tolist()
            raise nixlNotFoundError(
                f"{op}: descriptor {outside} must be inside registered memory of {owner}, "
                f"got 0x{address:x} + {num_bytes} bytes"
            )


class Memory:
    """Registers host and GPU memory by address. Thread-safe.

    Ranges that are adjacent in one call become one region of the engine, however many there are. A
    range may be registered again, or lie inside registered memory: it is counted, and the memory is
    released by the last deregistration. The caller keeps it alive until then.
    """

    def __init__(self, engine: TransferEngine):
        self._engine = engine
        self._lock = threading.RLock()
        self._regions: dict[tuple[nixl_mem_t, Row], list[Region]] = {}  # a region for each time
        self._uses: Counter[Region] = Counter()
        self._sorted: list[Region] = []  # by address; none overlap
        self._ranges: dict[nixl_mem_t, Ranges] = {}  # made when they are needed

    def register(self, descs: DescList) -> None:
        """Register all of them, or none.

        Raises:
            nixlInvalidParamError: one is empty, or overlaps registered memory without lying inside.
            nixlBackendError: one is not memory of that kind, or a NIC or driver refuses it.
        """
        kind = descs.getType()
        rows: list[Row] = [(row[0], row[1], row[2]) for row in descs.rows.tolist()]
        for address, num_bytes, _ in rows:
            if not num_bytes or address + num_bytes >= 1 << 64:
                raise nixlInvalidParamError(
                    "register_memory: a descriptor must have bytes, got "
                    f"0x{address:x} + {num_bytes} bytes"
                )
        with self._lock:
            regions: list[Region] = []
            try:
                missing = [row for row in rows if self._holder(row) is None]
                mapped = MappedMemory()
                for address, num_bytes in _joined(missing):
                    regions += self._register(kind, address, num_bytes, missing, mapped)
            except BaseException as error:
                for region in regions:
                    region.close()
                if isinstance(error, InvalidArgument):
                    raise nixlInvalidParamError(_named(error)) from None
                if isinstance(error, Unavailable | CudaError | OSError):
                    raise nixlBackendError(_named(error)) from None
                raise
            self._sorted = sorted([*self._sorted, *regions], key=_address)
            for row in rows:
                holder = self._holder(row)
                assert holder is not None
                self._regions.setdefault((kind, row), []).append(holder)
                self._uses[holder] += 1
            self._ranges.pop(kind, None)

    def deregister(self, descs: DescList) -> None:
        """Undo one registration of each, of all or of none.

        Raises:
            nixlNotFoundError: one is not registered, or not that often.
        """
        kind = descs.getType()
        rows = [(kind, (row[0], row[1], row[2])) for row in descs.rows.tolist()]
        with self._lock:
            for key, count in Counter(rows).items():
                if len(self._regions.get(key, ())) < count:
                    address, num_bytes, _ = key[1]
                    raise nixlNotFoundError(
                        "deregister_memory: dereg_list must have been registered, got "
                        f"0x{address:x} + {num_bytes} bytes"
                    )
            closing = []
            for key in rows:
                region = self._regions[key].pop()
                if not self._regions[key]:
                    del self._regions[key]
                self._uses[region] -= 1
                if not self._uses[region]:
                    del self._uses[region]
                    closing.append(region)
            self._sorted = [region for region in self._sorted if region in self._uses]
            self._ranges.pop(kind, None)
        for region in closing:
            region.close()

    def ranges(self, kind: nixl_mem_t) -> Ranges:
        """What is registered of that kind now."""
        with self._lock:
            if kind not in self._ranges:
                rows = [row for of_kind, row in self._regions if of_kind == kind]
                self._ranges[kind] = Ranges(np.array(rows, np.uint64).reshape(-1, 3))
            return self._ranges[kind]

    def _holder(self, row: Row) -> Region | None:
        """The region that contains the row.

        Raises:
            nixlInvalidParamError: one overlaps it, and does not contain it.
        """
        begin, end = row[0], row[0] + row[1]
        place = bisect.bisect_right(self._sorted, begin, key=_address)
        for region in self._sorted[max(place - 1, 0) : place + 1]:
            first, last = region.address, region.address + region.num_bytes
            if first <= begin and end <= last:
                return region
            if first < end and begin < last:
                raise nixlInvalidParamError(
                    "register_memory: a descriptor must lie inside registered memory, or not "
                    f"overlap it, got 0x{begin:x} + {row[1]} bytes, which overlap 0x{first:x} + "
                    f"{region.num_bytes} bytes"
                )
        return None

    def _register(
        self,
        kind: nixl_mem_t,
        address: int,
        num_bytes: int,
        rows: list[Row],
        mapped: MappedMemory,
    ) -> list[Region]:
        """Register a range as one region, or, on a GPU, as one for each allocation."""
        if kind == nixl_mem_t.DRAM_SEG:
            access = mapped.access(address, num_bytes)
            if not access:
                raise InvalidArgument(
                    "a descriptor of DRAM must be memory that this process can read, got "
                    f"0x{address:x} + {num_bytes} bytes"
                )
            buffer = Buffer(address, num_bytes, "cpu:0", access == "rw", None)
            return [self._engine.register(buffer, "read_write" if access == "rw" else "read")]
        whole = gpu_memory_at(address, num_bytes)
        if whole is not None:
            return [self._engine.register(whole)]
        regions: list[Region] = []
        for begin, size, _ in sorted(set(rows)):
            if address <= begin < address + num_bytes:
                part = gpu_memory_at(begin, size)
                if part is None:
                    for region in regions:
                        region.close()
                    raise InvalidArgument(
                        "a descriptor of VRAM must be of one allocation on a GPU that this "
                        f"process uses, got 0x{begin:x} + {size} bytes"
                    )
                regions.append(self._engine.register(part))
        return regions


def _address(region: Region) -> int:
    return region.address


def _joined(rows: list[Row]) -> list[tuple[int, int]]:
    """The rows as ranges (address, bytes), those joined that touch."""
    rows_of = Ranges(np.array(rows, np.uint64).reshape(-1, 3)).rows()
    return [(address, num_bytes) for address, num_bytes, _ in rows_of.tolist()]


def _named(error: Exception) -> str:
    return f"register_memory: {str(error).removeprefix('register: ')}"
