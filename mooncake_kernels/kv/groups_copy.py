"""Copies of caches of several groups: one list of ids a group."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .._arguments import as_integer
from .._tensors import not_traced
from ..bad_ids import check_ids
from ..errors import InvalidArgument, shown
from .copying import Copying
from .execute import BlockIds, Engine, as_ids
from .groups import KINDS, CacheGroup, CacheGroups, check_names
from .pack_header import MAX_BLOCKS, Chunk, PackHeader, framed, unframed
from .packing import DEFAULT_CHUNK_BYTES, MAX_FIRST, Packer
from .staging import check_buffer
from .token_shard import (
    ALL_TOKENS,
    MAX_TOKENS,
    TableBlocks,
    TokenShard,
    common_tokens,
    slots_of,
)

MAGIC, VERSION = b"MKPG", 2


class GroupsPlan:
    """Copy blocks of one cache of several groups into another: a ``CopyPlan`` a group.

    Equivalent to::

        for name in src_blocks:
            CopyPlan(src[name].views, dst[name].views).run(src_blocks[name], dst_blocks[name])

    or, where the two sides differ in ``token_shard`` or places in block tables are given, to what
    ``CopyPlan.run_slots`` does with the tokens of the request that both sides have.

    Args:
        src, dst: caches whose groups have the same names, kinds and windows. Groups without a
            ``token`` axis also need the same ``tokens_per_block``.
        src_heads, dst_heads: as for ``CopyPlan``, of the groups that are named.
        checksum: as for ``CopyPlan``.

    Raises:
        InvalidArgument: the two sides do not match; the message names the group.
    """

    def __init__(
        self,
        src: CacheGroups,
        dst: CacheGroups,
        *,
        src_heads: Mapping[str, slice] | None = None,
        dst_heads: Mapping[str, slice] | None = None,
        checksum: bool = False,
    ):
        op = "GroupsPlan"
        for name, side in (("src", src), ("dst", dst)):
            if not isinstance(side, CacheGroups):
                raise InvalidArgument(f"{op}: {name} must be CacheGroups, got {shown(side)}")
        check_names(op, "dst", dst, set(src))
        heads = [
            _optional(op, name, given, src)
            for name, given in (("src_heads", src_heads), ("dst_heads", dst_heads))
        ]
        self.src, self.dst = src, dst
        self._copies: dict[str, Copying] = {}
        for name in src:
            _check_alike(op, src[name], dst[name])
            try:
                self._copies[name] = Copying(
                    *(src[name].views, dst[name].views),
                    src_heads=heads[0].get(name),
                    dst_heads=heads[1].get(name),
                    checksum=checksum,
                )
            except InvalidArgument as error:
                raise InvalidArgument(f"{op}: group {name!r}: {error}") from None

    def run(
        self,
        src_blocks: Mapping[str, BlockIds],
        dst_blocks: Mapping[str, BlockIds],
        *,
        src_first_blocks: Mapping[str, int] | None = None,
        dst_first_blocks: Mapping[str, int] | None = None,
        max_sms: int | None = None,
        engine: Engine = "auto",
    ) -> dict[str, torch.Tensor | None]:
        """Copy block ``src_blocks[name][i]`` of src into block ``dst_blocks[name][i]`` of dst.

        Args:
            src_blocks: ids as for ``CopyPlan.run``, of the groups to copy: all or some.
            dst_blocks: likewise, of the same groups. Copied token by token, they hold at least
                the tokens of src's blocks that dst's rank holds, but for tokens of the first one,
                and of the last one behind its first token.
            src_first_blocks: the place of the first of ``src_blocks`` in the request's block
                table: tokens then go to their places in the request, whatever the block sizes. 0
                for a group of which only dst's is given, or whose ``token_shard`` differs. One of
                the two is required for "window" groups of different block sizes.
            dst_first_blocks: likewise, of dst.
            max_sms: as for ``CopyPlan.run``.
            engine: as for ``CopyPlan.run``.

        Returns:
            For each of these groups what ``CopyPlan.run`` returns, or ``run_slots``.

        Raises:
            InvalidArgument: an id is out of range, or an argument is not as above. No group has
                been copied then, unless the ids are on a GPU: see ``CopyPlan.run``.
            Unavailable: the named engine is not available.
        """
        op = "GroupsPlan.run"
        known = _of_groups(op, "src_blocks", src_blocks, self.src)
        check_names(op, "dst_blocks", dst_blocks, set(known))
        firsts = [
            _optional(op, name, given, self.src)
            for name, given in (
                ("src_first_blocks", src_first_blocks), ("dst_first_blocks", dst_first_blocks)
            )
        ]  # fmt: skip
        runs = {}
        for name, ids in known.items():
            copying, both = self._copies[name], (ids, dst_blocks[name])
            of_group, by_slots = f"{op}: group {name!r}", None
            places = [first.get(name) for first in firsts]
            if places != [None, None] or self.src[name].token_shard != self.dst[name].token_shard:
                by_slots = self._slots(of_group, name, both, places)
            else:
                _check_begin(of_group, "dst_first_blocks", self.src[name], self.dst[name], 0)
            try:
                if by_slots is None:
                    runs[name] = copying.blocks.checked(*both, max_sms, engine)
                else:
                    runs[name] = copying.slots.checked(*by_slots, max_sms, engine)
            except InvalidArgument as error:
                raise InvalidArgument(f"{of_group}: {error}") from None
        return {name: make() for name, make in runs.items()}

    def _slots(
        self, op: str, name: str, ids: Sequence[BlockIds], firsts: Sequence[int | None]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the slots of the tokens that blocks of both sides have in common; None if they
        are the same blocks.
        """
        blocks, tables = [], []
        for side, given, first, group in zip(
            ("src", "dst"), ids, firsts, (self.src[name], self.dst[name]), strict=True
        ):
            argument = f"{op}: {side}_blocks"
            device = given.device if isinstance(given, torch.Tensor) else torch.device("cpu")
            blocks.append(as_ids(argument, given, device))
            if device.type == "cpu":
                check_ids(argument, blocks[-1], group.num_blocks)
            tables.append(_table(op, f"{side}_first_blocks", group, first, len(blocks[-1])))
        tokens = common_tokens(op, "dst_blocks", *tables)
        if tokens is None:
            return None
        return (
            slots_of(blocks[0], tokens[0], tables[0].block_size),
            slots_of(blocks[1], tokens[1], tables[1].block_size),
        )

    def check(self) -> None:
        """Wait for the current stream and raise if a run met a bad id. Does nothing on the CPU.

        Raises:
            InvalidArgument: an id of an earlier run was out of range; the message names it.
        """
        if self.src.device.type == "cuda":
            torch.cuda.current_stream(self.src.device).synchronize()
        for copies in self._copies.values():
            copies.blocks.bad.raise_if_any()
            copies.slots.bad.raise_if_any()


