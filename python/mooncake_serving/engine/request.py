"""A request in the engine, and its results."""

from dataclasses import dataclass, field
from typing import Literal

from .batch import Chunk
from .sampling import Draw, SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(eq=False)  # a request equals itself only
class Request:
    """Track one request: ``tokens`` grows at its end, ``num_computed`` follows it."""

    request_id: int
    tokens: list[int]  # the prompt, then what was generated
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    max_tokens: int  # params.max_tokens, limited by the model's context
    block_ids: list[int] = field(default_factory=list)  # empty: not admitted yet
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_under_way: int = 0  # tokens behind those, in steps that are not done yet
    num_cached_tokens: int = 0  # of the computed ones, those there before its first step
    num_lent: int = 0  # the first of those, whose blocks other instances hold
    is_prefilled: bool = False  # elsewhere: its first token came with it

    @property
    def num_generated(self) -> int:
        """Count the tokens that follow the prompt."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Count the tokens that no step has or had to compute; 1 when decoding."""
        return len(self.tokens) - self.num_computed - self.num_under_way

    @property
    def max_kv_tokens(self) -> int:
        """Bound the tokens it leaves in the cache; the last generated one is never attended to."""
        return self.num_prompt_tokens + self.max_tokens - 1

    def next_chunk(self, num_tokens: int) -> Chunk:
        """Return the next ``num_tokens`` pending tokens as a chunk."""
        start = self.num_computed + self.num_under_way
        tokens = self.tokens[start : start + num_tokens]
        return Chunk(tokens, start, self.block_ids, self.num_lent)

    def first_token(self) -> "list[TokenOutput]":
        """Return the token that came with a request, before its first step; else nothing."""
        if not self.is_prefilled or self.num_computed > self.num_prompt_tokens:
            return []
        return [TokenOutput(self.request_id, self.tokens[self.num_prompt_tokens], 0)]

    def next_draw(self) -> Draw:
        """Return the choice of the next token."""
        return Draw(self.params, self.seed, self.num_generated)


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One new token of one request."""

    request_id: int
    token_id: int
    token_index: int  # 0 for the first token after the prompt
    finish_reason: FinishReason | None = None  # set on the last token; "stop" tokens are included

    @property
    def finished(self) -> bool:
        """Tell whether this is the request's last token."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Generation:
    """All tokens generated for one prompt."""

    token_ids: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One chunk of a prefill that is done: its tokens' keys and values are in the cache."""

    start: int  # the first token's position
    stop: int  # the position after the last
    num_tokens: int  # of the whole prompt
    seconds: float  # on CUDA measured on the host: the chunk may still be running
    block_ids: tuple[int, ...]  # all blocks of the prompt, in order


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt whose keys and values are in blocks that the caller now holds."""

    first_token: int
    block_ids: list[int]
    num_tokens: int  # whose keys and values are there: the prompt's
    num_cached_tokens: int  # of which were there before
    chunks: tuple[PrefillChunk, ...]
