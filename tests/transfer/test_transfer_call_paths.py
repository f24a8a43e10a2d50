"""How many functions of this package a short request enters: it takes as long as a few dozen."""

import pytest
import torch

import mooncake_kernels as mk

from ..walk import walk

NUM_BYTES = 1024


@pytest.fixture(scope="module")
def requests():
    source, target = (torch.zeros(NUM_BYTES, dtype=torch.uint8) for _ in range(2))
    with mk.TransferEngine(transports=["local"]) as one, mk.TransferEngine() as two:
        local, remote = one.register(source).address, two.register(target).address
        peer = one.open(two.name)
        table = torch.tensor([[local, remote, NUM_BYTES]])
        columns = table[:, :2].numpy().T.copy()
        yield {
            "tuples": lambda: one.write(peer, [(local, remote, NUM_BYTES)]).wait(),
            "tensor": lambda: one.write(peer, table).wait(),
            "array": lambda: one.read(peer, table.numpy(), deadline_s=5, checksum=False).wait(),
            "columns": lambda: one.write_blocks(peer, *columns, NUM_BYTES).wait(),
        }


@pytest.mark.parametrize(
    ("case", "most"), [("tuples", 8), ("tensor", 12), ("array", 12), ("columns", 8)]
)
def test_request_enters_few_functions(requests, case, most):
    requests[case]()
    steps = walk(requests[case])
    assert len(steps) <= most, steps