@dataclass(frozen=True)
class PackedGroup:
    """One group's part of a staging buffer.

    Attributes:
        name, kind, window, tokens_per_block, token_shard: of the sender's ``CacheGroup``.
        first_block: the place in the request's block table of the first record: with
            ``packed.num_blocks``, which part of the request was sent.
        packed: of its records, which begin at ``offset`` of the buffer.
        offset: bytes.
    """

    name: str
    kind: str
    window: int | None
    tokens_per_block: int
    token_shard: TokenShard
    first_block: int
    packed: PackHeader
    offset: int

    def check(self) -> bool:
        """Tell whether it is valid: a header may come from an untrusted source."""
        window = 1 if self.window is None else self.window
        least = ((self.tokens_per_block, 1), (window, 1), (self.first_block, 0), (self.offset, 0))
        return (
            isinstance(self.name, str)
            and bool(self.name)
            and self.kind in KINDS
            and (self.window is None) == (self.kind != "window")
            and all(
                type(number) is int and low <= number < MAX_TOKENS + low for number, low in least
            )
            and self._has_good_tokens()
        )

    def _has_good_tokens(self) -> bool:
        """Tell whether blocks are as ``CacheGroup`` has them."""
        views = self.packed.views
        if any(view.has_tokens and view.tokens != self.tokens_per_block for view in views):
            return False
        if not isinstance(self.token_shard, TokenShard) or not self.token_shard.is_valid():
            return False
        if self.token_shard.num_ranks == 1:
            return self.token_shard == ALL_TOKENS
        have_tokens = self.kind != "state" and all(view.has_tokens for view in views)
        return have_tokens and self.tokens_per_block % self.token_shard.run == 0


