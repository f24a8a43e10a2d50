"""LMCache's store for bench_store_peers.

Its wheel requires some 40 others, of which its storage needs about half; they are installed into a
folder of their own, named by PYTHONPATH.
"""

import os
from collections.abc import Sequence

import torch
from store_sides import Memory


class LMCache:
    """Its host memory backend, in this process: objects of its allocator, copied by torch."""

    def __init__(self, capacity: int, memory: Memory):
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        config = LMCacheEngineConfig.from_defaults(local_cpu=True)
        allocator = HostMemoryAllocator(capacity)
        self.backend = LocalCPUBackend(config, memory_allocator=allocator)
        self.key = lambda name: CacheEngineKey("bench", 1, 0, hash(name), torch.uint8)
        self.bytes = torch.from_numpy(memory.bytes)

    def get(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        for key, offset in zip(keys, offsets, strict=True):
            found = self.backend.get_blocking(self.key(key))
            self.bytes[offset : offset + size].copy_(found.tensor)
            found.ref_count_down()

    def put(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        for key, offset in zip(keys, offsets, strict=True):
            room = self.backend.allocate(torch.Size([size]), torch.uint8)
            room.tensor.copy_(self.bytes[offset : offset + size])
            self.backend.submit_put_task(self.key(key), room)
            room.ref_count_down()

    def remove(self, keys: list[str]) -> None:
        for key in keys:
            assert self.backend.remove(self.key(key))
