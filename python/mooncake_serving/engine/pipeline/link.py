"""How activations go from one stage to the next: written into a ring of slots there."""

import torch

import mooncake_kernels as mk

NUMBER_BYTES = 8


class Inbox:
    """A stage's input, a slot for each step that is under way; the stage before writes it.

    Args:
        transfer: by which it is written.
        num_slots: of the ring: step i is in slot ``i % num_slots``.
        num_rows: tokens of a step, at most.
        width: elements of a token.
        dtype: of these.

    Attributes:
        address: for the ``Outbox`` of the stage before.
    """

    def __init__(
        self,
        transfer: mk.TransferEngine,
        num_slots: int,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
    ):
        self._transfer, self._arrived = transfer, set[int]()
        self._slots = torch.zeros((num_slots, num_rows, width), dtype=dtype)
        self.address = transfer.register(self._slots, access="write").address

    def wait(self, number: int, timeout_s: float) -> bool:
        """Wait for the input of a step; False: it has not come in time."""
        if number not in self._arrived:  # larger ones may overtake smaller ones
            for _, message in self._transfer.receive_notifications(timeout_s):
                self._arrived.add(int.from_bytes(message, "big"))
        return number in self._arrived

    def take(self, number: int, num_rows: int) -> torch.Tensor:
        """Return an input that has come, ``[num_rows, width]``, valid until the step is done."""
        self._arrived.remove(number)
        return self._slots[number % len(self._slots), :num_rows]


class Outbox:
    """The way to the next stage's ``Inbox``, whose ring is as large as this one's form says.

    Args:
        transfer: which writes.
        engine_name, address: of the inbox.
        num_slots, num_rows, width, dtype: of the inbox.

    Raises:
        TransferError: the next stage is not there.
    """

    def __init__(
        self,
        transfer: mk.TransferEngine,
        engine_name: str,
        address: int,
        num_slots: int,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
    ):
        self._transfer, self._address, self._num_slots = transfer, address, num_slots
        self._peer = transfer.open(engine_name, allow_file=False)
        self._rows = torch.zeros((num_rows, width), dtype=dtype)
        transfer.register(self._rows, access="windows")  # no peer reads it

    def send(self, number: int, rows: torch.Tensor) -> None:
        """Write a step's activations ``[num_rows, width]`` into its slot.

        Raises:
            TransferError: they have not arrived.
        """
        self._rows[: len(rows)] = rows
        slot = self._address + number % self._num_slots * self._rows.nbytes
        self._transfer.write(
            self._peer,
            [(self._rows.data_ptr(), slot, rows.nbytes)],
            notify=number.to_bytes(NUMBER_BYTES, "big"),
        ).wait()
