"""``ReplicateConfig``: how an object is kept."""

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import Retention

from ..codes import as_flag, as_natural
from .codes import warn_once


class SoftPinAction(enum.IntEnum):
    """Effect of a put on the soft pin of its object."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(enum.IntEnum):
    """Type of an object, for Mooncake's statistics."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


@dataclass(slots=True)
class ReplicateConfig:
    """How an object is kept. Mooncake's names and defaults.

    Attributes:
        replica_num: copies, at least 1; limited by the number of hosts.
        with_hard_pin: never evict it.
        soft_pin_action: ``ENABLE``: evict it after all others.
        nof_replica_num, dfs_replica_num: copies on remote SSDs and in file systems: 0.
        preferred_segment, preferred_segments: ``get_hostname`` of those that take the copies, the
            best first; the second is ignored if the first is set. On one host both are ignored.
        prefer_alloc_in_same_node: values of a batch on one node, as they are without it, too.
        soft_pin_ttl_ms, preferred_nof_segments, group_ids: ignored, with a warning.
        data_type: ignored.
    """

    replica_num: int = 1
    with_hard_pin: bool = False
    soft_pin_action: SoftPinAction = SoftPinAction.PRESERVE
    soft_pin_ttl_ms: int | None = None
    nof_replica_num: int = 0
    dfs_replica_num: int = 0
    preferred_segment: str = ""
    preferred_segments: list[str] = field(default_factory=list)
    preferred_nof_segments: list[str] = field(default_factory=list)
    prefer_alloc_in_same_node: bool = False
    data_type: ObjectDataType = ObjectDataType.UNKNOWN
    group_ids: list[str] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise a ``TypeError`` for a soft pin of a wrong type, as Mooncake does."""
        if name == "soft_pin_action" and not isinstance(value, SoftPinAction):
            raise TypeError(f"{name} must be a SoftPinAction, got {value!r:.80}")
        if name == "soft_pin_ttl_ms" and value is not None:
            try:
                value = as_natural(name, value)
            except InvalidArgument as error:
                raise TypeError(str(error)) from None
        object.__setattr__(self, name, value)


class PutOptions(NamedTuple):
    """How long pools keep an object, how many pools do, and which take it first."""

    retention: Retention = "normal"
    num_copies: int = 1
    preferred: tuple[str, ...] = ()


_USUAL = PutOptions()


def put_options(config: ReplicateConfig | None) -> PutOptions:
    """How an object with this configuration is kept.

    Raises:
        InvalidArgument: it is not a configuration, or asks for something unsupported.
    """
    if config is None:
        return _USUAL
    if not isinstance(config, ReplicateConfig):
        raise InvalidArgument(f"config must be a ReplicateConfig, got {config!r:.80}")
    num_copies = as_natural("config.replica_num", config.replica_num, minimum=1)
    for name in ("nof_replica_num", "dfs_replica_num"):
        if as_natural(f"config.{name}", number := getattr(config, name)):
            raise InvalidArgument(
                f"config.{name} must be 0, for objects are in memory, got {number!r:.80}"
            )
    is_hard = as_flag("config.with_hard_pin", config.with_hard_pin)
    retention: Retention = "normal"
    if is_hard:
        retention = "hard"
    elif config.soft_pin_action == SoftPinAction.ENABLE:
        retention = "soft"
    for name in ("soft_pin_ttl_ms", "preferred_nof_segments", "group_ids"):
        if getattr(config, name):
            warn_once(f"config.{name} is ignored")
    return PutOptions(retention, num_copies, _preferred_in(config))


def _preferred_in(config: ReplicateConfig) -> tuple[str, ...]:
    """Names of the segments that should take an object, the best first."""
    one, several = config.preferred_segment, config.preferred_segments
    if not isinstance(one, str):
        raise InvalidArgument(f"config.preferred_segment must be a string, got {one!r:.80}")
    if not isinstance(several, list | tuple) or not all(isinstance(s, str) for s in several):
        raise InvalidArgument(
            f"config.preferred_segments must be a list of strings, got {several!r:.80}"
        )
    return (one,) if one else tuple(several)
