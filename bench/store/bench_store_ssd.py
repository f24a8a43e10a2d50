"""Objects of an SsdTier put and read, against plain pwrite(2) and pread(2) past the page cache.

A call moves one object, or as many as make up 1 MiB, and the next call the next ones. The baseline
moves blocks of the same size, one by one and in its own thread, between a file in the same folder
and aligned memory such as the tier's: it names, checks and copies nothing. Both files were fully
written before. "checked" compares XXH3-64 of every byte. "restart" opens and closes a tier of
10,000 objects: from its footer, and after a crash, when it examines each record, compares its data,
and writes a new footer.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

from lib.harness import Case, arguments, at_least, folder
from lib.interleave import Interleave
from lib.table import report
from mooncake_kernels.buffers import shared_memory
from mooncake_kernels.pool import PutResult, object_keys
from mooncake_serving.store import SsdTier

MIB = 1 << 20
CALL = MIB
SIZES = {"64 KiB": 64 << 10, "1 MiB": MIB, "16 MiB": 16 * MIB}
NUM_OBJECTS, OBJECT = 10_000, 16 << 10
BUCKET = 256 * MIB


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=folder, default=Path("."), help="on the disk in question")
    objects = "of objects that are read, in turn; a multiple of 16"
    parser.add_argument("--mib", type=at_least(16), default=256, help=objects)


class Plain:
    """A file that is read and written past the page cache, block by block."""

    def __init__(self, path: Path, num_bytes: int):
        self.file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT)
        os.posix_fallocate(self.file, 0, num_bytes)
        self.memory = shared_memory(num_bytes).numpy()

    def read(self, offset: int, num_bytes: int) -> None:
        view = self.memory[offset : offset + num_bytes]
        assert os.preadv(self.file, [view], offset) == num_bytes

    def write(self, offset: int, num_bytes: int) -> None:
        view = self.memory[offset : offset + num_bytes]
        assert os.pwritev(self.file, [view], offset) == num_bytes

    def close(self) -> None:
        os.close(self.file)


def write_all_over(tier: SsdTier) -> None:
    """Write the file: the first write of a block takes the file system longer."""
    filler, lap = np.ones(16 * MIB, np.uint8), tier.stats().num_buckets
    for i in range(1 << 62):
        if tier.stats().num_buckets_begun > lap:
            return
        tier.put_each([(i, 2)], [filler])


class Moves:
    """Objects of one size in a tier, and the same bytes in a plain file."""

    def __init__(self, folder: Path, name: str, size: int, total: int, num_rounds: int):
        count, self.each, self.size = total // size, max(1, CALL // size), size
        self.content = np.random.default_rng(1).integers(0, 256, (count, size), np.uint8)
        self.keys = object_keys(np.arange(count), name)
        self.plain = Plain(folder / "plain", total)
        self.plain.memory[:] = self.content.reshape(-1)
        self.out = np.zeros_like(self.content)
        put_bytes = (num_rounds + 1) * 2 * self.each * size  # new objects in each round
        capacity = (-(-(total + put_bytes) // BUCKET) + 3) * BUCKET
        self.tier = SsdTier(folder / "tier", capacity, bucket_bytes=BUCKET)
        write_all_over(self.tier)
        for key, row in zip(self.keys, self.content, strict=True):
            assert self.tier.put_each(key[None], [row]) == [PutResult.STORED]
        self.tier.sync()
        parts = (Interleave(count, self.each) for _ in range(3))
        self.reads, self.plain_reads, self.plain_writes = parts
        self.fresh = iter(range(1 << 62))

    def get(self, verify: bool) -> None:
        part = self.reads.take()
        keys, rows = self.keys[part.start : part.stop], self.out[part.start : part.stop]
        self.tier.get_into_each(keys, rows, verify=verify)

    def put(self) -> None:
        new = np.array([[next(self.fresh), 1] for _ in range(self.each)], np.uint64)
        assert set(self.tier.put_each(new, self.content[: self.each])) == {PutResult.STORED}

    def pread(self) -> None:
        for i in self.plain_reads.take():
            self.plain.read(i * self.size, self.size)

    def pwrite(self) -> None:
        for i in self.plain_writes.take():
            self.plain.write(i * self.size, self.size)

    def check_reads(self, verify: bool) -> None:
        self.out[:] = 0
        for _ in self.reads.parts:
            self.get(verify)
        assert np.array_equal(self.out, self.content), "wrong: not timed"

    def check_put(self) -> None:
        self.put()
        new = np.array([[i, 1] for i in range(self.each)], np.uint64)
        got = np.zeros((self.each, self.size), np.uint8)
        assert self.tier.get_into_each(new, got).tolist() == [self.size] * self.each
        assert np.array_equal(got, self.content[: self.each]), "wrong: not timed"

    def close(self) -> None:
        self.plain.close()
        self.tier.close()


def moves(folder: Path, name: str, size: int, total: int, num_rounds: int) -> Iterator[Case]:
    own = Moves(folder, name, size, total, num_rounds)
    for _ in own.plain_writes.parts:
        own.pwrite()  # so that pread reads from the disk
    title, num_bytes = f"{own.each} x {name}", own.each * size
    yield Case(f"put_each: {title}", own.put, {"pwrite": own.pwrite}, own.check_put, num_bytes)
    for kind, verify in {"get_into_each": False, "get_into_each, checked": True}.items():
        call, check = partial(own.get, verify), partial(own.check_reads, verify)
        yield Case(f"{kind}: {title}", call, {"pread": own.pread}, check, num_bytes)
    own.close()
    for file in folder.iterdir():
        file.unlink()


def restarts(folder: Path, num_objects: int) -> Iterator[Case]:
    path, content = folder / "tier", np.random.default_rng(2).integers(0, 256, OBJECT, np.uint8)
    keys = object_keys(np.arange(num_objects), "restart")

    def opened() -> SsdTier:
        return SsdTier(path, 3 * BUCKET, bucket_bytes=BUCKET)

    with opened() as tier:
        for start in range(0, num_objects, 100):
            some = keys[start : start + 100]
            assert set(tier.put_each(some, [content] * len(some))) == {PutResult.STORED}

    def restart() -> None:
        opened().close()

    def restart_after_death() -> None:
        with open(path, "r+b") as file:  # as if the footer had not been written
            file.seek(MIB + BUCKET - 4096)
            file.write(bytes(4096))
        restart()

    def check(call: Callable[[], None]) -> Callable[[], None]:
        def check() -> None:
            call()
            with opened() as tier:
                assert tier.match_prefix(keys) == num_objects, "wrong: not timed"

        return check

    name = f"{num_objects:,} x 16 KiB"
    yield Case(f"restart: {name}", restart, {}, check(restart))
    yield Case(
        f"restart after a death: {name}", restart_after_death, {}, check(restart_after_death)
    )


def cases(folder: Path, options: argparse.Namespace) -> Iterator[Case]:
    largest = max(SIZES.values())
    total = (min(options.mib, 32) if options.quick else options.mib) * MIB // largest * largest
    for name, size in SIZES.items():
        yield from moves(folder, name, size, total, options.repeat + 3)
    yield from restarts(folder, 1000 if options.quick else NUM_OBJECTS)


if __name__ == "__main__":
    options = arguments(__doc__, add_options, without=("device",))
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        report("store_ssd", cases(Path(own).resolve(), options), options)
