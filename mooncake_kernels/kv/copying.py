"""What a ``CopyPlan`` and a ``Packer`` copy, checked once, and the runs that do it."""

from collections.abc import Sequence

from .._tensors import have_addresses
from ..bad_ids import BadIds
from ..errors import InvalidArgument
from ..transforms import Fp8, Rope
from .copy_jobs import CopyJobs, check_checksum, check_transforms
from .copy_parts import (
    CopyPart,
    Layers,
    as_layers,
    as_views,
    block_size_of,
    check_layers_alike,
)
from .copy_runs import CopyRuns
from .overlap import Apart
from .view import KVView


class Copying:
    """A copy between two caches. The arguments and their errors are those of a ``CopyPlan``.

    Args:
        bad: where kernels report bad ids of blocks; None for an object of its own.

    Attributes:
        parts: the views that are copied.
        device: of the cache.
        blocks, slots: the runs over blocks, and those token by token.
        is_plain: whether a run moves the bytes of one view, and needs no other check than that of
            its ids.
    """

    def __init__(
        self,
        src: KVView | Sequence[KVView],
        dst: KVView | Sequence[KVView],
        *,
        layers: Layers = None,
        src_heads: slice | None = None,
        dst_heads: slice | None = None,
        convert: Fp8 | None = None,
        rope: Rope | None = None,
        checksum: bool = False,
        bad: BadIds | None = None,
    ):
        check_transforms(convert, rope)
        check_checksum("CopyPlan", checksum)
        layers = as_layers("CopyPlan", layers)
        src_views, dst_views = as_views("src", src), as_views("dst", dst)
        if len(src_views) != len(dst_views):
            raise InvalidArgument(
                f"CopyPlan: dst must have a view for each of src's {len(src_views)}, "
                f"got {len(dst_views)}"
            )
        several = len(src_views) > 1
        if several and layers is not None:
            check_layers_alike("CopyPlan", src_views)
            check_layers_alike("CopyPlan", dst_views)
        pairs = zip(src_views, dst_views, strict=True)
        self.parts = [
            CopyPart(
                *(*views, layers, src_heads, dst_heads, convert),
                rope if index == 0 else None,
                several=several,
            )
            for index, views in enumerate(pairs)
        ]
        if convert is not None and not any(part.converts for part in self.parts):
            raise InvalidArgument(
                "CopyPlan: convert must be None where dst has src's dtype, got Fp8 for "
                f"{src_views[0].dtype}"
            )
        sizes = block_size_of(src_views), block_size_of(dst_views)
        for view in src_views + dst_views:
            if not view.has_tokens and sizes[0] != sizes[1]:
                raise InvalidArgument(
                    f"CopyPlan: dst must have src's block_size {sizes[0]} to take "
                    f"views without a 'token' axis, got {sizes[1]}"
                )
        jobs = CopyJobs(self.parts, rope is not None, checksum)
        self.device = jobs.device
        apart = Apart(self.parts)
        first_src, first_dst = src_views[0], dst_views[0]
        num_blocks = (first_src.num_blocks, first_dst.num_blocks)
        self.blocks = CopyRuns(
            *("CopyPlan.run", ("src_blocks", "dst_blocks"), jobs, apart, num_blocks, sizes),
            by_slot=False,
            bad=bad,
        )
        num_slots = (num_blocks[0] * sizes[0], num_blocks[1] * sizes[1])
        self.slots = CopyRuns(
            *("CopyPlan.run_slots", ("src_slots", "dst_slots"), jobs, apart, num_slots, (1, 1)),
            by_slot=True,
        )
        self.is_plain = not (several or jobs.by_row or apart.is_needed) and have_addresses(
            [*first_src.tensors, *first_dst.tensors]
        )
