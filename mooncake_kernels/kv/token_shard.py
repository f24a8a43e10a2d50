"""Which tokens of a request a context-parallel rank holds, and where: ``mk.shard_tokens``."""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from .._arguments import as_integer
from ..errors import InvalidArgument, shown

MAX_TOKENS = 1 << 40
MAX_RANKS = 1 << 20
HOLE = -1

Numbers = TypeVar("Numbers", int, torch.Tensor)


class TokenShard(NamedTuple):
    """The tokens t of a request with ``t // run % num_ranks == rank``.

    The rank's own number of a token is how many earlier ones it holds.

    Attributes:
        rank, num_ranks: of context parallelism.
        run: tokens in a row that one rank holds; 1 if there is one rank.
    """

    rank: int
    num_ranks: int
    run: int

    @classmethod
    def checked(cls, name: str, given: Any) -> "TokenShard":
        """Return what is given as such a triple; ``name`` is its name in errors."""
        is_triple = isinstance(given, (tuple, list)) and len(given) == 3
        if not is_triple or not cls(*given).is_valid():
            raise InvalidArgument(
                f"{name} must be (rank, number of ranks, tokens of a run), at most "
                f"{MAX_RANKS} ranks and {MAX_TOKENS} tokens, got {shown(given)}"
            )
        shard = cls(*given)
        return shard if shard.num_ranks > 1 else ALL_TOKENS

    def is_valid(self) -> bool:
        return (
            all(type(number) is int for number in self)
            and 0 <= self.rank < self.num_ranks <= MAX_RANKS
            and 1 <= self.run <= MAX_TOKENS
        )

    def count(self, num_tokens: int) -> int:
        """Return how many of a request's first tokens it holds."""
        rounds, rest = divmod(num_tokens, self.run * self.num_ranks)
        return rounds * self.run + min(max(rest - self.rank * self.run, 0), self.run)

    def tokens(self, numbers: Numbers) -> Numbers:
        """Return the tokens that have these numbers in the rank."""
        return (numbers // self.run * self.num_ranks + self.rank) * self.run + numbers % self.run

    def numbers(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of tokens in the rank, and whether it holds them."""
        held = tokens // self.run % self.num_ranks == self.rank
        return tokens // (self.run * self.num_ranks) * self.run + tokens % self.run, held


ALL_TOKENS = TokenShard(0, 1, 1)


def shard_tokens(
    num_tokens: int, src: tuple[int, int, int], dst: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Say which tokens of one context-parallel rank's cache go to which of another's.

    Rank r of s, with tokens interleaved in runs of k, holds the tokens t of a request with
    ``t // k % s == r``, in order: k = 1 for token by token, a block's size for block by block, as
    of vLLM's decode and prefill context parallelism. Equivalent to::

        for t in range(num_tokens):
            if held by both:
                src_tokens.append(number of tokens < t that src holds)
                dst_tokens.append(number of tokens < t that dst holds)

    A token's slot, for ``CopyPlan.run_slots``, is ``table[i // block_size] * block_size + i %
    block_size`` for its number i in the rank's own cache. A ``GroupsPlan`` or ``GroupsPacker``
    whose groups have a ``token_shard`` does so itself.

    Args:
        num_tokens: of the request, on all ranks.
        src: (rank, number of ranks, tokens of a run), at most 2^20 ranks and 2^40 tokens.
        dst: likewise.

    Returns:
        ``(src_tokens, dst_tokens)``, int64, equally long, on the CPU.

    Raises:
        InvalidArgument: an argument is not as above.
    """
    num_tokens = as_integer("shard_tokens", "num_tokens", num_tokens, 0, MAX_TOKENS)
    mine = TokenShard.checked("shard_tokens: src", src)
    numbers = torch.arange(mine.count(num_tokens), device="cpu")
    theirs, held = TokenShard.checked("shard_tokens: dst", dst).numbers(mine.tokens(numbers))
    return numbers[held], theirs[held]


@dataclass(frozen=True)
class TableBlocks:
    """Consecutive blocks of a request's block table in a rank.

    Attributes:
        shard: the tokens that the rank holds.
        block_size: tokens of a block.
        have_tokens: whether a token of them can be copied by itself.
        first, count: place of the first block in the table, and how many there are.
    """

    shard: TokenShard
    block_size: int
    have_tokens: bool
    first: int
    count: int

    @property
    def told(self) -> str:
        blocks = f"{self.count} blocks of {self.block_size} tokens from place {self.first} on"
        return f"{blocks} with token_shard {self.shard[:]}"


def common_tokens(
    op: str, argument: str, src: TableBlocks, dst: TableBlocks
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the tokens that blocks of two sides have in common, by their places in these blocks.

    Token i is in block ``i // block_size`` of its side. The first block of src may begin before
    what the request needs, and the last one may end behind it: of all others, and of the last one's
    first token, dst must have what its rank holds. Its blocks, if any, reach up to that token.

    Args:
        op: the call, for errors.
        argument: dst's blocks, likewise.
        src: what is read.
        dst: what is written.

    Returns:
        ``(src_tokens, dst_tokens)``, int64, equally long, on the CPU. None if they are the same
        blocks.

    Raises:
        InvalidArgument: dst lacks a token, there are more than 2^40, or none can be copied by
            itself.
    """
    if src == dst:
        return None
    if not (src.have_tokens and dst.have_tokens):
        raise InvalidArgument(
            f"{op}: {argument} must be, for views without a 'token' axis, the other side's "
            f"{src.told}, got {dst.told}"
        )
    for side in (src, dst):
        end = side.first + side.count
        if side.shard.tokens(end * side.block_size) > MAX_TOKENS:
            raise InvalidArgument(
                f"{op}: block tables must be of at most {MAX_TOKENS} tokens, got {end} blocks of "
                f"{side.block_size} on each of {side.shard.num_ranks} ranks"
            )
    size, before = src.block_size, src.first * src.block_size
    numbers = torch.arange(src.count * size, device="cpu")
    tokens = src.shard.tokens(numbers + before)
    theirs, held = dst.shard.numbers(tokens)
    theirs -= dst.first * dst.block_size
    there = (theirs >= 0) & (theirs < dst.count * dst.block_size)
    needed = slice(size, max(size, len(tokens) - size + 1))
    lacking = tokens[needed][(held & ~there)[needed]][:1].tolist()
    if src.count and dst.count:
        behind = dst.shard.tokens((dst.first + dst.count) * dst.block_size)
        lacking += [behind] if behind < int(tokens[-size]) else []
    if lacking:
        raise InvalidArgument(
            f"{op}: {argument} must be of blocks with token {lacking[0]} of the request, which "
            f"this rank holds, got {dst.count} from place {dst.first} on"
        )
    both = held & there
    return numbers[both], theirs[both]


def slots_of(ids: torch.Tensor, tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the slots of tokens of consecutive blocks with these ids, on the device of the ids."""
    tokens = tokens.to(ids.device)
    blocks = ids.long()[tokens // block_size]
    return torch.where(blocks == HOLE, HOLE, blocks * block_size + tokens % block_size)
