"""The libraries of bench_transfer: each is two processes, told over pipes what to move.

The target offers memory. The initiator moves blocks into it or out of it, and reports how long each
job took, from the call to its end: all libraries have the same processes and the same clock, and
none runs while another's threads do. To that end a side is stopped (SIGSTOP) when it is not its
turn: threads that poll while idle, as NIXL's do, would take a processor from the others.
"""

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import mooncake_kernels as mk
from baselines.nixl import Prepared
from lib.processes import new_processes

WAIT_S = 120.0
MAX_MOONCAKE_BATCH = 2048  # 0.3.13 refuses larger ones


@dataclass
class Job:
    """Move `size` bytes at local[i] to or from remote[i], for each i, `count` times over."""

    verb: str
    local: np.ndarray  # offsets, int64
    remote: np.ndarray
    size: int
    count: int = 1


class Engine:
    """This project's, over one transport; "tcp-1": by one connection instead of two; "tcp-secret",
    "tcp-secret-only": with a secret, by TLS or with authenticated frames alone.
    """

    def __init__(self, memory: np.ndarray, transport: str):
        if transport == "tcp-1":
            os.environ["MOONCAKE_KERNELS_TRANSFER_LANES"] = "1"
        transport, _, form = transport.partition("-")
        options = {"secret": "known to both of them", "secret_only": form == "secret-only"}
        trust = options if form.startswith("secret") else {}
        self.engine = mk.TransferEngine(transports=[transport], **trust)
        self.region = self.engine.register(memory)

    def offer(self) -> Any:
        return self.engine.name, self.region.address

    def attach(self, offered: Any) -> None:
        name, self.remote = offered
        self.peer = self.engine.open(name)

    def prepare(self, job: Job) -> Any:
        call = self.engine.write_blocks if job.verb == "write" else self.engine.read_blocks
        return call, job.local + self.region.address, job.remote + self.remote, job.size

    def move(self, prepared: Any) -> None:
        call, local, remote, size = prepared
        call(self.peer, local, remote, size).wait()


class Mooncake:
    """mooncake-transfer-engine-non-cuda: lists of integers, as its users pass them."""

    def __init__(self, memory: np.ndarray, protocol: str):
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        assert self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, "") == 0
        self.address = memory.ctypes.data
        assert self.engine.register_memory(self.address, memory.nbytes) == 0

    def offer(self) -> Any:
        return f"127.0.0.1:{self.engine.get_rpc_port()}", self.address

    def attach(self, offered: Any) -> None:
        self.peer, self.remote = offered

    def prepare(self, job: Job) -> Any:
        local, remote = (job.local + self.address).tolist(), (job.remote + self.remote).tolist()
        sizes = [job.size] * len(local)
        steps = range(0, len(local), MAX_MOONCAKE_BATCH)
        cut = [slice(first, first + MAX_MOONCAKE_BATCH) for first in steps]
        call = getattr(self.engine, f"batch_transfer_sync_{job.verb}")
        return call, [(local[part], remote[part], sizes[part]) for part in cut]

    def move(self, prepared: Any) -> None:
        call, batches = prepared
        for batch in batches:
            assert call(self.peer, *batch) == 0, "Mooncake has failed"


class Nixl:
    """NIXL with its UCX backend: descriptors from numpy; each job makes a new request."""

    def __init__(self, memory: np.ndarray, tls: str):
        os.environ["UCX_TLS"] = tls
        if tls.startswith("tcp"):
            os.environ["UCX_NET_DEVICES"] = "lo"
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(f"bench-{os.getpid()}", nixl_agent_config(backends=["UCX"]))
        self.address = memory.ctypes.data
        self.agent.register_memory([(self.address, memory.nbytes, 0, "")], "DRAM")

    def offer(self) -> Any:
        return self.agent.get_agent_metadata(), self.address

    def attach(self, offered: Any) -> None:
        metadata, self.remote = offered
        self.peer = self.agent.add_remote_agent(metadata)

    def prepare(self, job: Job) -> Any:
        rows = [
            np.column_stack([at + start, np.full_like(at, job.size), np.zeros_like(at)])
            for at, start in ((job.local, self.address), (job.remote, self.remote))
        ]
        return job.verb.upper(), *(row.astype(np.uint64) for row in rows)

    def move(self, prepared: Any) -> None:
        verb, *rows = prepared
        local, remote = (self.agent.get_xfer_descs(row, "DRAM") for row in rows)
        handle = self.agent.initialize_xfer(verb, local, remote, self.peer)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE", "NIXL has failed"
        handle.release()


