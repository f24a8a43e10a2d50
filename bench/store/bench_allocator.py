"""The pool's allocator alone: what a call takes, and how full a pool gets before it finds no gap.

In C++, by allocator_costs.cc, which is built here. "release, allocate" is one call each, in pools
of 1,000 to 1,000,000 objects of 4 KiB to 4 MiB that are 50 % to 99 % full: the same steps
everywhere; what grows is how many of the records they touch are not in a cache. "first" is how full
a pool is when it first refuses an object, "refused" how full it was at later refusals, each of
which freed an object at random, or the oldest, until there was a gap; "after" is how full it was
after each allocation. Sizes: one (2 MiB); blocks (four sizes, 643 KiB to 3.1 MiB); any (4 KiB to
4 MiB); tiny-large (nine of 4 KiB, one of 16 MiB); mooncake (1 KiB to 64 MiB in 2 GiB, as in
Mooncake's allocator_bench.cpp). Times are medians of the rounds' medians.
"""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

from lib.harness import arguments
from lib.table import heading, save

ROOT = Path(__file__).resolve().parents[2]
NUM_OBJECTS = (1_000, 100_000, 1_000_000)
PERCENTS = (50, 90, 99)
CAPACITY = 64 << 30
MIXES = {
    "one": CAPACITY, "blocks": CAPACITY, "any": CAPACITY, "tiny-large": CAPACITY,
    "mooncake": 2 << 30,
}  # fmt: skip
SHARES = ("first", "refused", "refused_p1", "after", "after_p1")


def build(folder: Path) -> Path:
    """Compile allocator_costs.cc with the allocator."""
    program = folder / "allocator_costs"
    files = [Path(__file__).with_name("allocator_costs.cc"), ROOT / "csrc/store/allocator.cc"]
    flags = ["-O3", "-std=c++17", f"-I{ROOT / 'csrc'}"]
    subprocess.run(["g++", *flags, *files, "-o", program], check=True)
    return program


def figures(program: Path, *words: object) -> list[float]:
    command = [program, *map(str, words)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(word) for word in run.stdout.split()]


def main() -> None:
    options = arguments(__doc__, without=("device", "seconds"))
    few = options.quick
    head, rows = heading("allocator", options), []

    def add(case: str, row: dict[str, float], text: str) -> None:
        rows.append({"case": case, **row})
        sys.stdout.write(f"{case:44} {text}\n")
        sys.stdout.flush()
        save(head, rows, options)

    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for count in NUM_OBJECTS[: 2 if few else 3]:
            for percent in PERCENTS:
                rounds = [
                    figures(program, "time", count, percent, 10 if few else 100)
                    for _ in range(min(options.repeat, 5))
                ]
                release, allocate, refused = map(statistics.median, zip(*rounds, strict=True))
                row = {"ns_release": release, "ns_allocate": allocate, "refused_ppm": refused}
                text = f"{release:6.1f} ns, {allocate:.1f} ns"
                add(f"release, allocate: {count} objects, {percent} % full", row, text)
        for mix, capacity in MIXES.items():
            for order in ("random", "oldest"):
                words = "fill", mix, capacity, order, 100_000 if few else 1_000_000
                row = dict(zip(SHARES, figures(program, *words), strict=True))
                text = "  ".join(f"{name} {100 * share:.1f} %" for name, share in row.items())
                add(f"how full: {mix}, {order}", row, text)


if __name__ == "__main__":
    main()
