"""The stages of an engine: the first is in this process, each other one in a process of its own."""

import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.reduction import send_handle

import mooncake_kernels as mk
from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import InvalidArgument, TransferError

from ..batch import Batch, Chunk
from ..errors import WorkerFailed
from ..llama import Llama
from ..process import Failed, Process
from ..sampling import Draw
from .link import Outbox
from .messages import Done, GroupOptions, Listening, StageOptions, Step
from .stage import Stage, StageWorker, cache_bytes, divide_layers, shared_cache


class StageGroup(Closeable):
    """Starts the processes of the other stages, and feeds them; they end with this process.

    All stages map one cache, of which each uses its own layers: what reads or writes whole blocks
    can do so here. Not thread-safe.

    Args:
        model: on the CPU; the group keeps what the first stage needs.
        options: of the group.

    Attributes:
        stage: the first one.
        cache: of all layers.
        options: as given.
        pids: of the other processes.

    Raises:
        InvalidArgument: the model is not on the CPU, or has fewer layers than there are stages.
        WorkerFailed: a process could not start; the message has its reason.
    """

    def __init__(self, model: Llama, options: GroupOptions):
        config, dtype = model.config, model.dtype
        if model.device.type != "cpu":
            raise InvalidArgument(f"StageGroup: model must be on the CPU, got {model.device}")
        if options.num_stages > config.num_layers:
            raise InvalidArgument(
                f"StageGroup: num_stages must be at most the model's {config.num_layers} layers, "
                f"got {options.num_stages}"
            )
        self.options = options
        self._num_launched = self._num_done = 0
        self._heard_s = time.monotonic()
        self._processes: list[Process] = []
        self._is_closed = False
        descriptor = os.memfd_create("mooncake-kernels-cache", os.MFD_CLOEXEC)
        secret = secrets.token_hex()
        self._transfer = mk.TransferEngine(transports=("shm",), secret=secret)
        try:
            os.ftruncate(descriptor, cache_bytes(config, options, dtype))
            own, *others = divide_layers(config.num_layers, options.num_stages)
            for index, layers in enumerate(others, 1):
                name = str(dtype).removeprefix("torch.")
                stage = StageOptions(options, name, layers, secret)
                process = Process(f"stage {index}", StageWorker, stage)
                self._processes.append(process)
                send_handle(process.pipe, descriptor, process.process.pid)
            self.cache = shared_cache(config, options, dtype, descriptor)
            first_layers = Llama(
                config, model.weights.part(own), batch_invariant=options.batch_invariant
            )
            self.stage = Stage(first_layers, self.cache, own)
            pids = [process.process.pid for process in self._processes]
            self.pids = [pid for pid in pids if pid is not None]
            first, *following = self._listening()
            for process, next_stage in zip(self._processes, following, strict=False):
                process.send(next_stage)
            self._outbox = Outbox(
                self._transfer, first.engine_name, first.address,
                options.num_slots, options.max_batch_tokens, config.hidden_size, dtype,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise
        finally:
            os.close(descriptor)

    @property
    def has_room(self) -> bool:
        """Whether another step may be launched."""
        return self._num_launched - self._num_done < self.options.num_slots

    def launch(self, chunks: Sequence[Chunk], ends: Sequence[int], draws: Sequence[Draw]) -> None:
        """Compute the first stage of a step, and have the others compute theirs.

        Args:
            chunks: of the step.
            ends: indices of those behind which a token is wanted.
            draws: how each of these is chosen.

        Raises:
            WorkerFailed: the next stage has failed.
        """
        step = Step(self._num_launched, chunks, ends, draws)
        batch = Batch.build(chunks, self.cache.block_size)
        for process in self._processes:
            process.send(step)
        if self._num_launched == self._num_done:
            self._heard_s = time.monotonic()
        x = self.stage.compute(batch)
        try:
            self._outbox.send(step.number, x)
        except TransferError as error:
            raise WorkerFailed(f"the next stage is out of reach: {error}") from error
        self._num_launched += 1

    def take_done(self, timeout_s: float = 0.0) -> list[int | None] | None:
        """Return what is chosen in the next step that is done: all stages have computed it.

        Args:
            timeout_s: how long to wait for it, in seconds.

        Returns:
            A token for each of its ``ends``, None where the logits are not finite; or None: it is
            not done.

        Raises:
            WorkerFailed: a stage has failed, or does not answer.
        """
        if self._num_launched == self._num_done:
            return None
        report = self._report(timeout_s)
        if report is None:
            if time.monotonic() - self._heard_s > self.options.deadline_s:
                raise WorkerFailed(f"no stage has answered for {self.options.deadline_s:g} s")
            return None
        done = report[1]
        assert isinstance(done, Done) and done.number == self._num_done, "steps are in order"
        self._num_done += 1
        self._heard_s = time.monotonic()
        return done.token_ids

    def watch(self, failed: Callable[[WorkerFailed], None]) -> None:
        """Have the death of a process told at once, by a thread, also while nothing is computed."""

        def watch() -> None:
            dead = wait([process.process.sentinel for process in self._processes])
            for process in self._processes:
                if process.process.sentinel in dead and not self._is_closed:
                    failed(process.death())

        threading.Thread(target=watch, name="stages", daemon=True).start()

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._is_closed = True
        for process in self._processes:
            process.close()
        self._transfer.close()

    def _listening(self) -> list[Listening]:
        """Wait until all stages have their weights."""
        found: dict[Process, Listening] = {}
        until = time.monotonic() + self.options.start_s
        while len(found) < len(self._processes):
            report = self._report(max(0.0, until - time.monotonic()))
            if report is None:
                raise WorkerFailed(f"stages did not start within {self.options.start_s:g} s")
            process, content = report
            if isinstance(content, Listening):
                found[process] = content
        return [found[process] for process in self._processes]

    def _report(self, timeout_s: float) -> tuple[Process, object] | None:
        """Return what a stage reports; None: nothing in that time."""
        ready = wait([process.pipe for process in self._processes], timeout_s)
        for process in self._processes:
            if process.pipe not in ready:
                continue
            try:
                report = process.pipe.recv()
            except (EOFError, OSError):
                raise process.death() from None
            if isinstance(report, Failed):
                raise WorkerFailed(f"the {process.name} process failed: {report.reason}")
            return process, report
        return None
