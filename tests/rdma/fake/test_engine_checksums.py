"""checksum=True over NICs, one of which flips a bit."""

import pytest

from mooncake_kernels.errors import TransferError

from .engines import engines

SIZE = 3 << 20


@pytest.mark.parametrize("direction", ["write", "read"])
def test_checksummed_transfer_delivers_the_same_data(direction):
    with engines(SIZE) as pair:
        pair.move(direction, [(3, 5, SIZE - 10)], checksum=True, notify=b"done")
        assert pair.far.receive_notifications(20.0) == [(pair.near.name, b"done")]


def test_bit_flipped_by_a_nic_is_detected(world):
    with engines(SIZE) as pair:
        world.set_option("corrupt", 1)
        pair.write([(0, 0, SIZE)]).wait()  # nobody has noticed
        ticket = pair.write([(0, 0, SIZE)], checksum=True, notify=b"done")
        with pytest.raises(TransferError, match="checksum: remote range 0x") as failed:
            ticket.wait()
        assert failed.value.num_bytes_done == SIZE
        assert failed.value.delivered.tolist() == [False]
        world.set_option("corrupt", 0)
        pair.move("write", [(0, 0, SIZE)], checksum=True, notify=b"good")
        assert pair.far.receive_notifications(20.0) == [(pair.near.name, b"good")]


def test_checksummed_write_to_write_only_memory():
    with engines(SIZE, access="write") as pair:
        pair.move("write", [(0, 7, 4096)], checksum=True)