class Stream:
    """A bare socket: as many bytes in large writes, and one byte back. One a thread."""

    def __init__(self, memory: np.ndarray, _: str):
        self.memory = memoryview(memory)
        self.idle: list[socket.socket] = []

    def offer(self) -> Any:
        server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()
        return server.getsockname()

    def attach(self, offered: Any) -> None:
        self.address = offered

    def prepare(self, job: Job) -> Any:
        return job.verb, job.size * len(job.local)

    def move(self, prepared: Any) -> None:
        verb, num_bytes = prepared
        connection = self.idle.pop() if self.idle else self._connect()
        connection.sendall(verb[:1].encode() + num_bytes.to_bytes(8, "little"))
        if verb == "write":
            connection.sendall(self.memory[:num_bytes])
            connection.recv(1)
        else:
            self._receive(connection, num_bytes)
        self.idle.append(connection)

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self.address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _accept(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while header := connection.recv(9, socket.MSG_WAITALL):
            num_bytes = int.from_bytes(header[1:], "little")
            if header[:1] == b"w":
                self._receive(connection, num_bytes)
                connection.sendall(b"x")
            else:
                connection.sendall(self.memory[:num_bytes])

    def _receive(self, connection: socket.socket, num_bytes: int) -> None:
        done = 0
        while done < num_bytes:
            done += connection.recv_into(self.memory[done:num_bytes])


class Memcpy:
    """memcpy within one process, in memory of the same kind: the upper bound for shared memory."""

    def __init__(self, memory: np.ndarray, kind: str):
        self.memory = memory
        self.kind = kind

    def offer(self) -> Any:
        return None

    def attach(self, offered: Any) -> None:
        self.other = memory_of(self.kind, self.memory.nbytes)

    def prepare(self, job: Job) -> Any:
        here, there = self.memory.ctypes.data, self.other.ctypes.data
        num_bytes = job.size * len(job.local)
        pair = (there, here) if job.verb == "write" else (here, there)
        return *map(ctypes.c_void_p, pair), ctypes.c_size_t(num_bytes)

    def move(self, prepared: Any) -> None:
        ctypes.memmove(*prepared)


class Streamed(Memcpy):
    """The same by a copy that writes past the cache if it is large: `mk.copy_batch`, one thread."""

    def attach(self, offered: Any) -> None:
        super().attach(offered)
        torch.set_num_threads(1)

    def prepare(self, job: Job) -> Any:
        target, source, num_bytes = super().prepare(job)
        return [torch.tensor([number.value]) for number in (source, target, num_bytes)]

    def move(self, prepared: Any) -> None:
        mk.copy_batch(*prepared, engine="host")


LIBRARIES = {
    "tcp": (Engine, "tcp"),
    "tcp-1": (Engine, "tcp-1"),
    "tcp-secret": (Engine, "tcp-secret"),
    "tcp-secret-only": (Engine, "tcp-secret-only"),
    "shm": (Engine, "shm"),
    "shm-mapped": (Engine, "shm"),  # into and out of mk.shared_memory()
    "mooncake": (Mooncake, "tcp"),
    "nixl-tcp": (Nixl, "tcp"),
    "nixl-cma": (Nixl, "self,cma,sysv,posix,tcp"),
    "nixl-compat-tcp": (Prepared, "compat:tcp"),
    "nixl-compat-shm": (Prepared, "compat:sm"),
    "nixl-wheel-tcp": (Prepared, "wheel:tcp"),
    "nixl-wheel-shm": (Prepared, "wheel:self,cma,sysv,posix,tcp"),
    "stream": (Stream, ""),
    "memcpy": (Memcpy, ""),
    "memcpy-mapped": (Memcpy, "mapped"),  # machines have rules of their own for its huge pages
    "streamed": (Streamed, ""),
    "streamed-mapped": (Streamed, "mapped"),
}


def pattern(num_bytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def memory_of(kind: str, num_bytes: int) -> np.ndarray:
    """Memory in use, of huge pages where the machine allows them; "mapped": it is shared."""
    if kind == "mapped":
        memory = mk.shared_memory(num_bytes).numpy()
    else:
        memory = np.zeros(num_bytes, np.uint8)
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(memory.ctypes.data + 4095 & ~4095), ctypes.c_size_t(num_bytes - 4096), 14
    )  # MADV_HUGEPAGE
    memory[:] = 1
    return memory


def run_side(pipe: Any, library: str, num_bytes: int) -> None:
    """The main loop of one of the processes."""
    kind, option = LIBRARIES[library]
    memory = memory_of("mapped" if library.endswith("-mapped") else "", num_bytes)
    try:
        side = kind(memory, option)
    except (ImportError, AssertionError, mk.InvalidArgument, mk.Unavailable) as error:
        pipe.send(("missing", str(error)))
        return
    pipe.send(("ready", None))
    while (message := pipe.recv())[0] != "end":
        what, value = message
        if what == "offer":
            pipe.send(side.offer())
        elif what == "attach":
            side.attach(value)
            pipe.send(None)
        elif what == "fill":
            memory[:] = pattern(num_bytes, value)
            pipe.send(None)
        elif what == "blocks":
            at, size = value
            pipe.send(np.concatenate([memory[i : i + size] for i in at]).tobytes())
        else:
            pipe.send(run_jobs(side, *value))
    pipe.send(None)
    os._exit(0)  # NIXL 1.5 dies of a signal otherwise


def run_jobs(side: Any, jobs: list[Job], num_threads: int) -> float:
    """Carry the jobs out, which the threads share evenly; return the seconds that it took."""
    prepared = [side.prepare(job) for job in jobs]

    def run(first: int) -> None:
        for _ in range(jobs[0].count):
            for mine in prepared[first::num_threads]:
                side.move(mine)

    if num_threads == 1:
        start = time.perf_counter()
        run(0)
        return time.perf_counter() - start
    with ThreadPoolExecutor(num_threads) as threads:
        start = time.perf_counter()
        list(threads.map(run, range(num_threads)))
        return time.perf_counter() - start


class Missing(Exception):
    """The library is not installed, or does not work here."""


class Ended(Exception):
    """A process of the library has ended; what it said is on the screen."""


class Library:
    """A library's two processes, which run only while they have a job."""

    def __init__(self, name: str, num_bytes: int):
        self.name = name
        self._pipes, self.processes = [], []
        context = new_processes()
        for _ in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_side, args=(theirs, name, num_bytes), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        try:
            for pipe in self._pipes:
                state, why = self._receive(pipe)
                if state == "missing":
                    raise Missing(why)
            with self._running():
                self._ask(0, "attach", self._ask(1, "offer"))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Library":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, jobs: list[Job], num_threads: int | None = None) -> float:
        """Return the seconds that the initiator took, with a thread a job unless told otherwise."""
        with self._running():
            return self._ask(0, "run", (jobs, num_threads or len(jobs)))

    def check(self, job: Job) -> None:
        """Raise unless the blocks arrive."""
        if LIBRARIES[self.name][0] in (Stream, Memcpy, Streamed):
            places = np.arange(len(job.local)) * job.size  # as many bytes, from the start
            job = replace(job, local=places, remote=places)
        source = 0 if job.verb == "write" else 1
        with self._running():
            self._ask(source, "fill", 1)
            self._ask(1 - source, "fill", 2)
            self._ask(0, "run", ([job], 1))
            here = self._ask(0, "blocks", (job.local, job.size))
            if LIBRARIES[self.name][0] in (Memcpy, Streamed):
                return  # its target is in the same process
            there = self._ask(1, "blocks", (job.remote, job.size))
        assert here == there, f"{self.name}: a {job.verb} is wrong: not timed"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        yield
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            os.kill(process.pid, number)

    def _ask(self, side: int, what: str, value: Any = None) -> Any:
        self._pipes[side].send((what, value))
        return self._receive(self._pipes[side])

    def _receive(self, pipe: Any) -> Any:
        if not pipe.poll(WAIT_S):
            raise TimeoutError(f"{self.name} does not answer")
        try:
            return pipe.recv()
        except EOFError:
            raise Ended(f"a process of {self.name} has ended") from None
