"""Move memory between engines: one-sided writes and reads of registered regions.

An engine registers memory and opens peers by name. A peer that holds the address of a registered
region may write to it or read from it; the owner's program takes no part::

    with mk.TransferEngine() as engine:
        engine.register(cache)
        peer = engine.open("10.0.0.2:4711")                # engine.name of the other side
        engine.write(peer, [(local_address, remote_address, num_bytes)]).wait()
        engine.write_blocks(peer, pool.blocks(src_ids), peer_pool.blocks(dst_ids)).wait()

Without a metadata server, a name is an address. With one (``metadata="redis://10.0.0.1:6379"``) it
is a name of your choice, ``"prefill-3"``, and resolves to exactly that engine or fails.

Every transfer has a deadline; no call waits forever. Transports:

- ``local``: the peer is an engine of this process. A copy.
- ``shm``: a process of the same user on this machine, in the same network namespace. This process
  copies into and out of the peer's memory, faster for memory from ``shared_memory()``.
- ``cuda_ipc``: such a process, for GPU memory. The GPUs copy.
- ``rdma``: the NICs of both sides move the data, all of them at once. Control messages and
  notifications use a TCP connection.
- ``tcp``.
- ``file``: the peer is a file on a local disk. The addresses of the peer
  ``engine.open("file:/mnt/ssd/pool")`` are offsets in that file.

All of them move GPU memory, see docs/transfer/gpu_memory.md.

Without a secret, anything that can connect to the port can use the registered regions, so an engine
listens on 127.0.0.1 unless told otherwise. With a secret, both sides of a connection prove that
they know it. That does not protect the bytes that follow: where others have access to the network,
use TLS as well.

After ``fork()`` the child must create its own engine. The only call it may make on the parent's is
``close()``, which has no effect. Until the child exits or calls ``exec()``, it holds copies of the
parent's sockets. If the parent closes its engine, the peers are disconnected all the same (only the
name of an engine without ``tcp`` stays taken). If the parent is killed, its peers see their
connections end, and its port becomes free, only once the child is gone too; until then requests to
it fail at their deadlines, but NICs serve its memory.
"""

from .engine import TransferEngine
from .handles import Access, Peer, Region, Ticket, Window
from .objects import (
    MAX_RPC_BYTES,
    MAX_RPC_KEYS,
    WHOLE,
    ObjectsResponse,
    ObjectStatus,
    RedisPublisher,
    Served,
    ServedPool,
)
from .paths import PathChoice
from .pools import BlockPool, Blocks, take_addresses
from .regions import RemoteRegion
from .security import Tls

__all__ = [
    "MAX_RPC_BYTES",
    "MAX_RPC_KEYS",
    "WHOLE",
    "Access",
    "BlockPool",
    "Blocks",
    "PathChoice",
    "ObjectStatus",
    "ObjectsResponse",
    "Peer",
    "RedisPublisher",
    "Region",
    "RemoteRegion",
    "Served",
    "ServedPool",
    "Ticket",
    "Tls",
    "TransferEngine",
    "Window",
    "take_addresses",
]
