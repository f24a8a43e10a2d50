"""One creditor as its debtor sees it: the buffers, and the lease."""

import time
from collections.abc import Sequence

from mooncake_kernels.closing import Closing
from mooncake_kernels.transfer import Ticket, TransferEngine

from .buffers import RequestBuffer, ResultBuffer
from .geometry import Geometry
from .messages import MAX_NUMBERS, Renew, Reserved
from .peers import Peers


class Creditor(Closing):
    """Buffers for one creditor, and until when it surely keeps what is borrowed there.

    A debtor whose lease may have ended must not write: the creditor's buffer may be another's.

    Attributes:
        requests: what is sent.
        results: what comes back.
        requests_address: of the creditor's buffer, once something was reserved.
        num_staged: blocks that are moved at a time.
        lease_s: how long a loan lasts that is not renewed.
    """

    def __init__(self, transfer: TransferEngine, geometry: Geometry, num_staged: int):
        self.requests = RequestBuffer(transfer, geometry, num_staged, is_in=False)
        try:
            self.results = ResultBuffer(transfer, geometry, is_in=True)
        except BaseException:
            self.requests.close()
            raise
        self.requests_address, self.num_staged, self.lease_s = 0, num_staged, 0.0
        self._renewed_s = 0.0  # when the last message was sent that has surely renewed the loans
        self._renewal: tuple[float, Ticket] | None = None  # under way: when it was sent

    @property
    def is_leased(self) -> bool:
        """Tell whether the creditor surely still has the loans."""
        return time.monotonic() <= self._renewed_s + self.lease_s

    def accept(self, reserved: Reserved, sent_s: float) -> None:
        """Begin a loan that was asked for at ``sent_s``."""
        self.requests_address = reserved.requests_address
        self.num_staged = min(self.requests.staged.shape[0], max(1, reserved.num_staged))
        self.lease_s, self._renewed_s = reserved.lease_ms / 1000, sent_s

    def renew(self, peers: Peers, name: str, request_number: int, loans: Sequence[int]) -> None:
        """Renew loans, without waiting, unless the last renewal is still under way.

        Raises:
            TransferError: it, or the last, did not arrive.
        """
        if self._renewal is not None:
            sent_s, ticket = self._renewal
            if not ticket.done:
                return
            self._renewal = None
            ticket.wait()
            self._renewed_s = max(self._renewed_s, sent_s)
        sent_s = time.monotonic()
        for start in range(0, len(loans), MAX_NUMBERS):
            renew = Renew(request_number, loans[start : start + MAX_NUMBERS])
            self._renewal = sent_s, peers.send(name, renew)

    def close(self) -> None:
        """Deregister the buffers: nothing that the creditor still sends lands."""
        self.requests.close()
        self.results.close()
