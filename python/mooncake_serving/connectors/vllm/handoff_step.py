"""What vLLM's scheduler tells its workers of hand-offs at a step, and the settings. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.transfer.engine import TRANSPORTS

from ..handoff import HandoffSettings, Source, digest_of_tokens


@dataclass(frozen=True)
class HandoffOptions:
    """The settings of an engine, ``"handoff"`` of its ``kv_connector_extra_config``.

    Attributes:
        host: address of this machine by which the other engines reach it; "": the engine's own
            choice.
        port: of the first rank; 0: any free one. Needed only by proxies that send a request to both
            engines at once.
        transports: that may be used, as of ``mk.TransferEngine``; None: its choice.
        settings: see ``HandoffSettings``.
    """

    host: str = ""
    port: int = 0
    transports: tuple[str, ...] | None = None
    settings: HandoffSettings = field(default_factory=HandoffSettings)


def parse_handoff(config: Mapping[str, Any], model: str = "") -> HandoffOptions:
    """Take the settings from a configuration.

    Args:
        config: a mapping of names of ``HandoffOptions`` and ``HandoffSettings`` to values.
        model: that of the engine, unless the configuration names one.

    Raises:
        InvalidArgument: a setting is unknown, or has a wrong value.
    """
    if not isinstance(config, Mapping):
        raise _wrong("must be", "an object of settings", config)
    own, given = {"host", "port", "transports"}, dict(config)
    of_handoff = {field.name for field in fields(HandoffSettings)}
    if unknown := sorted(set(given) - own - of_handoff):
        raise _wrong("must have", f"no others than {', '.join(sorted(own | of_handoff))}", unknown)
    host, port, transports = given.get("host", ""), given.get("port", 0), given.get("transports")
    if not isinstance(host, str):
        raise _wrong("'host' must be", "an address", host)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 1 << 16:
        raise _wrong("'port' must be", "a port, or 0", port)
    if transports is not None and not (
        isinstance(transports, list | tuple) and transports and {*transports} <= {*TRANSPORTS}
    ):
        raise _wrong("'transports' must be", f"a list of {', '.join(TRANSPORTS)}", transports)
    rest = {name: value for name, value in given.items() if name in of_handoff}
    try:
        settings = HandoffSettings(**{"model": model, **rest})
    except InvalidArgument as error:
        raise InvalidArgument(f"kv_connector_extra_config['handoff']: {error}") from None
    return HandoffOptions(host, port, None if transports is None else tuple(transports), settings)


def _wrong(what: str, wanted: str, value: Any) -> InvalidArgument:
    return InvalidArgument(f"kv_connector_extra_config['handoff'] {what} {wanted}, got {value!r}")


@dataclass(frozen=True)
class Offer:
    """A request that is going to be prefilled here for another engine.

    Attributes:
        num_tokens: that are handed over.
    """

    request_id: str
    transfer_id: str
    digest: bytes
    num_tokens: int


@dataclass(frozen=True)
class Progress:
    """How much of it this step completes, and its block table in each group, as vLLM has it."""

    transfer_id: str
    num_computed: int
    block_ids: list[list[int]]


@dataclass(frozen=True)
class Receive:
    """A request that another engine prefills, with its block table in each group.

    Attributes:
        receiver_id: of this engine.
        first_token, num_tokens: tokens ``first_token`` up to ``num_tokens`` are received.
    """

    request_id: str
    receiver_id: str
    source: Source
    transfer_id: str
    digest: bytes
    first_token: int
    num_tokens: int
    block_ids: list[list[int]]


@dataclass
class HandoffStep:
    """The scheduler's instructions to the workers for a step.

    Attributes:
        ranks: where the ranks of this engine are reached; only once, when it is known.
        offers, progress: of requests that are prefilled here; progress after the step.
        pauses: transfers that have lost their blocks, which the step may overwrite.
        drops: transfers that are over, and why.
        receives: requests that are prefilled elsewhere.
        cancels: requests that are aborted while they are received.
        releases: transfers that no one needs, at another engine.
    """

    ranks: list[str] = field(default_factory=list)
    offers: list[Offer] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    pauses: list[str] = field(default_factory=list)
    drops: list[tuple[str, str]] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    releases: list[tuple[Source, str]] = field(default_factory=list)


def is_of_tokens(request: Any) -> bool:
    """Whether tokens are all that a request's prompt has, so that a digest tells prompts apart."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def digest_of(request: Any, num_tokens: int) -> bytes:
    """Return a digest of all that the blocks of a prompt's head depend on, besides the model.

    Args:
        request: of vLLM, with ``prompt_token_ids``.
        num_tokens: of the head.
    """
    lora = getattr(request, "lora_request", None)
    more = [repr(getattr(lora, "lora_name", ""))]
    for feature in getattr(request, "mm_features", None) or ():
        place = feature.mm_position
        more.append(repr((feature.identifier, place.offset, place.length)))
    return digest_of_tokens(request.prompt_token_ids[:num_tokens], *more)