@dataclass(frozen=True)
class GroupsHeader:
    """A description of packed groups: made by ``pack``, sent along, read by ``unpack``.

    Attributes:
        groups: in the order of the buffer.
    """

    groups: tuple[PackedGroup, ...]

    @property
    def num_blocks(self) -> int:
        """Records of all groups."""
        return sum(group.packed.num_blocks for group in self.groups)

    @property
    def num_bytes(self) -> int:
        """Bytes of the staging buffer that are used."""
        return sum(group.packed.num_bytes for group in self.groups)

    @property
    def chunks(self) -> list[Chunk]:
        """The ranges to send, in order; ``first_block`` counts the records of the chunk's group."""
        return [
            replace(chunk, offset=group.offset + chunk.offset)
            for group in self.groups
            for chunk in group.packed.chunks
        ]

    def __getitem__(self, name: str) -> PackedGroup:
        return next(group for group in self.groups if group.name == name)

    def to_bytes(self) -> bytes:
        """Return the form that ``from_bytes`` reads; ``docs/internals/formats.md`` gives it."""
        return framed(MAGIC, VERSION, asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> "GroupsHeader":
        """Read a header.

        Raises:
            InvalidArgument: as by ``PackHeader.from_bytes``.
        """
        values: Any = unframed("GroupsHeader", data, MAGIC, VERSION)
        try:
            header = cls(
                tuple(
                    PackedGroup(
                        **{
                            **group,
                            "token_shard": TokenShard(*group["token_shard"]),
                            "packed": PackHeader.from_json(group["packed"]),
                        }
                    )
                    for group in values["groups"]
                )
            )
            for shard in (group.token_shard for group in header.groups):
                if shard.num_ranks == 1 and shard != ALL_TOKENS:
                    raise InvalidArgument(
                        f"GroupsHeader: data must have token_shard {ALL_TOKENS[:]} if there is one "
                        f"rank, got {shown(shard[:])}"
                    )
            good = len(values) == 1 and header.check()
        except (TypeError, KeyError, AttributeError) as error:
            raise InvalidArgument(f"GroupsHeader: data must be a header's, got {error!r}") from None
        if not good:
            raise InvalidArgument(
                f"GroupsHeader: data must describe packed groups, got {shown(values, 200)}"
            )
        return header

    def check(self) -> bool:
        """Tell whether its groups are valid, few enough, differ in name and follow each other."""
        if not self.groups or not all(group.check() for group in self.groups):
            return False
        if self.num_blocks > MAX_BLOCKS:
            return False
        offset = 0
        for group in self.groups:
            if group.offset != offset:
                return False
            offset += group.packed.num_bytes
        return len({group.name for group in self.groups}) == len(self.groups)


class GroupsPacker:
    """Pack blocks of a cache of several groups into one buffer: a ``Packer`` a group.

    Equivalent to::

        for name in block_ids, in the order of the cache:
            Packer(groups[name].views).pack(block_ids[name], the next part of staging)

    A receiver's groups may have other layouts, heads, layers and, with a ``token`` axis, block
    sizes and ``token_shard``; from a record it takes what it holds. With context parallelism it
    unpacks what each rank of the sender has packed of its own block table.

    Args:
        groups: the cache.
        first_head, first_layer: as for ``Packer``, of the groups that are named.
        layers: as for ``Packer``, of each group.
        checksum: as for ``Packer``.

    Raises:
        InvalidArgument: an argument is not as above.
    """

    def __init__(
        self,
        groups: CacheGroups,
        *,
        first_head: Mapping[str, int] | None = None,
        first_layer: Mapping[str, int] | None = None,
        layers: range | None = None,
        checksum: bool = True,
    ):
        op = "GroupsPacker"
        if not isinstance(groups, CacheGroups):
            raise InvalidArgument(f"{op}: groups must be CacheGroups, got {shown(groups)}")
        first_heads = _optional(op, "first_head", first_head, groups)
        first_layers = _optional(op, "first_layer", first_layer, groups)
        self.groups = groups
        self._packers = {
            name: Packer(
                group.views,
                first_head=as_integer(op, "first_head", first_heads.get(name, 0), 0, MAX_FIRST),
                first_layer=as_integer(op, "first_layer", first_layers.get(name, 0), 0, MAX_FIRST),
                layers=layers,
                checksum=checksum,
            )
            for name, group in groups.items()
        }

    def header(
        self,
        num_blocks: Mapping[str, int],
        *,
        first_blocks: Mapping[str, int] | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> GroupsHeader:
        """Return the header that ``pack`` returns for this many blocks of each group.

        Args:
            num_blocks: of the groups to pack: all or some.
            first_blocks: of these, the place of the first block in the request's block table,
                ``needed(...)[name].start``; 0 where it is not given.
            chunk_bytes: as for ``Packer.pack``.

        Raises:
            InvalidArgument: an argument is not as above, or there are more than 2^24 blocks in all.
        """
        return self._header("GroupsPacker.header", num_blocks, first_blocks, chunk_bytes)

    def _header(
        self,
        op: str,
        num_blocks: Mapping[str, int],
        first_blocks: Mapping[str, int] | None,
        chunk_bytes: int,
    ) -> GroupsHeader:
        counts = _of_groups(op, "num_blocks", num_blocks, self.groups)
        firsts = _optional(op, "first_blocks", first_blocks, self.groups)
        if not_packed := sorted(set(firsts) - set(counts)):
            raise InvalidArgument(
                f"{op}: first_blocks must be of groups that are packed, got {shown(not_packed)}"
            )
        offset, packed = 0, []
        for name in (name for name in self.groups if name in counts):
            group = self.groups[name]
            of_group = f"{op}: group {name!r}"
            try:
                header = self._packers[name].header(counts[name], chunk_bytes=chunk_bytes)
            except InvalidArgument as error:
                raise InvalidArgument(f"{of_group}: {error}") from None
            first = as_integer(of_group, "first_blocks", firsts.get(name, 0), 0, MAX_TOKENS - 1)
            of_sender = (group.name, group.kind, group.window, group.tokens_per_block)
            packed.append(PackedGroup(*of_sender, group.token_shard, first, header, offset))
            offset += header.num_bytes
        if not packed:
            raise InvalidArgument(f"{op}: num_blocks must name a group, got {{}}")
        made = GroupsHeader(tuple(packed))
        if made.num_blocks > MAX_BLOCKS:
            raise InvalidArgument(
                f"{op}: num_blocks must be at most {MAX_BLOCKS} of all groups, got "
                f"{made.num_blocks}"
            )
        return made

    @not_traced
    def pack(
        self,
        block_ids: Mapping[str, BlockIds],
        staging: torch.Tensor,
        *,
        first_blocks: Mapping[str, int] | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        max_sms: int | None = None,
        engine: Engine = "auto",
    ) -> GroupsHeader:
        """Pack blocks into a staging buffer, group by group.

        Args:
            block_ids: ids as for ``Packer.pack``, of the groups to pack: all or some.
            staging: as for ``Packer.pack``.
            first_blocks: as for ``header``.
            chunk_bytes: as for ``Packer.pack``.
            max_sms: as for ``CopyPlan.run``.
            engine: as for ``CopyPlan.run``.

        Returns:
            The header, for the receiver.

        Raises:
            InvalidArgument: an argument is not as above; an id on the CPU is out of range: nothing
                has been packed of any group then.
            Unavailable: the named engine is not available.
        """
        op = "GroupsPacker.pack"
        given = _of_groups(op, "block_ids", block_ids, self.groups)
        ids = {
            name: self._packers[name].as_ids(f"{op}: group {name!r}", given[name]) for name in given
        }
        counts = {name: tensor.numel() for name, tensor in ids.items()}
        header = self._header(op, counts, first_blocks, chunk_bytes)
        check_buffer(op, staging, header, self.groups.device)
        for group in header.groups:
            part = staging[group.offset : group.offset + group.packed.num_bytes]
            self._packers[group.name].pack(
                ids[group.name], part, chunk_bytes=chunk_bytes, max_sms=max_sms, engine=engine
            )
        return header

    @not_traced
    def unpack(
        self,
        header: GroupsHeader | bytes,
        staging: torch.Tensor,
        block_ids: Mapping[str, BlockIds],
        *,
        first_blocks: Mapping[str, int] | None = None,
        max_sms: int | None = None,
        engine: Engine = "auto",
    ) -> bool:
        """Unpack a staging buffer that a peer has packed into blocks of this cache.

        Args:
            header: what ``pack`` returned, or its ``to_bytes()``.
            staging: as for ``pack``: the peer's, or a buffer that received its bytes.
            block_ids: destinations as for ``Packer.unpack``, of each group of the header that this
                cache has, too; others are passed over. Unpacked token by token, they hold at least
                the records' tokens that this rank holds, but for tokens of the first record, and of
                the last one behind its first token.
            first_blocks: the place of the first of ``block_ids`` in the request's block table here:
                tokens then go to their places in the request, whatever the block sizes and the
                sender's first block. 0 for a group that is not named whose ``token_shard`` differs.
                Required for a "window" group if block sizes differ.
            max_sms: as for ``CopyPlan.run``.
            engine: as for ``CopyPlan.run``.

        Returns:
            Whether the records contain any of this cache's heads, layers and tokens.

        Raises:
            ChecksumError: a record that is needed does not match its checksum. No group has been
                written then; on CUDA the error is raised as for ids.
            InvalidArgument: the header is invalid, or of another kind of cache, or an argument is
                not as above; nothing has been written then.
            Unavailable: the named engine is not available.
        """
        op = "GroupsPacker.unpack"
        if isinstance(header, (bytes, bytearray, memoryview)):
            header = GroupsHeader.from_bytes(header)
        if not isinstance(header, GroupsHeader) or not header.check():
            raise InvalidArgument(
                f"{op}: header must be a GroupsHeader or its bytes, got {shown(header)}"
            )
        check_buffer(op, staging, header, self.groups.device)
        known = [group for group in header.groups if group.name in self.groups]
        check_names(op, "block_ids", block_ids, {group.name for group in known})
        firsts = _optional(op, "first_blocks", first_blocks, self.groups)
        makes = []
        for group in known:
            _check_alike(op, group, self.groups[group.name])
            part = staging[group.offset : group.offset + group.packed.num_bytes]
            ids, packer = block_ids[group.name], self._packers[group.name]
            of_group, mine = f"{op}: group {group.name!r}", self.groups[group.name]
            tokens, first = None, firsts.get(group.name)
            if first is not None or group.token_shard != mine.token_shard:
                ids = packer.as_ids(of_group, ids)
                packer._plans.check_kind(of_group, group.packed)  # before memory for its tokens
                tokens = common_tokens(
                    *(of_group, "block_ids"),
                    _table(of_group, "header", group, group.first_block, group.packed.num_blocks),
                    _table(of_group, "first_blocks", mine, first, len(ids)),
                )
            else:
                _check_begin(of_group, "first_blocks", group, mine, group.first_block)
            arguments = (group.packed, part, ids, (None, None), max_sms, engine, tokens)
            makes.append(packer.checked_unpack(of_group, *arguments))
        for make in makes:
            if make is not None:
                make()
        return any(make is not None for make in makes)

    def check(self) -> None:
        """Wait for the current stream and raise if a call met a bad id or checksum; not on the CPU.

        Raises:
            ChecksumError: a record did not match its checksum; the message names it.
            InvalidArgument: an id was out of range.
        """
        for packer in self._packers.values():
            packer.check()


def _of_groups(
    op: str, argument: str, given: Mapping[str, Any], groups: CacheGroups
) -> Mapping[str, Any]:
    """Return what is given for some of the groups."""
    unknown = set(given) - set(groups) if isinstance(given, Mapping) else {type(given).__name__}
    if unknown:
        raise InvalidArgument(
            f"{op}: {argument} must be a mapping of some of the groups {sorted(groups)}, "
            f"got {shown(sorted(map(str, unknown)))}"
        )
    return given


def _optional(
    op: str, argument: str, given: Mapping[str, Any] | None, groups: CacheGroups
) -> Mapping[str, Any]:
    """Likewise; None is nothing."""
    return {} if given is None else _of_groups(op, argument, given, groups)


def _table(
    op: str, argument: str, group: CacheGroup | PackedGroup, first: int | None, count: int
) -> TableBlocks:
    first = as_integer(op, argument, 0 if first is None else first, 0, MAX_TOKENS - 1)
    views = group.views if isinstance(group, CacheGroup) else group.packed.views
    have_tokens = all(view.has_tokens for view in views)
    return TableBlocks(group.token_shard, group.tokens_per_block, have_tokens, first, count)


def _check_begin(
    op: str, argument: str, src: CacheGroup | PackedGroup, dst: CacheGroup, first: int
) -> None:
    """Refuse blocks of other sizes, in order, that may begin at another token than src's."""
    sizes = src.tokens_per_block, dst.tokens_per_block
    if sizes[0] != sizes[1] and (src.kind == "window" or first * sizes[0] % sizes[1]):
        raise InvalidArgument(
            f"{op}: {argument} must be given for blocks of {sizes[1]} tokens that may begin at "
            f"another token than the other side's, of {sizes[0]}, got None"
        )


def _check_alike(op: str, src: CacheGroup | PackedGroup, dst: CacheGroup) -> None:
    """Refuse groups of other kinds, and other blocks where these cannot be cut."""
    fields = ["kind", "window"] + ([] if dst.has_tokens else ["tokens_per_block"])
    for field in fields:
        mine, other = getattr(dst, field), getattr(src, field)
        if mine != other:
            raise InvalidArgument(
                f"{op}: group {dst.name!r} must have the same {field} on both sides, got "
                f"{other} and {mine}"
            )
