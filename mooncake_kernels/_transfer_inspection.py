"""What a ``TransferEngine`` tells: what it has counted, which way bytes go, what peers have."""

from typing import Any

from . import _host
from ._transfer_arguments import as_deadline
from ._transfer_handles import Peer, Region
from ._transfer_paths import PathChoice, explain
from ._transfer_regions import RemoteRegion, regions_of
from ._transfer_stats import rows_of, table_of

MAX_QUESTION_S = 5.0  # unless the caller says otherwise: nothing is moved, and Ctrl-C has to wait


class Inspection:
    """The calls of ``TransferEngine`` that move nothing."""

    _engine: _host.TransferEngine
    _regions: set[Region]

    def rejections(self) -> dict[str, int]:
        """Return how many connections this engine has turned away since it was made, by cause.

        Returns:
            Like ``{"the peer has no secret": 3}``. Each is a connection that came here and ended
            before its first request; 64 causes are told apart.
        """
        return self._engine.rejections()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return what this engine has asked of its peers, since it was made.

        Returns:
            ``{"peers": {name: counters}, "transports": {name: counters}, "paths": {peer's name:
            {path: counters of it}}}``.

            Counters are ``num_bytes_read`` and ``num_bytes_written`` (confirmed ones),
            ``num_requests`` (those that are over), ``num_errors`` (those of them that failed or
            were cancelled), ``num_retries`` (parts of requests that were tried again),
            ``num_in_flight`` and ``num_bytes_in_flight`` (requests that are not over, and all of
            their bytes), ``latency_us`` (``{bound: requests}``: those that took less than so many
            microseconds, from the call on, and no less than the bound before; the last is
            infinite) and ``latency_total_us`` (what they took in sum).

            A path is a connection, like ``tcp:0``, what goes by one NIC, or ``questions``: those
            about objects, over connections of their own. Its counters are
            ``num_bytes_read``, ``num_bytes_written``, ``num_pieces`` (parts of requests that it
            has moved), ``num_retries``, ``num_reconnects`` and ``num_failures`` (times that it was
            lost, or could not be connected).

            Peers of one name are one, also when they are opened again. Those that are closed stay,
            but beyond 1024 of them the one that was closed the longest ago becomes a part of
            ``other peers``.
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
        """Say which way bytes between local memory and a peer's go, and why.

        It is tried, by another connection like those that the peer has: the peer is asked whether
        it lets the range be written and read, and its memory is reached for. None is changed.

        Args:
            local: a region of this engine, or an address inside one.
            peer: from ``open``.
            remote: an address in the peer's memory.
            num_bytes: length of the range at either end.
            deadline_s: seconds for all of it; None: the setting ``deadline_s``, but at most 5.

        Returns:
            A ``PathChoice``; as text, it says all of it in words.

        Raises:
            InvalidArgument: the local range is not inside one registered region.
            TransferError: the peer cannot be asked: it is gone, was restarted, or is too slow.
        """
        seconds = self._as_question("explain_path", peer, deadline_s)
        return explain(self._engine, self._regions, local, peer, remote, num_bytes, seconds)

    def regions(self, peer: Peer, *, deadline_s: float | None = None) -> list[RemoteRegion]:
        """Ask a peer which memory it has registered, over a connection of its own.

        A peer tells that within a process, and within a machine to the same user; to others only
        if both have a secret.

        Args:
            peer: from ``open``.
            deadline_s: seconds for all of it; None: the setting ``deadline_s``, but at most 5.

        Returns:
            What it has now, in the order of registration, and no more than 65,536.

        Raises:
            TransferError: it does not tell, is gone, was restarted, or is too slow.
        """
        return regions_of(self._engine, peer, self._as_question("regions", peer, deadline_s))

    def _as_question(self, op: str, peer: Peer, deadline_s: float | None) -> float:
        self._check_peer(op, peer)
        seconds = as_deadline(op, deadline_s)
        return min(seconds, MAX_QUESTION_S) if deadline_s is None else seconds

    def _check_peer(self, op: str, peer: Peer) -> None:
        raise NotImplementedError
