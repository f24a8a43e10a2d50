"""The wire between the NICs: tc rules in the guest's kernel pass each frame to its NIC.

A wire outside (a qemu hub) lost frames on a busy machine. All NICs are in one network namespace, as
rxe of these kernels needs; the session's sysctls explain why frames leave by the right NIC.

Without a rate a wire is as fast as the guest's processor, which all wires share. With one, each
NIC's frames pass through their own pair of veths, whose first end limits the rate.
"""

from .machine import mac


def address(nic: int) -> str:
    """Return the IPv4 address of a NIC."""
    return f"10.77.0.{nic + 1}"


def batches(nics: int, rate_mbit: int | None = None) -> dict[str, str]:
    """Return the input of ``rdma -b``, ``tc -b`` and ``ip -b``, by program."""
    rdma, tc, ip = [], [], []
    for nic in range(nics):
        rdma.append(f"link add rxe{nic} type rxe netdev eth{nic}")
        tc.append(f"qdisc add dev eth{nic} clsact")
        if rate_mbit:
            # The whole window of some dozens of queue pairs waits here: none of it may be dropped.
            ip.append(f"link add wire{nic} mtu 4200 type veth peer name end{nic} mtu 4200")
            ip.extend(f"link set {end}{nic} up" for end in ("wire", "end"))
            rate = f"rate {rate_mbit}mbit burst 64kb limit 64mb"
            tc.append(f"qdisc add dev wire{nic} root tbf {rate}")
            tc.append(f"qdisc add dev end{nic} clsact")
        rule = f"filter add dev eth{nic} egress protocol all"
        for other in set(range(nics)) - {nic}:
            # An ARP reply over this wire is there before ib_core waits for it, which then waits
            # one second for another: so there is no ARP.
            neighbour = f"{address(other)} lladdr {mac(other)}"
            ip.append(f"neigh add {neighbour} dev eth{nic} nud permanent")
            # Never redirect or drop: rxe repeats a frame for ever when it is told of its loss. A
            # mirrored frame is trapped, a loss that looks like success.
            to = f"action mirred ingress mirror dev eth{other}"
            onto = f"action mirred egress mirror dev wire{nic}" if rate_mbit else to
            tc.append(f"{rule} prio 10 flower dst_mac {mac(other)} {onto} pipe action trap")
            if rate_mbit:
                # To a veth it is a frame for somebody else, which IP would not take.
                off = f"filter add dev end{nic} ingress protocol all prio {10 + other}"
                host = "action skbedit ptype host pipe"
                to_it = f"action mirred ingress redirect dev eth{other}"
                tc.append(f"{off} flower dst_mac {mac(other)} {host} {to_it}")
            group = "01:00:00:00:00:00/01:00:00:00:00:00"
            tc.append(f"{rule} prio {20 + other} flower dst_mac {group} {to} continue")
        tc.append(f"{rule} prio 999 flower action trap")
    return {"rdma": "\n".join(rdma), "tc": "\n".join(tc), "ip": "\n".join(ip)}
