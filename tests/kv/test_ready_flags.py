"""The operators under LayerStream: called alone, in compiled code, and for a single flag."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels.kv.ready_flags import Flags, signal_flag

from ..conftest import HAS_CUDA, skip

operators = torch.ops.mooncake_kernels
NUM_LAYERS = 3
LONG_NS = 20_000_000_000


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not HAS_CUDA:
        skip("cuda", "torch finds no CUDA device")
    return request.param


def test_opcheck(device):
    step = torch.ones(1, dtype=torch.int64, device=device)
    cache = torch.zeros(3, device=device)
    flags = Flags(4, pinned=device == "cuda")
    signal = (step, [cache], flags.address(2), 4)
    wait = (step, [cache], flags.address(2), 4, flags.report_address, LONG_NS)
    for operator, arguments in [(operators.signal_flag, signal), (operators.wait_flag, wait)]:
        result = torch.library.opcheck(operator.default, arguments)
        assert set(result.values()) == {"SUCCESS"}, (operator, result)
    operators.signal_flag(None, [cache], flags.address(1), -3)
    if device == "cuda":
        torch.cuda.synchronize()
    assert flags.values.tolist() == [0, -3, 5, 0] and flags.report() is None


class Passes:
    """Forward passes over a cache that a custom operator reads and writes, as engines have it."""

    def __init__(self, device):
        self.cache = torch.zeros(NUM_LAYERS, 3, device=device)
        # Now: pinning memory would wait for the kernel that waits for what is loaded.
        self.rows = torch.zeros(NUM_LAYERS, 3, pin_memory=self.cache.is_cuda)
        self.loaded, self.written = (mk.LayerStream(NUM_LAYERS, device) for _ in range(2))

    def forward(self, x):
        self.loaded.begin_waits()
        self.written.begin_signals()
        for layer in range(NUM_LAYERS):
            query = x * 2
            self.loaded.wait_layer(layer, query)
            x = operators_of_test.attend(query, layer) + 1
            self.written.signal_layer(layer, x)
        return x

    def load(self, steps):
        """Write a layer only when the one before it has been read: any other order stops both."""
        side = torch.cuda.Stream() if self.cache.is_cuda else None
        with torch.inference_mode(), torch.cuda.stream(side):
            for step, layer in itertools.product(steps, range(NUM_LAYERS)):
                if layer > 0:
                    self.written.wait_on_host(layer - 1, step)
                self.cache[layer].copy_(self.rows[layer].fill_(step))
                if side is not None:
                    side.synchronize()
                self.loaded.signal_from_host(layer, step)


operators_of_test = torch.ops.mooncake_kernels_test
passes: list[Passes] = []


@torch.library.custom_op("mooncake_kernels_test::attend", mutates_args=())
def attend(query: torch.Tensor, layer: int) -> torch.Tensor:
    return query + passes[-1].cache[layer]


attend.register_fake(lambda query, layer: torch.empty_like(query))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_passes_keep_step_and_order(device, compiler):
    """The step is not baked, and nothing is moved over a wait or a signal."""
    passes.append(Passes(device))
    forward = torch.compile(passes[-1].forward, fullgraph=True, backend=compiler)
    for layer in range(NUM_LAYERS):  # compiles, and loads what it launches, while nothing waits
        passes[-1].loaded.signal_from_host(layer, 1)
    forward(torch.ones(3, device=device))
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(passes[-1].load, [2, 3])
        for step in (2, 3):
            expected = torch.ones(3)
            for _ in range(NUM_LAYERS):
                expected = expected * 2 + step + 1
            assert torch.equal(forward(torch.ones(3, device=device)).cpu(), expected)
        loading.result(60)
    passes.pop().loaded.check()


def test_wait_in_compiled_code_times_out():
    stream = mk.LayerStream(2, timeout_s=0.02)
    wait = torch.compile(lambda x: stream.wait_layer(1, x), backend="aot_eager")
    stream.begin_waits()
    with pytest.raises(RuntimeError, match=r"wait_flag: step 1 is not ready, but 0 \(timed out\)"):
        wait(torch.zeros(1))
    with pytest.raises(TimeoutError, match="layer 1 must be ready for step 1"):
        stream.check()


def test_waiting_operator_releases_the_gil():
    """The interpreter lock is free: else no thread could signal, and the wait would raise."""
    flags, step = Flags(1, pinned=False), torch.zeros(1, dtype=torch.int64)
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(
            operators.wait_flag, step, [], flags.address(0), 3, flags.report_address, LONG_NS
        )
        flags.set(0, 3)
        wait.result(60)


def test_signal_flag_signals_each_chunk(device):
    """A flag for each chunk of what is packed, in host memory or on the device."""
    packed = torch.zeros(3, device=device)
    for flags in (
        torch.zeros(4, dtype=torch.int64, pin_memory=device == "cuda"),
        torch.zeros(4, dtype=torch.int64, device=device),
    ):
        for chunk in range(1, 4):
            signal_flag(flags, chunk, 10 * chunk, packed)
        if device == "cuda":
            torch.cuda.synchronize()
        assert flags.tolist() == [0, 10, 20, 30]


@pytest.mark.parametrize(
    "flags, index, message",
    [
        (torch.zeros(4), 0, "flags must be packed int64, got torch.float32"),
        (torch.zeros(8, dtype=torch.int64)[::2], 0, "flags must be packed int64, .*2"),
        (torch.zeros(4, dtype=torch.int64), 4, r"index must be in \[0, 4\), got 4"),
        (
            torch.zeros(4, dtype=torch.int64, device="meta"),
            0,
            "flags must be in memory that cpu reaches .* meta",
        ),
    ],
)
def test_signal_flag_rejects_bad_arguments(flags, index, message):
    with pytest.raises(mk.InvalidArgument, match=f"signal_flag: {message}"):
        signal_flag(flags, index, 1, torch.zeros(1))


def test_operators_check_their_arguments():
    flags, two = Flags(1, pinned=False), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="signal_flag: step must be one int64"):
        operators.signal_flag(two, [], flags.address(0), 1)
    with pytest.raises(ValueError, match="wait_flag: flag must be the address of an int64"):
        operators.wait_flag(two[:1], [], 0, 1, 0, 1)
