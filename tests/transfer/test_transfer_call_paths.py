"""How many functions of this package a short request enters: it takes as long as a few dozen."""

import sys
from pathlib import Path

import pytest
import torch

import mooncake_kernels as mk

ROOT = str(Path(mk.__file__).parent)
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
    steps: list[str] = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            steps.append(getattr(code, "co_qualname", code.co_name))

    requests[case]()
    sys.setprofile(note)
    try:
        requests[case]()
    finally:
        sys.setprofile(None)
    assert len(steps) <= most, steps
