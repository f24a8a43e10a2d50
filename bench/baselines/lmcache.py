"""LMCache's stores for bench_store_peers.

Its wheel requires some 40 others, of which its storage needs about half; they are installed into a
folder of their own, named by PYTHONPATH.
"""

import asyncio
import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from baselines.store import Memory, Missing, running
from lib.processes import free_port


class LMCache:
    """Its host memory backend, in this process: objects of its allocator, copied by torch."""

    def __init__(self, capacity: int, memory: Memory):
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        self.backend = LocalCPUBackend(
            LMCacheEngineConfig.from_defaults(local_cpu=True),
            LMCacheMetadata("bench", 1, 1, 0, 0, torch.uint8, (1, 1, 256, 1, 1)),
            memory_allocator=HostMemoryAllocator(capacity),
        )
        self.key = lambda name: CacheEngineKey("bench", 1, 0, hash(name), torch.uint8)
        self.bytes = torch.from_numpy(memory.bytes)

    def get(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        for key, offset in zip(keys, offsets, strict=True):
            found = self.fetch(key)
            self.bytes[offset : offset + size].copy_(found.tensor)
            found.ref_count_down()

    def put(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        for key, offset in zip(keys, offsets, strict=True):
            room = self.backend.allocate(torch.Size([size]), torch.uint8)
            room.tensor.copy_(self.bytes[offset : offset + size])
            self.store(key, room)
            room.ref_count_down()

    def remove(self, keys: list[str]) -> None:
        for key in keys:
            assert self.backend.remove(self.key(key))

    def fetch(self, key: str) -> Any:
        return self.backend.get_blocking(self.key(key))

    def store(self, key: str, room: Any) -> None:
        self.backend.submit_put_task(self.key(key), room)


class LMCacheServer(LMCache):
    """Its server in another process, by its own connector, which uses tcp.

    A put is not answered, so one is over when the server, which works in order, says that it has
    the last value. It cannot remove values: they are put again over those that are there. It sends
    a small value in two parts, of which the second waits 40 ms for the kernel: those are left out.
    """

    removes = False
    moves_small = False

    def __init__(self, capacity: int, memory: Memory, port: int):
        super().__init__(capacity, memory)
        from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector

        self.loop = asyncio.new_event_loop()
        self.connector = LMCServerConnector("127.0.0.1", port, self.loop, self.backend)
        # Without it, asking after each put would take 40 ms.
        self.connector.client_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        super().put(keys, offsets, size)
        assert self.exists(keys[-1:])

    def get_pieces(self, key: str, offsets: Sequence[int], size: int) -> None:
        found = self.fetch(key)
        for i, offset in enumerate(offsets):
            self.bytes[offset : offset + size].copy_(found.tensor[i * size : (i + 1) * size])
        found.ref_count_down()

    def exists(self, keys: list[str]) -> bool:
        return all(self.loop.run_until_complete(self.connector.exists(self.key(k))) for k in keys)

    def remove(self, keys: list[str]) -> None:
        pass

    def fetch(self, key: str) -> Any:
        return self.loop.run_until_complete(self.connector.get(self.key(key)))

    def store(self, key: str, room: Any) -> None:
        self.loop.run_until_complete(self.connector.put(self.key(key), room))

    def close(self) -> None:
        self.loop.run_until_complete(self.connector.close())
        self.loop.close()


@contextlib.contextmanager
def lmcache_server() -> Iterator[int]:
    """Its server; yields the port."""
    if importlib.util.find_spec("lmcache") is None:
        raise Missing("No module named 'lmcache'")
    port = free_port()
    command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)]
    with running(command, port):
        yield port
