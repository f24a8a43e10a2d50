"""The choice among equal NICs during transfers, by the bytes each has in flight."""

from collections.abc import Mapping

from .. import _host
from .._arguments import as_instance, as_integer
from ..errors import InvalidArgument
from .choose import Choice
from .model import Gpu, Nic, System

_MAX_BYTES = 1 << 53  # per transfer, so that sums do not overflow


class Balancer:
    """Gives each transfer the NIC that will finish it first.

    Equivalent to::

        tier = the first tier of location in which a NIC is alive
        nic = min(tier, key=lambda nic: (in_flight[nic] + num_bytes) / gb_per_s[nic])
        in_flight[nic] += num_bytes

    where ties go to the first in the order of ``choose_nics``. Bytes in flight are counted per
    NIC, whichever locations use it. Thread-safe, without a lock: two threads that pick at the
    same moment may not see each other, which affects only the balance. Made by
    ``Topology.balancer``.
    """

    def __init__(self, system: System, choices: Mapping[str, Choice], limit: int | None):
        self._nics = system.nics
        index = {nic.name: i for i, nic in enumerate(self._nics)}
        self._index = index
        self._locations = {location: i for i, location in enumerate(choices)}
        speeds = [nic.gbit_per_s or 0.0 for nic in self._nics]
        unknown = max(speeds, default=0.0) or 8.0  # as fast as the fastest
        tiers = []
        for choice in choices.values():
            kept, left = [], len(index) if limit is None else limit
            for tier in choice.tiers:
                kept.append([index[one.nic.name] for one in tier[:left]])
                left -= len(kept[-1])
            tiers.append([tier for tier in kept if tier])
        self.native = _host.NicBalancer([(speed or unknown) / 8 for speed in speeds], tiers)

    def pick(self, location: str | Gpu, num_bytes: int) -> Nic | None:
        """Return the NIC for a transfer, whose bytes count as in flight; None if none is alive.

        Raises:
            InvalidArgument: there is no such location.
        """
        index = self._locations.get(str(location))
        if index is None:
            known = ", ".join(self._locations)
            raise InvalidArgument(f"pick: location must be one of {known}, got {location!r}")
        num_bytes = as_integer("pick", "num_bytes", num_bytes, 0, _MAX_BYTES)
        nic = self.native.pick(index, num_bytes)
        return None if nic < 0 else self._nics[nic]

    def done(self, nic: Nic | str, num_bytes: int) -> None:
        """Undo what ``pick`` has counted, whether the transfer succeeded or failed."""
        num_bytes = as_integer("done", "num_bytes", num_bytes, 0, _MAX_BYTES)
        self.native.done(self._find("done", nic), num_bytes)

    def set_alive(self, nic: Nic | str, alive: bool) -> None:
        """Set whether a NIC may be picked: not if its port went down."""
        as_instance("set_alive", "alive", alive, bool, "True or False")
        self.native.set_alive(self._find("set_alive", nic), alive)

    def in_flight(self, nic: Nic | str) -> int:
        """Return the bytes that a NIC has in flight."""
        return self.native.in_flight(self._find("in_flight", nic))

    def _find(self, op: str, nic: Nic | str) -> int:
        index = self._index.get(str(nic))
        if index is None:
            known = ", ".join(self._index) or "none"
            raise InvalidArgument(f"{op}: nic must be one of this machine ({known}), got {nic!r}")
        return index
