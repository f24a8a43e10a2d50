"""What engines are told to hand a request's KV over, by the connector that they have.

vLLM's prefill engine gets the prompt first, with room for one token, and the decode engine the same
request when that is answered. SGLang's two engines get the request at once, and meet in a room.
"""

import secrets
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from .config import InstanceConfig

# What would have a prefill engine compute, or answer, more than the prompt.
OF_OUTPUT = ("stream", "stream_options", "min_tokens", "best_of", "n", "max_completion_tokens")
OF_STREAM = ("stream", "stream_options")
ROOMS = 62  # bits: SGLang numbers the samples of a request from its room on, in an int64
BOOTSTRAP_PORT = 8998  # of SGLang


@dataclass(frozen=True)
class Transfer:
    """One attempt to hand a request over.

    Attributes:
        attempt_id: of the request in the engines.
        prefill: the engine that computes the prompt.
        engine_id: what its bootstrap server calls it; "": it was not asked.
        room: where the two engines meet, if they have the same number.
    """

    attempt_id: str
    prefill: InstanceConfig
    engine_id: str = ""
    room: int = field(default_factory=lambda: secrets.randbits(ROOMS))


class Handoff(Protocol):
    """What one connector needs in the bodies of a request.

    Attributes:
        is_at_once: whether both engines get the request at the same time.
        has_engine_ids: whether bootstrap servers are asked what they call their engines.
        health_timeout_s: how long the engines may take to tell how they are.
    """

    is_at_once: bool
    has_engine_ids: bool
    health_timeout_s: float

    def prefill_body(self, body: dict[str, Any], transfer: Transfer) -> dict[str, Any]:
        """Return the request for the prefill engine; ``body`` is the client's."""
        ...

    def decode_body(
        self, body: dict[str, Any], transfer: Transfer, answer: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return the request for the decode engine.

        Args:
            body: of the client.
            transfer: as before.
            answer: of the prefill engine; empty if both get the request at once.

        Returns:
            None: the prefill engine should have answered ``kv_transfer_params``.
        """
        ...


class AsAnswered:
    """The decode engine gets what the prefill engine has answered: vLLM's NixlConnector, ours."""

    is_at_once, has_engine_ids, health_timeout_s = False, False, 5.0

    def __init__(self, first: dict[str, Any]):
        self._first = first

    def prefill_body(self, body: dict[str, Any], transfer: Transfer) -> dict[str, Any]:
        """Return the prompt with the same params for all."""
        return _only_prompt(body, self._first)

    def decode_body(
        self, body: dict[str, Any], transfer: Transfer, answer: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return the request with what was answered."""
        given = answer.get("kv_transfer_params")
        return body | {"kv_transfer_params": given} if isinstance(given, dict) else None


class ByBootstrap:
    """The decode engine finds the prefill engine at its bootstrap server: MooncakeConnector."""

    is_at_once, has_engine_ids, health_timeout_s = False, True, 5.0

    def prefill_body(self, body: dict[str, Any], transfer: Transfer) -> dict[str, Any]:
        """Return the prompt with the name of the transfer."""
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": f"xfer-{transfer.attempt_id}",
        }
        return _only_prompt(body, params)

    def decode_body(
        self, body: dict[str, Any], transfer: Transfer, answer: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return the request with the same name, and where the blocks are."""
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": f"xfer-{transfer.attempt_id}",
            "remote_engine_id": transfer.engine_id,
            "remote_bootstrap_addr": transfer.prefill.bootstrap,
        }
        return body | {"kv_transfer_params": params}


class ByRoom:
    """Both engines get the request at once: SGLang, whatever carries its KV.

    With data parallelism, each engine takes the rank that the room means, or its own; the decode
    engine asks the prefill engine's bootstrap server for the rank there.
    """

    is_at_once, has_engine_ids = True, False
    health_timeout_s = 25.0  # SGLang has a token computed, within 20 s

    def prefill_body(self, body: dict[str, Any], transfer: Transfer) -> dict[str, Any]:
        """Return the request; SGLang's prefill engine computes the prompt and stops by itself."""
        whole = {name: value for name, value in body.items() if name not in OF_STREAM}
        return whole | _meeting(transfer)

    def decode_body(
        self, body: dict[str, Any], transfer: Transfer, answer: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return the request with the same room."""
        return body | _meeting(transfer)


HANDOFFS: dict[str, Handoff] = {
    "nixl": AsAnswered(
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    ),
    "mooncake": ByBootstrap(),
    "mooncake_kernels": AsAnswered({"do_remote_decode": True}),
    "sglang": ByRoom(),
}


def _only_prompt(body: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Return a request that computes the prompt of ``body`` and hands it over."""
    first = {name: value for name, value in body.items() if name not in OF_OUTPUT}
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    return first | {limit: 1, "max_tokens": 1, "stream": False, "kv_transfer_params": params}


def _meeting(transfer: Transfer) -> dict[str, Any]:
    address = urlsplit(transfer.prefill.bootstrap)
    return {
        "bootstrap_host": address.hostname,
        "bootstrap_port": address.port or BOOTSTRAP_PORT,
        "bootstrap_room": transfer.room,
    }
