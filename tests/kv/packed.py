"""What a peer receives of packed blocks."""

import torch

from .layouts import Sizes

HOLE = -1
SIZES = Sizes(layer=4, block=6, head=4, token=4, dim=8)


def sent(packer, ids, **options):
    """Pack; return what a peer receives: the header's bytes, and a copy of the buffer's."""
    staging = torch.full((packer.header(len(ids)).num_bytes,), 0x55, dtype=torch.uint8)
    staging = staging.to(packer.device)
    header = packer.pack(ids, staging, **options)
    packer.check()
    return header.to_bytes(), staging.clone()


def staging_of(packer, num_blocks=2):
    return torch.zeros(packer.header(num_blocks).num_bytes, dtype=torch.uint8)
