"""A peer with GPU memory in a separate process, controlled over a pipe."""

import contextlib
import multiprocessing
from typing import Any

import numpy as np

from mooncake_kernels.errors import TransferError
from mooncake_kernels.pool import ObjectPool
from mooncake_kernels.transfer import TransferEngine

from ...fake_cuda.gpus import GPUS
from ..support import START_S, WAIT_S, addressed, eventually


class Side:
    """What the peer process can be asked to do."""

    def __init__(self, transports):
        self.engine = TransferEngine(transports=transports)
        self.memories, self.regions = [], []

    def name(self) -> str:
        return self.engine.name

    def register(self, num_bytes: int, device: int = 0, exportable: bool = True) -> int:
        """Register a part of a larger allocation; return its address."""
        whole = GPUS.allocate(num_bytes + 8192, device, exportable)
        self.memories.append(whole.part(4096, 4096 + num_bytes))
        self.regions.append(self.engine.register(self.memories[-1].buffer))
        return self.regions[-1].address

    def register_host(self, memory: np.ndarray) -> int:
        self.regions.append(self.engine.register(memory))
        self.memories.append(memory)
        return self.regions[-1].address

    def store(self, num_bytes: int, device: int = 0) -> int:
        """Put an object into a pool on a GPU, which is registered; return where it is."""
        pool = ObjectPool.create(2 * num_bytes, device=device)
        pool.put_from((1, 2), addressed(num_bytes))
        self.regions.append(self.engine.register(pool.buffer))
        self.memories.append(pool.pin((1, 2)))
        return self.memories[-1].buffer.address

    def fill(self, index: int, shift: int = 0) -> None:
        self.memories[index].put(np.roll(addressed(self.memories[index].num_bytes), shift))

    def get(self, index: int) -> np.ndarray:
        return self.memories[index].get()

    def read(self, name: str, address: int, num_bytes: int) -> tuple[np.ndarray, str]:
        """Read into host memory; return it, and by which way."""
        memory = np.zeros(num_bytes, np.uint8)
        with self.engine.open(name) as peer, self.engine.register(memory) as region:
            self.engine.read(peer, [(region.address, address, num_bytes)]).wait(WAIT_S)
            return memory, str(self.engine.explain_path(region, peer, address))

    def close_region(self, index: int) -> None:
        self.regions[index].close()

    def next_notification(self) -> tuple[bytes, np.ndarray]:
        """The notification, and the bytes of the first memory at the moment that it arrived."""
        ((_, text),) = self.engine.receive_notifications(WAIT_S)
        return text, self.memories[0].get()

    def driver(self, method: str, *arguments: Any, **options: Any) -> Any:
        return getattr(GPUS.driver, method)(*arguments, **options)

    def close(self) -> dict[str, int]:
        """Close the engine; return what is not given back of the driver's."""
        self.engine.close()
        self.memories.clear()
        self.regions.clear()
        if not GPUS.driver or eventually(lambda: not any(GPUS.driver.owned().values())):
            return {}
        return GPUS.driver.owned()


def serve(pipe, transports) -> None:
    side = Side(transports)
    while True:
        method, arguments, options = pipe.recv()
        try:
            answer = getattr(side, method)(*arguments, **options)
        except (TransferError, OSError, ValueError, RuntimeError) as error:
            answer = error
        pipe.send(answer)


class Remote:
    """``Side``, from here: ``remote.fill(0)`` is carried out over there."""

    def __init__(self, process, pipe):
        self.process = process
        self._pipe = pipe

    def __getattr__(self, method: str):
        def ask(*arguments: Any, **options: Any) -> Any:
            self._pipe.send((method, arguments, options))
            assert self._pipe.poll(START_S), f"the peer process does not answer {method}"
            answer = self._pipe.recv()
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)


@contextlib.contextmanager
def gpu_peer(transports=None):
    # A server without threads and without a CUDA context, which imports what takes seconds once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "mooncake_kernels.transfer"])
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, transports), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Remote(process, ours)
    finally:
        process.kill()  # nothing if it has ended: its id may be another's by now
        process.join(WAIT_S)
        ours.close()
