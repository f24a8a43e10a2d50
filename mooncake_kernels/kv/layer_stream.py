"""Layer by layer: a forward pass that waits for each layer's KV, or signals when it is written."""

import numbers
from typing import NoReturn

import torch

from .. import _library
from ..errors import InvalidArgument, Unavailable, shown
from .ready_flags import ABORTED, Flags

_LONGEST_S = 1e9  # 30 years; fits in an integer number of nanoseconds


def as_count(op: str, count: int) -> int:
    if not _is_int(count) or not 1 <= count < 2**31:
        raise InvalidArgument(
            f"{op}: num_layers must be an integer from 1 to 2**31 - 1, got {shown(count)}"
        )
    return int(count)


def as_index(op: str, layer: int, num_layers: int) -> int:
    if not _is_int(layer) or not 0 <= layer < num_layers:
        raise InvalidArgument(
            f"LayerStream.{op}: layer must be in [0, {num_layers}), got {shown(layer)}"
        )
    return int(layer)


def as_step(op: str, step: int, least: int = 1) -> int:
    if not _is_int(step) or not least <= step < 2**62:
        raise InvalidArgument(
            f"LayerStream.{op}: step must be in [{least}, 2**62), got {shown(step)}"
        )
    return int(step)


def refuse_in_graph(op: str, step: int, device: torch.device) -> None:
    if device.type == "cpu" or torch.compiler.is_compiling():
        return
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise InvalidArgument(
                f"LayerStream.{op}: step must be None in a graph, got {shown(step)}"
            )


def as_seconds(op: str, seconds: float) -> float:
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= _LONGEST_S:
        raise InvalidArgument(f"{op}: timeout_s must be a number in (0, 1e9], got {shown(seconds)}")
    return float(seconds)


def as_device(op: str, device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"{op}: device must be cpu or a CUDA device, got {shown(device)}")
    if found.type == "cpu":
        return torch.device("cpu")
    if not _library.has_cuda:
        raise Unavailable(f"{op}: _ops.so was built without nvcc, so it has no CUDA kernels")
    if not torch.cuda.is_available():
        raise Unavailable(f"{op}: torch finds no CUDA device")
    index = torch.cuda.current_device() if found.index is None else found.index
    return torch.device("cuda", index)


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


class ReadyLayers:
    """One flag per layer: the last step for which it is ready."""

    def __init__(self, num_layers: int, timeout_s: float, *, pinned: bool):
        self.num_layers = num_layers
        self.timeout_s = timeout_s
        self._flags = Flags(num_layers, pinned=pinned)

    @property
    def flags(self) -> torch.Tensor:
        """See the attributes."""
        return self._flags.values

    def signal_from_host(self, layer: int, step: int) -> None:
        """Signal at once that a layer of a step is ready: ``flags[layer] = step``.

        For a thread that has written the layer, or has seen its transfer complete; on CUDA also
        while streams and graphs wait. A reader that sees it sees what the thread wrote before.
        """
        layer = as_index("signal_from_host", layer, self.num_layers)
        self._flags.set(layer, as_step("signal_from_host", step))

    def wait_on_host(self, layer: int, step: int, timeout_s: float | None = None) -> None:
        """Wait, in the calling thread, until a layer of a step is ready.

        Args:
            layer: which one.
            step: which one; 1 is that of the first ``begin_signals``.
            timeout_s: seconds; None: the stream's ``timeout_s``.

        Raises:
            TimeoutError: it is not ready in time (you may wait for it again), or a ``wait_layer``
                timed out.
            RuntimeError: ``abort()`` was called, also while this waits.
        """
        op = "wait_on_host"
        layer, step = as_index(op, layer, self.num_layers), as_step(op, step)
        seconds = (
            self.timeout_s if timeout_s is None else as_seconds(f"LayerStream.{op}", timeout_s)
        )
        if not self._flags.wait(layer, step, seconds):
            self.check()
            raise _late(op, layer, step, seconds, int(self.flags[layer]))

    def is_ready(self, layer: int, step: int) -> bool:
        """Tell whether a layer of a step is ready now."""
        layer = as_index("is_ready", layer, self.num_layers)
        return self._flags.has(layer, as_step("is_ready", step))

    def abort(self) -> None:
        """End all waits, also on the device: missing layers will not come."""
        self._flags.abort()

    def check(self) -> None:
        """Raise if a wait failed, until ``reset()``. Does not wait for the device.

        Call it when a result is known to be complete (after an event of its stream), before you use
        it.

        Raises:
            TimeoutError: a ``wait_layer`` took longer than ``timeout_s``; the message names the
                layer.
            RuntimeError: ``abort()`` was called.
        """
        report = self._flags.report()
        if report is None:
            return
        if report.state == ABORTED:
            raise RuntimeError("LayerStream.wait_layer: given up, for abort() was called")
        raise _late("wait_layer", report.flag, report.wanted, self.timeout_s, report.seen)


