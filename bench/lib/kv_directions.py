"""The directions of a copy: the memory of each, and how fast it can be at best."""

import ctypes
import statistics

import torch

from lib.harness import seconds
from lib.kv_moves import Call, Move, driver_copy, one_piece
from lib.kv_shapes import Job

# What each direction reads and writes. No buffer is both, so that a check can rely on the sources.
DIRECTIONS = {
    "H2H": [("cpu", "cpu")],
    "D2D": [("cuda", "cuda")],
    "H2D": [("cpu", "cuda")],
    "D2H": [("cuda", "cpu")],
    "both": [("cpu", "cuda"), ("cuda", "cpu")],  # at once, on two streams
}
LARGE = {"cpu": 1 << 30, "cuda": 256 << 20}  # bytes of a copy that is bound by the memory alone
CEILING_ROUNDS, LONE_RUNS, LONE_BYTES, NEAR_BYTES = 9, 20_000, 64, 16 << 10


class Memory:
    """Buffers to read, to write and to stage in, on either side; allocated on first use."""

    def __init__(self, num_bytes: int, on_gpu: bool):
        self.num_bytes, self.on_gpu = num_bytes // 256 * 256, on_gpu
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def buffer(self, side: str, use: str) -> torch.Tensor:
        if (side, use) not in self._buffers:
            size = self.num_bytes // (2 if use.startswith("staging") else 1)
            pinned = self.on_gpu and side == "cpu"
            buffer = torch.empty(size // 8, dtype=torch.int64, device=side, pin_memory=pinned)
            buffer = buffer.random_() if use == "src" else buffer.zero_()
            self._buffers[side, use] = buffer.view(torch.uint8)
        return self._buffers[side, use]

    def ends(self, direction: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = DIRECTIONS[direction]
        return [(self.buffer(src, "src"), self.buffer(dst, "dst")) for src, dst in pairs]

    def staging(self, direction: str) -> list[list[torch.Tensor]]:
        """Return for each way of a direction the staging memory on its sides.

        Within one memory they are the same buffer; one plane's worth of it is used over and over.
        """
        return [
            [self.buffer(side, f"staging {i}") for side in dict.fromkeys(way)]
            for i, way in enumerate(DIRECTIONS[direction])
        ]

    def moves(self, direction: str, job: Job, engine: str, max_sms: int | None) -> list[Move]:
        """Return a job in each way of a direction, run once.

        Raises:
            MemoryError: the pools do not fit into the buffers.
            InvalidArgument, Unavailable: a plan does not go this way, or the engine does not.
        """
        if job.pool_bytes > self.num_bytes:
            needed = 2 * job.pool_bytes / 2**30
            raise MemoryError(f"needs {needed:.1f} GiB, --max-gib is less")
        ends = zip(self.ends(direction), self.staging(direction), strict=True)
        moves = [Move(job, *pair, staging, engine, max_sms) for pair, staging in ends]
        for move in moves:
            move.ours()
        return moves


def together(calls: list[Call], streams: list) -> None:
    """Queue each call on a stream of its own, after what is queued now and before what follows."""
    current = torch.cuda.current_stream()
    for stream, call in zip(streams, calls, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            call()
    for stream in streams:
        current.wait_stream(stream)


def ceiling(direction: str, memory: Memory) -> float:
    """Return the GB/s, read plus written, of large copies in one piece: the best way's median."""
    ends = memory.ends(direction)
    device = "cpu" if direction == "H2H" else "cuda"
    size = min(LARGE[device], memory.num_bytes)
    calls = [lambda src=src, dst=dst: one_piece(src, dst, size) for src, dst in ends]
    if direction == "both":
        streams = [torch.cuda.Stream() for _ in ends]
        ways = [lambda: together(calls, streams)]
    elif direction == "H2H":
        src, dst = ends[0]
        ways = [*calls, lambda: dst[:size].copy_(src[:size])]
    else:
        ways = calls
    fastest = min(median_seconds(way, device, CEILING_ROUNDS) for way in ways)
    return 2 * size * len(ends) / fastest / 1e9


def seconds_a_run(direction: str, memory: Memory) -> float:
    """Return the cost of one run with hardly any bytes, where runs are copied one by one.

    On a GPU that is a call of the driver, or two for both ways at once. On the CPU it is the wait
    for memory: a loop over scattered runs, less one over runs that lie in the cache.
    """
    ends = memory.ends(direction)
    if direction == "H2H":
        return statistics.median(wait_for_memory(*ends[0]) for _ in range(CEILING_ROUNDS))
    calls = [lambda src=src, dst=dst: lone_runs(src, dst) for src, dst in ends]
    streams = [torch.cuda.Stream() for _ in ends]
    taken = median_seconds(lambda: together(calls, streams), "cuda", CEILING_ROUNDS)
    return taken / LONE_RUNS


def lone_runs(src: torch.Tensor, dst: torch.Tensor) -> None:
    """Queue runs with hardly any bytes, one by one."""
    copy, stream = driver_copy(), torch.cuda.current_stream().cuda_stream
    step = min(src.numel(), dst.numel()) // LONE_RUNS // LONE_BYTES * LONE_BYTES
    for i in range(LONE_RUNS):
        copy(dst.data_ptr() + i * step, src.data_ptr() + i * step, LONE_BYTES, stream)


def wait_for_memory(src: torch.Tensor, dst: torch.Tensor) -> float:
    """Return how much longer a run takes if it is in memory: read and written at new places.

    The loop is so slow between two runs that their waits do not overlap.
    """
    anywhere = torch.randint(src.numel() // LONE_BYTES, (2, LONE_RUNS)) * LONE_BYTES

    def loop_over(src_places: torch.Tensor, dst_places: torch.Tensor) -> float:
        sources = (src.data_ptr() + src_places).tolist()
        targets = (dst.data_ptr() + dst_places).tolist()

        def loop() -> None:
            for target, source in zip(targets, sources, strict=True):
                ctypes.memmove(target, source, LONE_BYTES)

        return seconds(loop, "cpu")[0]

    return (loop_over(*anywhere) - loop_over(*anywhere % NEAR_BYTES)) / LONE_RUNS


def median_seconds(call: Call, device: str, rounds: int) -> float:
    call()
    return statistics.median(seconds(call, device)[0] for _ in range(rounds))
