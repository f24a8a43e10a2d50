"""RDMA through libibverbs: NICs, registered memory, and connections over which one side reads and
writes the memory of the other.

::

    with mk.rdma.open("mlx5_0") as device:
        region = device.register(cache, access="remote_read_write")
        queue = device.completion_queue()
        pair = queue.queue_pair()
        peer, remote = swap(pair.endpoint.to_bytes(), region.remote.to_bytes())  # over a socket
        pair.connect(Endpoint.from_bytes(peer))
        pair.write(region, RemoteRegion.from_bytes(remote), [(local, remote_address, num_bytes)])
        for completion in queue.poll(timeout_s=1.0):
            completion.check()

Closing an object first closes those that depend on it: the queue pairs of a queue, all objects of a
device. libibverbs is loaded on first use; without it ``devices()`` is empty, and everything else
here raises ``Unavailable`` with the loader's message. After ``fork()`` the child cannot use the
parent's objects, and closing them there has no effect.
"""

from .cache import Lease, RegistrationCache
from .completion_queue import Completion, CompletionQueue
from .device import Device, on_protection_domain, open
from .endpoint import Endpoint
from .info import DeviceInfo, GidInfo, PortInfo, devices
from .probe import probe
from .queue_pair import QueuePair
from .region import Access, Region, RemoteRegion, flush_writes, register

__all__ = [
    "Access",
    "Completion",
    "CompletionQueue",
    "Device",
    "DeviceInfo",
    "Endpoint",
    "GidInfo",
    "Lease",
    "PortInfo",
    "QueuePair",
    "Region",
    "RegistrationCache",
    "RemoteRegion",
    "devices",
    "flush_writes",
    "on_protection_domain",
    "open",
    "probe",
    "register",
]
