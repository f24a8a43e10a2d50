"""``TensorParallelism``, ``ParallelAxis`` and ``ReadTarget``: how a tensor is distributed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mooncake_kernels.errors import InvalidArgument

from ..codes import as_natural
from .codes import check_list
from .tensor_header import MAX_RANKS, Shard

_OTHERS = {"dp": None, "ep": "expert_id", "pp": "stage_id"}  # axes, and what each must have


@dataclass(slots=True, eq=False)
class ParallelAxis:
    """A rank of one kind of parallelism. Mooncake's names and defaults; checked when used.

    Attributes:
        kind: ``tp``, ``dp``, ``ep`` or ``pp``.
        rank: below ``size``.
        split_dim: of ``tp``: the axis along which tensors are cut.
        expert_id: of ``ep``.
        stage_id: of ``pp``.
    """

    kind: str = ""
    rank: int = 0
    size: int = 1
    split_dim: int | None = None
    expert_id: int | None = None
    stage_id: int | None = None


@dataclass(slots=True, eq=False)
class TensorParallelism:
    """The place of a shard: its axes, one of each kind at most."""

    axes: list[ParallelAxis] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ReadTarget:
    """What is read of a tensor.

    Attributes:
        mode: ``as_stored``: the value of the key; ``full``: the whole tensor; ``shard``: the shard
            of ``parallelism``.
        parallelism: whose shards are read, except by ``as_stored``.
    """

    mode: str = "as_stored"
    parallelism: TensorParallelism | None = None


class Layout(NamedTuple):
    """A checked ``TensorParallelism``: the end of names for its other axes, and its shard."""

    suffix: str
    tp: Shard | None


class Target(NamedTuple):
    """A checked ``ReadTarget``: the part that is read; ``is_stored``: only the value itself."""

    suffix: str
    part: Shard | None
    is_stored: bool


def layout_of(parallelism: Any) -> Layout:
    """Check a ``TensorParallelism``, or anything with its attributes.

    Raises:
        InvalidArgument: it is not one, or its axes are wrong.
    """
    (axes,) = _attributes("parallelism", parallelism, ("axes",))
    check_list("parallelism.axes", axes)
    shard: Shard | None = None
    suffixes: dict[str, str] = {}
    kinds = [*map(_kind_of, axes)]
    if not kinds or len({*kinds}) != len(kinds):
        raise InvalidArgument(f"parallelism must have axes, one of each kind, got {kinds}")
    for kind, axis in zip(kinds, axes, strict=True):
        if kind == "tp":
            shard = shard_of("a tp axis", axis)
        else:
            suffixes[kind] = _suffix_of(kind, axis)
    return Layout("".join(suffixes[kind] for kind in _OTHERS if kind in suffixes), shard)


def shard_of(argument: str, place: Any) -> Shard:
    """Check an object with ``rank``, ``size`` and ``split_dim``."""
    rank, size, split_dim = _attributes(argument, place, ("rank", "size", "split_dim"))
    return Shard(*_rank_of(argument, rank, size), as_natural(f"split_dim of {argument}", split_dim))


def target_of(target: Any) -> Target:
    """Check a ``ReadTarget``, or anything with its attributes; None: the value of the key.

    Raises:
        InvalidArgument: it is not one, or has a parallelism that it must not have, or lacks one.
    """
    mode, parallelism = (
        ("as_stored", None)
        if target is None
        else _attributes("target", target, ("mode", "parallelism"))
    )
    mode = mode.lower() if isinstance(mode, str) else mode
    if mode not in ("as_stored", "shard", "full"):
        raise InvalidArgument(f"target.mode must be as_stored, shard or full, got {mode!r:.80}")
    if (mode == "as_stored") > (parallelism is None) or (mode == "shard") > (
        parallelism is not None
    ):
        raise InvalidArgument(
            f"target.parallelism must be None for as_stored and given for shard, "
            f"got {parallelism!r:.80} for {mode}"
        )
    layout = Layout("", None) if parallelism is None else layout_of(parallelism)
    part = layout.tp if mode == "shard" else None
    return Target(layout.suffix, part, mode == "as_stored")


def _kind_of(axis: Any) -> str:
    (kind,) = _attributes("an axis", axis, ("kind",))
    if not isinstance(kind, str) or kind.lower() not in ("tp", *_OTHERS):
        raise InvalidArgument(f"an axis must be tp, dp, ep or pp, got {kind!r:.80}")
    return kind.lower()


def _suffix_of(kind: str, axis: Any) -> str:
    names = "rank", "size", "split_dim", "expert_id", "stage_id"
    rank, size, split_dim, expert_id, stage_id = _attributes("an axis", axis, names)
    if split_dim is not None:
        raise InvalidArgument(f"split_dim must be None on a {kind} axis, got {split_dim!r:.80}")
    rank, size = _rank_of(f"a {kind} axis", rank, size)
    suffix = f"__{kind}_{rank}of{size}"
    for name, short, value in (("expert_id", "eid", expert_id), ("stage_id", "sid", stage_id)):
        if value is not None or _OTHERS[kind] == name:
            suffix += f"_{short}{as_natural(f'{name} of a {kind} axis', value)}"
    return suffix


def _rank_of(argument: str, rank: Any, size: Any) -> tuple[int, int]:
    size = as_natural(f"size of {argument}", size, minimum=1)
    rank = as_natural(f"rank of {argument}", rank)
    if rank >= size or size > MAX_RANKS:
        raise InvalidArgument(
            f"rank of {argument} must be below its size, at most {MAX_RANKS}, got {rank} of {size}"
        )
    return rank, size


def _attributes(argument: str, value: Any, names: Sequence[str]) -> list[Any]:
    try:
        return [getattr(value, name) for name in names]
    except AttributeError:
        raise InvalidArgument(
            f"{argument} must have {', '.join(names)}, got {value!r:.80}"
        ) from None
