"""The wire between the NICs: tc rules in the guest's kernel hand each frame to the NIC it is for.

A wire outside (a qemu hub) lost frames on a busy machine. All NICs are in one network namespace, as
rxe of these kernels needs; see the session's sysctls for why frames leave by the NIC they should.
"""

from .machine import mac


def address(nic: int) -> str:
    """Return the IPv4 address of a NIC."""
    return f"10.77.0.{nic + 1}"


def batches(nics: int) -> dict[str, str]:
    """Return what ``rdma -b``, ``tc -b`` and ``ip -b`` read, by program."""
    rdma, tc, ip = [], [], []
    for nic in range(nics):
        rdma.append(f"link add rxe{nic} type rxe netdev eth{nic}")
        tc.append(f"qdisc add dev eth{nic} clsact")
        rule = f"filter add dev eth{nic} egress protocol all"
        for other in set(range(nics)) - {nic}:
            # An ARP reply over this wire is there before ib_core waits for it, which then waits
            # one second for another: so there is no ARP.
            neighbour = f"{address(other)} lladdr {mac(other)}"
            ip.append(f"neigh add {neighbour} dev eth{nic} nud permanent")
            # Never redirect or drop: rxe repeats a frame for ever when it is told of its loss. A
            # mirrored frame is trapped, a loss that looks like success.
            to = f"action mirred ingress mirror dev eth{other}"
            tc.append(f"{rule} prio 10 flower dst_mac {mac(other)} {to} pipe action trap")
            group = "01:00:00:00:00:00/01:00:00:00:00:00"
            tc.append(f"{rule} prio {20 + other} flower dst_mac {group} {to} continue")
        tc.append(f"{rule} prio 999 flower action trap")
    return {"rdma": "\n".join(rdma), "tc": "\n".join(tc), "ip": "\n".join(ip)}
