"""The host's side of a ``LayerStream``: signal, wait and test without a call to CUDA."""

import torch

from .layer_stream_arguments import as_index, as_seconds, as_step
from .ready_flags import ABORTED, Flags


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
