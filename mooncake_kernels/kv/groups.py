"""Caches of several groups of layers, each with a block table of its own."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, takewhile
from math import lcm

from .._arguments import as_integer, as_one_of
from ..errors import InvalidArgument, shown
from .copy_parts import as_views, block_size_of
from .token_shard import ALL_TOKENS, MAX_TOKENS, TokenShard
from .view import KVView

KINDS = ("full", "window", "state", "encoder")


class CacheGroup:
    """Layers of a cache that share a block table.

    Args:
        name: of the group, as in an engine's configuration; unique in its cache.
        views: a view, or several that share block ids: keys and values, their scales, the keys of
            an indexer, the convolution and the state of a recurrent layer.
        kind: which blocks the next token of a prefix needs:
            "full": all of the prefix;
            "window": those with one of its last ``window - 1`` tokens;
            "state": the last one, which holds the recurrent state after the prefix;
            "encoder": all that an encoder's output takes, whatever the prefix.
        window: tokens that a query of a "window" group sees, itself included.
        tokens_per_block: tokens whose state one block holds. Required if no view has a ``token``
            axis, otherwise that of the views.
        token_shard: (rank, number of ranks, tokens of a run) of context parallelism, see
            ``shard_tokens``: the rank holds these tokens of a request only, in order. Its views
            all have a ``token`` axis then, and a block holds whole runs. None: all tokens.

    Attributes:
        name, views, kind, window, tokens_per_block: as given; ``views`` is a list.
        token_shard: as given; ``(0, 1, 1)`` for all tokens.
        num_blocks, device: of the views.

    Raises:
        InvalidArgument: an argument is not as above.
    """

    def __init__(
        self,
        name: str,
        views: KVView | Sequence[KVView],
        kind: str = "full",
        *,
        window: int | None = None,
        tokens_per_block: int | None = None,
        token_shard: tuple[int, int, int] | None = None,
    ):
        op = "CacheGroup"
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"{op}: name must be a str that is not empty, got {shown(name)}")
        as_one_of(op, "kind", kind, KINDS)
        self.name, self.kind = name, kind
        self.views = as_views("views", views, op=op)
        if (window is not None) != (kind == "window"):
            need = "given" if kind == "window" else "None"
            raise InvalidArgument(
                f"{op}: window must be {need} for kind {kind!r}, got {shown(window)}"
            )
        self.window = None if window is None else as_integer(op, "window", window, 1, MAX_TOKENS)
        of_views = block_size_of(self.views) if any(v.has_tokens for v in self.views) else None
        if of_views is None and tokens_per_block is None:
            raise InvalidArgument(
                f"{op}: tokens_per_block must be given for views without a 'token' axis, got None"
            )
        size = of_views if tokens_per_block is None else tokens_per_block
        self.tokens_per_block = as_integer(op, "tokens_per_block", size, 1, MAX_TOKENS)
        if of_views not in (None, self.tokens_per_block):
            raise InvalidArgument(
                f"{op}: tokens_per_block must be {of_views}, as of the views, "
                f"got {self.tokens_per_block}"
            )
        self.num_blocks, self.device = self.views[0].num_blocks, self.views[0].device
        self.token_shard = ALL_TOKENS
        if token_shard is not None:
            self.token_shard = TokenShard.checked(f"{op}: token_shard", token_shard)
        if self.token_shard.num_ranks > 1:
            self._check_token_shard(op)

    def _check_token_shard(self, op: str) -> None:
        """Refuse what has no tokens to divide, and blocks with a part of a run."""
        without = [view.axes for view in self.views if not view.has_tokens]
        if without or self.kind == "state":
            got = f"a view {without[0]!r}" if without else "kind 'state'"
            raise InvalidArgument(
                f"{op}: token_shard must be None for states and views without a 'token' axis, "
                f"got {self.token_shard[:]} for {got}"
            )
        if self.tokens_per_block % self.token_shard.run:
            raise InvalidArgument(
                f"{op}: token_shard must have runs that divide blocks of {self.tokens_per_block} "
                f"tokens, got {self.token_shard.run}"
            )

    @property
    def span(self) -> int:
        """Tokens of a request, on all ranks, that one place of the block table stands for."""
        return self.tokens_per_block * self.token_shard.num_ranks

    @property
    def has_tokens(self) -> bool:
        """Whether a view has a ``token`` axis, so that blocks of other sizes can be copied."""
        return any(view.has_tokens for view in self.views)

    def needed(self, num_tokens: int, encoder_tokens: int = 0) -> range:
        """Return the places in a request's block table that the token after a prefix needs.

        Equivalent to::

            tokens = {"full": range(num_tokens),
                      "window": range(max(0, num_tokens - window + 1), num_tokens),
                      "state": range(max(0, num_tokens - 1), num_tokens),
                      "encoder": range(encoder_tokens)}[kind]
            held = the tokens of the request that this rank holds: all without a token_shard
            return the range of {held.index(token) // tokens_per_block
                                 for token in tokens if token in held}

        Args:
            num_tokens: of the prefix, on all ranks.
            encoder_tokens: of the encoder's output.

        Raises:
            InvalidArgument: an argument is not an integer from 0 on.
        """
        op = "CacheGroup.needed"
        num_tokens = as_integer(op, "num_tokens", num_tokens, 0, MAX_TOKENS)
        encoder_tokens = as_integer(op, "encoder_tokens", encoder_tokens, 0, MAX_TOKENS)
        stop = encoder_tokens if self.kind == "encoder" else num_tokens
        first = 0
        if self.window is not None:
            first = max(0, stop - self.window + 1)
        elif self.kind == "state":
            first = max(0, stop - 1)
        first, stop = self.token_shard.count(first), self.token_shard.count(stop)
        if first >= stop:
            return range(0)
        return range(first // self.tokens_per_block, -(-stop // self.tokens_per_block))

    def __repr__(self) -> str:
        return f"CacheGroup({self.name!r}, {self.views}, {self.kind!r})"


class CacheGroups(Mapping[str, CacheGroup]):
    """A cache of one or several groups, by name, as a hybrid model's.

    Args:
        groups: of one device, with different names, in the order of a packed record.

    Attributes:
        device: of all.
        tokens_per_hit: a prefix that a store holds is a multiple of this: the least common multiple
            of the groups' ``span``, without "encoder" groups.

    Raises:
        InvalidArgument: there is no group, two have one name, or devices differ.
    """

    def __init__(self, *groups: CacheGroup):
        self._groups: dict[str, CacheGroup] = {}
        for group in groups:
            if not isinstance(group, CacheGroup):
                raise InvalidArgument(
                    f"CacheGroups: groups must be CacheGroup objects, got {type(group).__name__}"
                )
            if group.name in self._groups:
                raise InvalidArgument(
                    f"CacheGroups: groups must have different names, got {group.name!r} twice"
                )
            self._groups[group.name] = group
        if not groups:
            raise InvalidArgument("CacheGroups: groups must be at least one, got none")
        self.device = groups[0].device
        for group in groups:
            if group.device != self.device:
                raise InvalidArgument(
                    f"CacheGroups: groups must have one device, got {self.device} and "
                    f"{group.device}"
                )
        of_prefix = [group for group in groups if group.kind != "encoder"]
        self.tokens_per_hit = lcm(*(group.span for group in of_prefix))

    def __getitem__(self, name: str) -> CacheGroup:
        return self._groups[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def needed(self, num_tokens: int, encoder_tokens: int = 0) -> dict[str, range]:
        """Return, for each group, the places in its block table: see ``CacheGroup.needed``."""
        return {
            name: group.needed(num_tokens, encoder_tokens) for name, group in self._groups.items()
        }

    def longest_hit(self, found: Mapping[str, Sequence[bool]]) -> int:
        """Return the tokens of the longest prefix all of whose needed blocks were found.

        Equivalent to::

            for n in multiples of tokens_per_hit, from the longest that the tables hold down:
                if all(found[name][i] for name in found for i in groups[name].needed(n)):
                    return n
            return 0

        Args:
            found: for each group but those of kind "encoder", whether each block of the prompt was
                found, in the order of its block table.

        Raises:
            InvalidArgument: a group is missing or unknown, or has no sequence.
        """
        op = "CacheGroups.longest_hit"
        of_prefix = [group for group in self._groups.values() if group.kind != "encoder"]
        check_names(op, "found", found, {g.name for g in of_prefix})
        for name, blocks in found.items():
            if not _is_sequence(blocks):
                raise InvalidArgument(
                    f"{op}: found[{name!r}] must be a sequence of bools, one a block, "
                    f"got {shown(blocks)}"
                )
        longest = min((len(found[group.name]) * group.span for group in of_prefix), default=0)
        for group in of_prefix:
            if group.kind == "full":
                num_found = sum(1 for _ in takewhile(bool, found[group.name]))
                longest = min(longest, num_found * group.span)
        partial = [group for group in of_prefix if group.kind != "full"]
        hits = takewhile(lambda n: n > 0, count(longest - longest % self.tokens_per_hit,
                                                -self.tokens_per_hit))  # fmt: skip
        for num_tokens in hits:
            if all(found[g.name][i] for g in partial for i in g.needed(num_tokens)):
                return num_tokens
        return 0


def _is_sequence(value: object) -> bool:
    """Whether it is a list, a tensor or the like of one axis or more."""
    if isinstance(value, str | Mapping) or not hasattr(value, "__getitem__"):
        return False
    try:
        len(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def check_names(op: str, argument: str, given: object, names: set[str]) -> None:
    """Refuse anything but a mapping with exactly these groups."""
    got = set(given) if isinstance(given, Mapping) else None
    if got != names:
        raise InvalidArgument(
            f"{op}: {argument} must be a mapping with the groups {sorted(names)}, got "
            f"{shown(sorted(map(str, got))) if got is not None else type(given).__name__}"
        )
