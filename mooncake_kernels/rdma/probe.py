"""Whether a NIC can really reach memory: one may register a GPU's and yet not access it."""

from typing import Any

from .._arguments import as_instance, as_seconds
from ..buffers import as_buffer
from ..errors import InvalidArgument, TransferError, Unavailable
from .device import Device
from .region import Mapping, register

_PATTERN = bytes((31 * i + 7) % 251 for i in range(4096))


def probe(
    device: Device, buffer: Any, *, port: int = 1, mapping: Mapping = "auto", timeout_s: float = 5.0
) -> str:
    """Write to memory with a NIC, over a connection to itself, and read it back the same way.

    The memory's previous contents are restored, if the NIC can. Probe once per NIC and GPU, and
    record the result in the topology::

        reason = mk.rdma.probe(device, torch.empty(4096, dtype=torch.uint8, device="cuda:0"))
        if reason:
            topo.mark_unreachable("cuda:0", device.name, reason)

    Args:
        device: the NIC; its port must be active.
        buffer: memory of host or GPU, at least one byte; the first 4096 bytes are used.
        port: of the NIC.
        mapping: as ``rdma.register()``.
        timeout_s: after this it counts as unreachable.

    Returns:
        Why not, in one phrase; empty if the NIC reaches it.

    Raises:
        InvalidArgument: an empty or read-only buffer.
        Unavailable, OSError, CudaError: the port cannot be used, or the memory cannot be registered
            (``rdma.register()``): this does not show what the NIC reaches.
    """
    memory = as_buffer(buffer)
    if not memory.num_bytes or not memory.writable:
        raise InvalidArgument("probe: buffer must be writable and hold at least one byte")
    as_instance("probe", "device", device, Device, "an open Device")
    as_seconds("probe", "timeout_s", timeout_s, minimum=1e-3)
    state = device.port(port).state
    if state != "ACTIVE":
        raise Unavailable(f"probe: port {port} of {device.name} must be ACTIVE, got {state}")
    size = min(memory.num_bytes, len(_PATTERN))
    saved, pattern, back = bytearray(size), bytearray(_PATTERN[:size]), bytearray(size)
    with device.completion_queue(64) as queue:
        pair = queue.queue_pair(port=port, max_sends=16)
        pair.connect(pair.endpoint, retries=2)
        [there] = register([device], memory, "remote_read_write", mapping=mapping)
        with there:
            for local, reads in ((saved, True), (pattern, False), (back, True), (saved, False)):
                with device.register(local) as region:
                    move = pair.read if reads else pair.write
                    token = move(region, there.remote, [(region.address, there.address, size)])
                    try:
                        queue.wait(token, timeout_s=timeout_s)
                    except (TransferError, TimeoutError) as error:
                        return f"registered, but {'read' if reads else 'write'} failed: {error}"
    return "" if back == pattern else "registered, but what was read back is not what was written"
