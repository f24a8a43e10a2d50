"""A request on its way through an engine process."""

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any

from mooncake_serving.connectors.handoff import Source
from mooncake_serving.engine import SamplingParams, TokenOutput
from mooncake_serving.http_api import ErrorAnswer

TRANSFER = "kv_transfer_params"  # the entry of bodies and answers about transfers
REUSE = "kv_reuse"  # the entry of bodies about what keys and values a prompt may be computed from
EXACT, SEMANTIC = "exact", "semantic"  # its values
# Of ``TRANSFER``: how much of a prompt is exact, and what is not.
NUM_EXACT, NUM_SIMILAR = "num_exact_tokens", "num_similar_tokens"


@dataclass(frozen=True)
class Send:
    """The prompt's blocks are for another engine, which names the transfer so."""

    transfer_id: str


@dataclass(frozen=True)
class Fetch:
    """The prompt's blocks come from another engine.

    Attributes:
        source: that engine.
        transfer_id: as it names the transfer.
        num_exact_tokens: so many of the first have exact keys and values; None: all of them.
    """

    source: Source
    transfer_id: str
    num_exact_tokens: int | None = None


@dataclass(eq=False)
class Job:
    """What the engine's thread is asked for.

    Attributes:
        prompt: token ids.
        params: how to generate.
        transfer: what another engine has to do with it; None: nothing.
        is_semantic: whether its prompt may be computed from a similar one's keys and values.
        request_id: in the process; also the transfer's, if none is given.
        outputs: its tokens in order, up to one that is the last, or an error.
        num_cached_tokens: of the prompt, that were not computed here; known from the first token.
        num_similar_tokens: of the prompt, that have begun with a similar prompt's keys and values.
        answer_params: the answer's ``kv_transfer_params``, known from the last token.
    """

    prompt: list[int]
    params: SamplingParams
    transfer: Send | Fetch | None = None
    is_semantic: bool = False
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    outputs: "asyncio.Queue[TokenOutput | ErrorAnswer]" = field(default_factory=asyncio.Queue)
    num_cached_tokens: int = 0
    num_similar_tokens: int = 0
    answer_params: dict[str, Any] | None = None