def _late(op: str, layer: int, step: int, timeout_s: float, seen: int) -> TimeoutError:
    return TimeoutError(
        f"LayerStream.{op}: layer {layer} must be ready for step {step} within {timeout_s:g} s, "
        f"got one that is ready for step {seen}"
    )


class LayerStream(ReadyLayers):
    """Signal, layer by layer, the progress of a step on one side, and wait for it on the other.

    A step is what both sides repeat: a forward pass. The writer of the layers signals, their reader
    waits; either is a CUDA stream, a CUDA graph that is replayed, or a thread. Equivalent to, with
    ``flags``, ``signal_step`` and ``wait_step`` initially 0::

        begin_signals():      signal_step += 1
        signal_layer(layer):  flags[layer] = signal_step
        begin_waits():        wait_step += 1
        wait_layer(layer):    while flags[layer] < wait_step: pass

    So the n-th ``begin_waits`` waits for what is signalled after the n-th ``begin_signals``, and
    neither side needs to know where the other is: a signal may come before or after its wait, and a
    layer that nothing waits for leaves nothing behind. A step that transfers nothing has no begin:
    its waits pass at once. On CUDA these four are queued on the current stream, and a graph may
    capture them: steps are counted in memory when the graph runs, not when it is captured. On the
    CPU they act at once, and ``wait_layer`` lets other threads run.

    ``signal_from_host``, ``wait_on_host`` and ``is_ready`` act at once on any device, without a
    call to CUDA; they take the step as an argument.

    A wait times out after ``timeout_s``, also in a graph, so a peer that was killed does not hang
    it. After a timeout or ``abort()``, nothing waits any longer: on CUDA, queued work continues
    with layers that may be missing, and ``check()`` raises. Call it before you use a result, and if
    it raises discard what was computed since. ``reset()`` starts over.

    On CUDA a wait occupies one thread of the device until it ends. The work it waits for must be
    able to run meanwhile: not behind it on its stream, and without any operation for which CUDA
    first waits until the device is idle (the first launch of a kernel under lazy loading,
    ``cudaFree``, pinning memory). Creating a LayerStream waits for the current stream. It must
    outlive the graphs that captured it.

    In compiled code ``signal_layer`` and ``wait_layer`` keep their order relative to code that
    writes and reads the tensors they are tied to, which they do not touch. Hide the cache itself
    from the compiler, which may let the code work on a copy until its end: access the cache inside
    a custom operator, as engines do for attention, and tie its inputs and outputs.

    Args:
        num_layers: how many flags there are.
        device: of the side that is on a device: ``"cpu"`` or a CUDA device.
        timeout_s: the longest that one ``wait_layer`` lasts, in seconds; fixed at capture.

    Attributes:
        flags: ``[num_layers]`` int64 in host memory, pinned on CUDA: the last step for which each
            layer is ready. A NIC or a peer may write it as well, a whole int64 after the data.

    Raises:
        InvalidArgument: an argument is not as above, here and in the methods.
        Unavailable: ``device`` is not available.
    """

    def __init__(
        self, num_layers: int, device: str | torch.device = "cpu", *, timeout_s: float = 30.0
    ):
        op = "LayerStream"
        self.device = as_device(op, device)
        super().__init__(
            as_count(op, num_layers), as_seconds(op, timeout_s), pinned=self.device.type == "cuda"
        )
        with torch.inference_mode(False):
            self._signal_step, self._wait_step = (
                torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(2)
            )
        if self.device.type == "cuda":
            # A kernel's first launch loads it, which can wait for the device: do it now, not
            # while the device waits for us.
            self.signal_layer(0)
            self.wait_layer(0)
            torch.cuda.current_stream(self.device).synchronize()  # other streams use it next

    def begin_signals(self, step: int | None = None) -> None:
        """Begin the next step of the signalling side.

        Args:
            step: its number, for a side that counts on the host; None: the previous one plus one.
                Must be None if a graph captures it, because a number would be the same at each
                replay.
        """
        self._begin("begin_signals", self._signal_step, step)

    def begin_waits(self, step: int | None = None) -> None:
        """Begin the next step of the waiting side; ``step`` as for ``begin_signals``."""
        self._begin("begin_waits", self._wait_step, step)

    def _begin(self, op: str, word: torch.Tensor, step: int | None) -> None:
        if step is None:
            word.add_(1)
        else:
            refuse_in_graph(op, step, self.device)
            word.fill_(as_step(op, step))

    def signal_layer(self, layer: int, *ties: torch.Tensor) -> None:
        """Signal that a layer is ready, once the work queued before on the current stream has run.

        Before the first ``begin_signals`` that is step 0, which no wait needs.

        Args:
            layer: which one. Signals of one layer must come in the order of their steps.
            *ties: for compiled code, tensors that the code before this has written, such as the
                output of attention.
        """
        flag = self._flags.address(as_index("signal_layer", layer, self.num_layers))
        _library.call(_library.signal_flag, self._signal_step, ties, flag, 0)

    def wait_layer(self, layer: int, *ties: torch.Tensor) -> None:
        """Make work queued later on the current stream wait until a layer is ready.

        Args:
            layer: which one.
            *ties: for compiled code, tensors that the code after this reads, such as the queries.

        Raises:
            TimeoutError: a wait timed out; on CUDA an earlier one. Compiled code on the CPU raises
                a RuntimeError.
            RuntimeError: ``abort()`` was called.
        """
        layer = as_index("wait_layer", layer, self.num_layers)
        flag, report = self._flags.address(layer), self._flags.report_address
        timeout_ns = int(self.timeout_s * 1e9)
        if torch.compiler.is_compiling():
            _library.wait_flag(self._wait_step, ties, flag, 0, report, timeout_ns)
            return
        self.check()
        if self.device.type == "cuda":
            _library.call(_library.wait_flag, self._wait_step, ties, flag, 0, report, timeout_ns)
        elif not self._flags.wait(layer, int(self._wait_step), self.timeout_s):
            self._give_up(layer)

    def _give_up(self, layer: int) -> None:
        """Raise for a layer that did not come, and end all current and later waits, too."""
        arguments = self._flags.address(layer), 0, self._flags.report_address
        try:
            _library.wait_flag(self._wait_step, [], *arguments, 0)  # a last check, which reports
        except RuntimeError:
            self.check()
            raise

    def reset(self, step: int = 0) -> None:
        """Start over without errors; on CUDA, wait for all work queued on the device.

        Current waits are released first. No thread may signal or wait meanwhile.

        Args:
            step: the number before that of the next step. If signals of earlier steps may still
                arrive, choose one beyond theirs: otherwise they would count as new ones.
        """
        step = as_step("reset", step, least=0)
        self.abort()
        self._synchronize()
        self._signal_step.fill_(step)
        self._wait_step.fill_(step)
        self._synchronize()  # for streams other than the current one
        self._flags.clear(step)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a LayerStream cannot be copied: it is memory that two sides share")
