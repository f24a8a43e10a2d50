"""A caller's constraints on the choice of NICs."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..errors import InvalidArgument
from .model import LINK_LAYERS, PathKind


@dataclass(frozen=True)
class NicPolicy:
    """Which NICs may be chosen. The machine decides whatever is left out.

    Attributes:
        allow: only these, even if they look like management NICs; None: all.
        deny: never these.
        affinity: ``{"cuda:0": ["mlx5_0"]}``: NICs that come first for a location, whatever their
            path; for machines whose files do not show it.
        link_layers: only ports of these, "InfiniBand" or "Ethernet"; None: of any.
        max_path: none that is farther away.
        limit: at most this many, the best ones; None: all that may be chosen.
        min_speed_ratio: a port slower than this share of the fastest counts as a management NIC.
        allow_management: also choose NICs that look like management NICs.
        allow_down: also choose ports that are not active, after those that are.
    """

    allow: Collection[str] | None = None
    deny: Collection[str] = ()
    affinity: Mapping[str, Collection[str]] | tuple[tuple[str, tuple[str, ...]], ...] = ()
    link_layers: Collection[str] | None = None
    max_path: PathKind = PathKind.SYS
    limit: int | None = None
    min_speed_ratio: float = 0.5
    allow_management: bool = False
    allow_down: bool = False

    def __post_init__(self) -> None:
        """Check every field, and make it hashable."""
        for name in ("allow", "deny", "link_layers"):
            value = getattr(self, name)
            if value is not None or name == "deny":
                self._set(name, _names(name, value))
        for layer in self.link_layers or ():
            if layer not in LINK_LAYERS[:-1]:
                self._refuse("link_layers", f"of {LINK_LAYERS[:-1]}", layer)
        self._set("affinity", _affinity(self.affinity))
        if not isinstance(self.max_path, int) or self.max_path not in list(PathKind):
            self._refuse("max_path", "a PathKind", self.max_path)
        self._set("max_path", PathKind(self.max_path))
        if self.limit is not None and (type(self.limit) is not int or self.limit < 1):
            self._refuse("limit", "an integer >= 1 or None", self.limit)
        ratio = self.min_speed_ratio
        if type(ratio) not in (int, float) or not (math.isfinite(ratio) and 0 <= ratio <= 1):
            self._refuse("min_speed_ratio", "a number in [0, 1]", ratio)

    def declared(self, location: str) -> tuple[str, ...]:
        """Return the NICs that ``affinity`` assigns to a location."""
        return tuple(dict(self.affinity).get(location, ()))

    def names(self) -> list[tuple[str, str]]:
        """Return (field, NIC) for every NIC named in the policy."""
        named = [("allow", name) for name in self.allow or ()]
        named += [("deny", name) for name in self.deny]
        return named + [
            ("affinity", nic) for _, nics in dict(self.affinity).items() for nic in nics
        ]

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen, but still being made

    def _refuse(self, name: str, what: str, value: object) -> None:
        raise InvalidArgument(f"NicPolicy: {name} must be {what}, got {value!r}")


def _names(field: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Collection):
        raise InvalidArgument(f"NicPolicy: {field} must be a list of names, got {value!r}")
    return tuple(str(name) for name in value)


def _affinity(value: object) -> tuple[tuple[str, tuple[str, ...]], ...]:
    try:
        pairs = dict(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise InvalidArgument(
            f'NicPolicy: affinity must be like {{"cuda:0": ["mlx5_0"]}}, got {value!r}'
        ) from None
    return tuple((str(place), _names("affinity", pairs[place])) for place in sorted(pairs, key=str))
