"""CopyPlan: copy blocks of one cache into another. Public as ``mk.CopyPlan``."""

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import InvalidArgument
from ..transforms import FP8, Fp8, Rope
from .copy_parts import Layers
from .copying import Copying
from .execute import BlockIds, Engine
from .pack_header import PackHeader
from .pack_overlap import Held
from .packing import Packer, Side
from .view import KVView


class CopyPlan:
    """Copy blocks of one cache into blocks of another, of any axis order and block size.

    Equivalent to::

        for src_block, dst_block in zip(src_blocks, dst_blocks):
            if src_block == -1 or dst_block == -1:
                continue
            for layer in layers:
                for kv in range(num_kv):
                    dst[layer, kv, dst_block, dst_heads] = src[layer, kv, src_block, src_heads]

    If the block sizes differ, the tokens of src's blocks go in order to those of dst's: with 16
    tokens in a block of src and 64 in one of dst, four blocks fill one.

    A cache may have several views that share its block ids: besides the keys and values,
    quantization scales, an indexer's keys or the state of an SSM. ``dst`` then has a view for each
    of src's, and they are copied in turn. A view without a ``token`` axis holds one entry per
    block, and can be copied only if both sides have the same block size.

    Args:
        src: what to read: a view, or a list of views with equally many blocks.
        dst: what to write: likewise. Each view has the same head dimension and number of kv as
            src's and, except with ``convert``, its dtype. Both sides are on one device; or one is
            on a GPU and the other in pinned host memory (``pin_memory()``, or registered with
            CUDA), which the GPU then reads or writes. It may share memory with ``src``; then no
            run may read what it writes. This is checked (for ids on a GPU, on the GPU) and refused
            like a bad id. Compiled code does not check it. The contents of memory that two views of
            dst share are undefined; this is not checked.
        layers: which layers to copy: a slice or a list of numbers, the same on both sides, or of
            pairs (layer of src, layer of dst), as between pipeline stages. None for all; both sides
            must then have equally many. With several views, those of one side must have equally
            many if ``layers`` is given.
        src_heads, dst_heads: a slice of the heads of each side, equally long, to copy a cache of
            one tensor-parallel size into one of another (see ``shard_heads``). None for all. With
            several views, it applies to those that have a ``head`` axis.
        convert: ``Fp8(scale)`` where one side is fp8 and the other is not.
        rope: ``Rope(...)`` to rotate keys by ``dst_positions - src_positions``, which each run is
            then given. With several views, it applies to the first one.
        checksum: whether a run returns the checksums of the blocks it has written, and accepts
            those of the blocks it reads (see ``checksum_blocks``).

    With any of the last three a copy goes row by row, which is slower than moving bytes.

    Raises:
        InvalidArgument: the two sides do not match; the message names the argument.
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
    ):
        self.src, self.dst = src, dst
        self._copying = Copying(
            *(src, dst),
            layers=layers,
            src_heads=src_heads,
            dst_heads=dst_heads,
            convert=convert,
            rope=rope,
            checksum=checksum,
        )
        self._transforms = (convert, rope, checksum)
        self._packers: tuple[Packer, Packer] | None = None

    def run(
        self,
        src_blocks: BlockIds,
        dst_blocks: BlockIds,
        *,
        layers: Layers = None,
        src_positions: BlockIds | None = None,
        dst_positions: BlockIds | None = None,
        checksums: torch.Tensor | None = None,
        max_sms: int | None = None,
        engine: Engine = "auto",
    ) -> torch.Tensor | None:
        """Copy block ``src_blocks[i]`` of src into block ``dst_blocks[i]`` of dst.

        On CUDA the copy is queued on the current stream and may not have run yet. Ids on the CPU
        are checked and moved to the device first; pass them on the device to avoid that. Do not
        change ids in pinned memory until the stream has reached the copy. A CUDA graph that
        captured it must not outlive the plan, to which its kernels report.

        Args:
            src_blocks: ``[n]``, int32 or int64. Each in ``[0, src.num_blocks)``, or -1 to skip its
                tokens. Repeats are allowed.
            dst_blocks: ``[m]``, likewise for dst. The contents of a block that is named twice are
                undefined, possibly a mixture of its sources; this is not checked. With equal block
                sizes m = n. Otherwise the blocks of both sides hold the same number of tokens,
                except for a part of either side's last block, which is not read or is unchanged.
            layers: copy only these of the plan's layers, by their numbers in src (a slice selects
                those of the plan that are in it); None for all of them.
            src_positions: ``[n]``, int32 or int64: of the first token of each block of src.
                Required if the plan has a ``rope``, otherwise not allowed.
            dst_positions: ``[m]``, likewise: the positions that dst's blocks are to have.
            checksums: int64 ``[n]``: the expected checksums of src's blocks, over what the plan
                copies of them: as returned by the run that wrote them, or by ``checksum_blocks``.
                The blocks are read an extra time for it, before anything is written.
            max_sms: use at most this many multiprocessors; None for all. Ignored on the CPU, not
                supported by engine "triton".
            engine: "host" (CPU tensors); on CUDA, or between it and pinned host memory: "cuda", a
                kernel; "tma", a kernel of bulk copies for GPUs of compute capability 9.0 and runs
                at multiples of 16 bytes, which needs few multiprocessors for large runs;
                "copy_engine", the GPU's own, by ``cuMemcpyBatchAsync``, which takes 0.5 us of the
                caller's time for each run that could not be merged with the previous one, and
                cannot run on the default stream; "two_hop", between a GPU and the host: a kernel
                gathers into up to 64 MiB of the GPU's memory, and a few large copies move that to
                the host, or the reverse; it needs a contiguous host side and equal block sizes;
                "triton" (CUDA tensors; also on the CPU in its interpreter); "reference".
                "auto" is host on the CPU. On a GPU it is the fastest supported engine measured by
                `python -m mooncake_kernels calibrate`, or cuda if that was not run. A named engine
                never falls back. For copy_engine and two_hop the ids must be on the CPU, where they
                are read, and checked before anything is queued; these two do not work in compiled
                code and CUDA graphs.

        Returns:
            If the plan was made with ``checksum``, int64 ``[m]`` on the device of the caches: the
            checksum of what was written to each block of dst; 0 for a hole. Else None.

        Raises:
            ChecksumError: a block of src does not match ``checksums``. On the CPU nothing has been
                copied then; on CUDA this block is skipped, and the error is raised as for ids.
            InvalidArgument: an id is out of range, or an argument is not as above. Nothing has been
                copied then, unless the ids are on a GPU, or pinned ones that a graph captures:
                then, and in Triton's interpreter, the kernel checks them, pairs with a bad id are
                skipped, and the error is raised by the next ``run`` that finds it there, or by
                ``check``. Under torch.compile it is a plain ValueError.
            Unavailable: the named engine is not available.
            CudaError: CUDA refused the launch.
        """
        return self._copying.blocks.run(
            src_blocks, dst_blocks, layers, src_positions, dst_positions, checksums, max_sms, engine
        )

    def run_slots(
        self,
        src_slots: BlockIds,
        dst_slots: BlockIds,
        *,
        layers: Layers = None,
        src_positions: BlockIds | None = None,
        dst_positions: BlockIds | None = None,
        checksums: torch.Tensor | None = None,
        max_sms: int | None = None,
        engine: Engine = "auto",
    ) -> torch.Tensor | None:
        """Copy token by token: slot ``src_slots[i]`` of src into slot ``dst_slots[i]`` of dst.

        A slot is the place of one token, ``block * block_size + offset``, with its side's block
        size. Equivalent to::

            for src_slot, dst_slot in zip(src_slots, dst_slots):
                if src_slot == -1 or dst_slot == -1:
                    continue
                src_block, src_token = divmod(src_slot, src.block_size)
                dst_block, dst_token = divmod(dst_slot, dst.block_size)
                for layer in layers:
                    for kv in range(num_kv):
                        dst[layer, kv, dst_block, dst_heads, dst_token] = (
                            src[layer, kv, src_block, src_heads, src_token])

        For whole blocks ``run`` is faster: its contiguous runs are longer.

        Args:
            src_slots: ``[n]``, int32 or int64. Each in ``[0, src.num_blocks * src.block_size)``,
                or -1 to skip the pair. Repeats are allowed.
            dst_slots: ``[n]``, likewise for dst. The contents of a slot that is named twice are
                undefined; this is not checked.
            layers: as for ``run``.
            src_positions: as for ``run``, of each slot's token.
            dst_positions: likewise.
            checksums: as for ``run``, of each slot.
            max_sms: as for ``run``.
            engine: as for ``run``.

        Returns:
            As ``run``, the checksum of each slot.

        Raises:
            ChecksumError: as by ``run``.
            InvalidArgument: as by ``run``; also for views without a ``token`` axis.
            Unavailable: as by ``run``.
            CudaError: as by ``run``.
        """
        for part in self._copying.parts:
            if not part.src.has_tokens:
                raise InvalidArgument(
                    f"CopyPlan.run_slots: views must have a 'token' axis, got {part.src.axes!r}"
                )
        return self._copying.slots.run(
            src_slots, dst_slots, layers, src_positions, dst_positions, checksums, max_sms, engine
        )

    def pack(self, src_blocks: BlockIds, staging: torch.Tensor, **options: Any) -> PackHeader:
        """Pack what the plan copies of src, for one write over the network: see ``Packer.pack``.

        Packed blocks are fp8 if either side of the plan is. ``options`` and errors are those of
        ``Packer.pack``. A process that has only one of the two caches uses a ``Packer`` instead of
        a plan.
        """
        return self._two_packers()[0].pack(src_blocks, staging, **options)

    def unpack(
        self,
        header: PackHeader | bytes,
        staging: torch.Tensor,
        dst_blocks: BlockIds,
        **options: Any,
    ) -> bool:
        """Unpack the result of ``pack`` into dst: see ``Packer.unpack``."""
        return self._two_packers()[1].unpack(header, staging, dst_blocks, **options)

    def _two_packers(self) -> tuple[Packer, Packer]:
        if self._packers is None:
            convert, rope, checksum = self._transforms
            parts = self._copying.parts
            dtypes = [part.dst.dtype if part.dst.dtype in FP8 else part.src.dtype for part in parts]
            src, dst = ([part.held(side) for part in parts] for side in range(2))
            if convert is not None:  # scales belong to the fp8 side, whichever packs or unpacks
                pair = next(pair for pair in zip(src, dst, strict=True) if _converts(*pair))
                fp8 = pair[1 if pair[1].view.dtype in FP8 else 0]
                convert = fp8.scales(convert, fp8.layers.values(), fp8.heads)
            self._packers = (
                Packer.of_side(Side(src, dtypes, convert, None, checksum)),
                Packer.of_side(Side(dst, dtypes, convert, rope, checksum)),
            )
        return self._packers

    def check(self) -> None:
        """Wait for the current stream and raise if a run met a bad id. Does nothing on the CPU.

        Raises:
            ChecksumError: a block that an earlier run read did not match its checksum.
            InvalidArgument: an id of an earlier run was out of range; the message names it.
        """
        for packer in self._packers or ():
            packer.check()
        copying = self._copying
        if copying.device.type == "cuda":
            torch.cuda.current_stream(copying.device).synchronize()
        copying.blocks.bad.raise_if_any()
        copying.slots.bad.raise_if_any()


def _converts(src: Held, dst: Held) -> bool:
    return src.view.dtype != dst.view.dtype
