"""The engine over two NICs a side and over one a side, in turn.

One request at a time: 32 MiB in one range, and as scattered blocks of 16 KiB. Both ends are on
this machine. Without RDMA NICs it runs in a guest with soft-RoCE, where a NIC may send 160 Mbit/s,
a third or less of what the guest's emulated processor manages for all of them together.
"""

import argparse
from typing import Any

import in_guest
from harness import arguments
from perftest import few_rounds, in_turn
from rdma_link import Link, row, say
from table import heading, save

import mooncake_kernels as mk

MIB = 1 << 20
WIRE_MBIT = 160


def cases(names: list[str], options: argparse.Namespace) -> Any:
    num_bytes = (8 if options.quick else 32) * MIB
    one = Link(names[:1], names[1:2], num_bytes)
    two = Link(names[0::2], names[1::2], num_bytes)
    for verb in ("write", "read"):
        one.check(verb)
        two.check(verb)
        for shape in ("contiguous", "scattered"):
            rounds = in_turn(
                lambda verb=verb, shape=shape: two.move(verb, shape),
                lambda verb=verb, shape=shape: one.move(verb, shape),
                options,
            )
            yield row(f"{verb}, {shape}, two NICs a side", "one", rounds)
    one.close()
    two.close()


def main() -> None:
    options = arguments(__doc__, few_rounds, without=("device", "seconds"))
    in_guest.leave_unless_nics(options, 4, wire_mbit=WIRE_MBIT)
    names = [device.name for device in mk.rdma.devices()[:4]]
    head, rows = heading("transfer_nics", options), []
    guest = f"soft-RoCE in a QEMU guest, {WIRE_MBIT} Mbit/s each"
    head["nics"] = guest if names[0].startswith("rxe") else names
    for found in cases(names, options):
        rows.append(found)
        say(found, "one")
        save(head, rows, options)


if __name__ == "__main__":
    main()
