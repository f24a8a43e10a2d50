"""Layer by layer: a forward pass that waits for each layer's KV, or signals when it is written."""

from typing import NoReturn

import torch

from .. import _library
from .layer_stream_arguments import (
    as_count,
    as_device,
    as_index,
    as_seconds,
    as_step,
    refuse_in_graph,
)
from .ready_layers import ReadyLayers


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
