"""Write from one RDMA NIC to another (here: to itself) by verbs; which NIC is near what."""

import torch

import mooncake_kernels as mk
from mooncake_kernels.errors import Unavailable

try:
    devices = list(mk.rdma.devices())
except Unavailable as error:
    print(f"no RDMA here: {error}")
    raise SystemExit(0) from None
if not devices:
    print("no RDMA here: libibverbs lists no device")
    raise SystemExit(0)

topology = mk.Topology.discover()
print(topology.explain("cpu:0"))  # which NICs are for this memory, and why
source, target = torch.arange(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)

with mk.rdma.open(devices[0].name) as device:
    mine = device.register(source, access="local")
    theirs = device.register(target, access="remote_read_write")
    queue = device.completion_queue()
    here, there = queue.queue_pair(), queue.queue_pair()
    # Between two machines endpoints and regions travel as bytes: .to_bytes(), .from_bytes().
    here.connect(there.endpoint)
    there.connect(here.endpoint)
    token = here.write(mine, theirs.remote, [(mine.address, theirs.address, 4096)])
    queue.wait(token)
assert torch.equal(source, target)
print(f"4,096 bytes were written through {devices[0].name}")
