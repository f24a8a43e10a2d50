"""How redis-py reads replies here. Imported only where redis-py is known to be installed."""

from redis._parsers import _RESP2Parser


class Parser(_RESP2Parser):
    """redis-py's own in Python, on a ``BoundedSocket``.

    Not hiredis's: it reserves memory for as many elements as a reply claims to have, and returns it
    while no other thread can run, which takes 1.7 s for 1e9 of them.
    """

    def can_read(self, timeout: float = 0) -> bool:
        """Whether there is anything to read at once.

        redis-py's changes the socket's timeout, and raises and catches an exception if there is
        nothing, which is the usual case: it takes 7 % of a cluster store's ``exists``.
        """
        buffer, connected = self._buffer, self._sock
        if buffer and connected and not buffer.unread_bytes() and not connected.has_input():
            return False
        return super().can_read(timeout)
