"""What engines are told to hand a request's KV over, by the connector that they have.

The prompt goes to the prefill engine first, with room for one token; the decode engine gets the
same request when that is answered.
"""

from typing import Any, Protocol

from .config import InstanceConfig

# What would have a prefill engine compute, or answer, more than the prompt.
OF_OUTPUT = ("stream", "stream_options", "min_tokens", "best_of", "n", "max_completion_tokens")


class Handoff(Protocol):
    """The ``kv_transfer_params`` of one connector."""

    def prefill_params(self, attempt_id: str) -> dict[str, Any]:
        """Return those for the prefill engine."""
        ...

    def decode_params(
        self, attempt_id: str, prefill: InstanceConfig, engine_id: str, answered: Any
    ) -> dict[str, Any] | None:
        """Return those for the decode engine.

        Args:
            attempt_id: as before.
            prefill: the engine that has computed the prompt.
            engine_id: what its bootstrap server calls it, if it has one.
            answered: the ``kv_transfer_params`` of its answer; None: there were none.

        Returns:
            None: the prefill engine should have answered some.
        """
        ...


class AsAnswered:
    """The decode engine gets what the prefill engine has answered: vLLM's NixlConnector, ours."""

    def __init__(self, first: dict[str, Any]):
        self._first = first

    def prefill_params(self, attempt_id: str) -> dict[str, Any]:
        """Return the same for all."""
        return self._first

    def decode_params(
        self, attempt_id: str, prefill: InstanceConfig, engine_id: str, answered: Any
    ) -> dict[str, Any] | None:
        """Return what was answered."""
        return answered if isinstance(answered, dict) else None


class ByBootstrap:
    """The decode engine finds the prefill engine at its bootstrap server: MooncakeConnector."""

    def prefill_params(self, attempt_id: str) -> dict[str, Any]:
        """Return the name of the transfer."""
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": f"xfer-{attempt_id}",
        }

    def decode_params(
        self, attempt_id: str, prefill: InstanceConfig, engine_id: str, answered: Any
    ) -> dict[str, Any] | None:
        """Return the same name, and where the blocks are."""
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": f"xfer-{attempt_id}",
            "remote_engine_id": engine_id,
            "remote_bootstrap_addr": prefill.bootstrap,
        }


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
}


def prefill_body(body: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Return a request that computes the prompt of ``body`` and hands it over."""
    first = {name: value for name, value in body.items() if name not in OF_OUTPUT}
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    return first | {limit: 1, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
