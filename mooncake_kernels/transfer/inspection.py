"""What a ``TransferEngine`` reports: counters, the path bytes take, and peers' regions."""

from typing import Any

from .. import _host
from .arguments import as_deadline
from .handles import Peer, Region
from .paths import PathChoice, explain
from .regions import RemoteRegion, regions_of
from .stats import rows_of, table_of

MAX_QUESTION_S = 5.0  # default for calls that move nothing: Ctrl-C waits for them


class Inspection:
    """The calls of ``TransferEngine`` that move no data."""

    _engine: _host.TransferEngine
    _regions: set[Region]

    def rejections(self) -> dict[str, int]:
        """Return how many connections this engine has rejected since it was created, by cause.

        Returns:
            Like ``{"the peer has no secret": 3}``. Each is an incoming connection that ended before
            its first request; up to 64 causes are distinguished.
        """
        return self._engine.rejections()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return counters of this engine's requests to its peers, since it was created.

        Returns:
            ``{"peers": {name: counters}, "transports": {name: counters}, "paths": {peer's name:
            {path: counters of it}}}``.

            Counters are ``num_bytes_read`` and ``num_bytes_written`` (confirmed bytes),
            ``num_requests`` (finished ones), ``num_errors`` (those that failed or were cancelled),
            ``num_retries`` (parts of requests that were retried), ``num_in_flight`` and
            ``num_bytes_in_flight`` (unfinished requests, and all of their bytes), ``latency_us``
            (``{bound: requests}``: requests that took less than the bound in microseconds, from
            the call on, and no less than the previous bound; the last bound is infinite) and
            ``latency_total_us`` (their sum).

            A path is a connection, like ``tcp:0``, a NIC, or ``rpc``: requests about objects,
            over their own connections. Its counters are ``num_bytes_read``,
            ``num_bytes_written``, ``num_pieces`` (parts of requests it has moved), ``num_retries``,
            ``num_reconnects`` and ``num_failures`` (times that it was lost or could not be
            connected).

            Peers with the same name count as one, also when opened again. Closed peers stay; beyond
            1024 of them, the one closed the longest ago is merged into ``other peers``.
        """
        return table_of(rows_of(self._engine))

    def explain_path(
        self,
        local: Region | int,
        peer: Peer,
        remote: int,
        num_bytes: int = 1,
        *,
        deadline_s: float | None = None,
    ) -> PathChoice:
        """Say which path bytes between local memory and a peer's take, and why.

        It tests the path, over another connection of the kind the peer has: it asks the peer
        whether the range may be written and read, and tries to reach its memory. Nothing is
        changed. What is down of the connection that requests use is reported as well, as of its
        latest request.

        Args:
            local: a region of this engine, or an address inside one.
            peer: from ``open``.
            remote: an address in the peer's memory.
            num_bytes: length of the range at either end.
            deadline_s: seconds for all of it; None: the setting ``deadline_s``, but at most 5.

        Returns:
            A ``PathChoice``; ``str()`` of it describes all of it in words.

        Raises:
            InvalidArgument: the local range is not inside one registered region.
            TransferError: the peer cannot be asked: it is gone, was restarted, or is too slow.
        """
        seconds = self._as_question("explain_path", peer, deadline_s)
        return explain(self._engine, self._regions, local, peer, remote, num_bytes, seconds)

    def regions(self, peer: Peer, *, deadline_s: float | None = None) -> list[RemoteRegion]:
        """Ask a peer which memory it has registered, over a separate connection.

        A peer answers engines of its process, and of the same user on its machine; others only if
        both sides have a secret.

        Args:
            peer: from ``open``.
            deadline_s: seconds for all of it; None: the setting ``deadline_s``, but at most 5.

        Returns:
            Its current regions, in the order of registration, at most 65,536.

        Raises:
            TransferError: the peer refuses, is gone, was restarted, or is too slow.
        """
        return regions_of(self._engine, peer, self._as_question("regions", peer, deadline_s))

    def _as_question(self, op: str, peer: Peer, deadline_s: float | None) -> float:
        self._check_peer(op, peer)
        seconds = as_deadline(op, deadline_s)
        return min(seconds, MAX_QUESTION_S) if deadline_s is None else seconds

    def _check_peer(self, op: str, peer: Peer) -> None:
        raise NotImplementedError
