"""pyverbs, an independent library, as the peer: it reads and writes our memory, and we its."""

import ipaddress

import numpy as np
import pytest

import mooncake_kernels as mk
from mooncake_kernels.rdma import Endpoint, RemoteRegion
from mooncake_kernels.rdma.region import REMOTE_READ, REMOTE_WRITE

from ...waiting import eventually
from .links import Side, noise
from .support import pyverbs_or_skip

SIZE = 1 << 18


class PyverbsPeer:
    """One end of a connection, all in pyverbs."""

    def __init__(self, name: str):
        names = "enums", "device", "pd", "mr", "cq", "addr", "qp", "wr"
        self.e, device, pd, mr, cq, self.addr, self.qps, self.wr = pyverbs_or_skip(*names)
        self.context = device.Context(name=name)
        self.pd = pd.PD(self.context)
        self.mr = mr.MR(self.pd, SIZE, self.e.IBV_ACCESS_LOCAL_WRITE | 6)  # remote read and write
        self.cq = cq.CQ(self.context, 64)
        cap = self.qps.QPCap(max_send_wr=16, max_recv_wr=16)
        init = self.qps.QPInitAttr(qp_type=self.e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap)
        self.qp = self.qps.QP(self.pd, init)

    def endpoint(self) -> Endpoint:
        gid = ipaddress.IPv6Address(self.context.query_gid(1, 1).gid).packed
        return Endpoint(self.qp.qp_num, 0, 0, gid, "RoCE v2", "Ethernet", 4096, 1)

    def remote(self) -> RemoteRegion:
        return RemoteRegion(REMOTE_READ | REMOTE_WRITE, ((self.mr.buf, SIZE, self.mr.rkey),))

    def connect(self, peer: Endpoint) -> None:
        gid = self.addr.GID(ipaddress.IPv6Address(peer.gid).exploded)
        route = self.addr.GlobalRoute(dgid=gid, sgid_index=1)
        attr = self.qps.QPAttr(port_num=1)
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn = peer.qp_num, peer.psn, 0
        attr.path_mtu = self.e.IBV_MTU_4096
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer = 14, 7, 7, 12
        attr.ah_attr = self.addr.AHAttr(port_num=1, is_global=1, gr=route)
        attr.qp_access_flags = 7
        self.qp.to_rts(attr)

    def move(self, opcode: int, address: int, rkey: int, size: int) -> None:
        part = self.wr.SGE(self.mr.buf, size, self.mr.lkey)
        request = self.wr.SendWR(
            opcode=opcode, num_sge=1, sg=[part], send_flags=self.e.IBV_SEND_SIGNALED
        )
        request.set_wr_rdma(rkey, address)
        self.qp.post_send(request)
        done = []
        eventually(lambda: done.extend(self.cq.poll(1)[1] or []) or bool(done))
        assert done[0].status == self.e.IBV_WC_SUCCESS


@pytest.fixture
def ends():
    peer = PyverbsPeer("rxe1")
    side = Side("rxe0", SIZE)
    side.pair.connect(peer.endpoint())
    peer.connect(side.pair.endpoint)
    yield side, peer
    side.device.close()
    peer.context.close()


def test_pyverbs_writes_to_our_region(ends):
    side, peer = ends
    data = bytes(noise(SIZE))
    peer.mr.write(data, SIZE)
    peer.move(peer.e.IBV_WR_RDMA_WRITE, side.region.address, side.region.rkey, SIZE)
    assert side.memory.tobytes() == data


def test_pyverbs_reads_our_region(ends):
    side, peer = ends
    side.memory[:] = noise(SIZE, 7)
    peer.move(peer.e.IBV_WR_RDMA_READ, side.region.address, side.region.rkey, SIZE)
    assert bytes(peer.mr.read(SIZE, 0)) == side.memory.tobytes()


def test_we_write_to_and_read_from_pyverbs(ends):
    side, peer = ends
    data = noise(SIZE, 8)
    side.memory[:] = data
    rows = [(side.region.address, peer.mr.buf, SIZE)]
    side.queue.wait(side.pair.write(side.region, peer.remote(), rows))
    assert bytes(peer.mr.read(SIZE, 0)) == data.tobytes()
    side.memory[:] = 0
    side.queue.wait(side.pair.read(side.region, peer.remote(), rows))
    assert (side.memory == data).all()


def test_register_on_a_pyverbs_protection_domain(ends):
    """A queue pair of pyverbs uses our region: both must be of one domain."""
    side, peer = ends
    memory = np.zeros(SIZE, np.uint8)
    side.memory[:] = noise(SIZE, 9)
    with mk.rdma.on_protection_domain(peer.pd) as device:
        assert device.name == "rxe1"
        region = device.register(memory, "local")
        part = peer.wr.SGE(region.address, SIZE, region.lkey)
        request = peer.wr.SendWR(
            opcode=peer.e.IBV_WR_RDMA_READ, num_sge=1, sg=[part],
            send_flags=peer.e.IBV_SEND_SIGNALED,
        )  # fmt: skip
        request.set_wr_rdma(side.region.rkey, side.region.address)
        peer.qp.post_send(request)
        done = []
        eventually(lambda: done.extend(peer.cq.poll(1)[1] or []) or bool(done))
        assert done[0].status == peer.e.IBV_WC_SUCCESS
        assert (memory == side.memory).all()
        with pytest.raises(mk.InvalidArgument, match="must be opened here, but is borrowed"):
            device.wait_event()
    # The domain is still pyverbs' own.
    peer.move(peer.e.IBV_WR_RDMA_READ, side.region.address, side.region.rkey, 100)


def test_closed_or_invalid_domain_is_rejected(ends):
    _, peer = ends
    with pytest.raises(mk.InvalidArgument, match="must be a pyverbs PD"):
        mk.rdma.on_protection_domain(peer.context)
    (pd_module,) = pyverbs_or_skip("pd")
    closed = pd_module.PD(peer.context)
    closed.close()
    with pytest.raises(mk.InvalidArgument, match="must be open, but is closed"):
        mk.rdma.on_protection_domain(closed)
