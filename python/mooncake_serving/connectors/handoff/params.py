"""``kv_transfer_params`` of requests and answers: who hands what over to whom."""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from .messages import MAX_RANKS, MAX_TEXT
from .settings import Source

# What an engine answers of a prompt of which nothing is handed over: the other one computes it.
COMPUTED_THERE: Mapping[str, bool] = {"do_remote_prefill": False, "do_remote_decode": False}


def digest_of_tokens(token_ids: Sequence[int], *more: str) -> bytes:
    """Return a digest of the head of a prompt, see ``Ask``.

    Args:
        token_ids: of the head.
        more: texts of what else its blocks depend on, besides the model.
    """
    digest = hashlib.sha256(array("q", token_ids).tobytes())
    for text in more:
        digest.update(text.encode())
    return digest.digest()


def answer_params(
    ranks: Sequence[str], engine_id: str, transfer_id: str, request_id: str, num_tokens: int
) -> dict[str, Any]:
    """Return what an engine answers that has prefilled: those for the engine that decodes.

    Args:
        ranks: the transfer engine's name of each of its ranks.
        engine_id: of the engine.
        transfer_id: of the transfer.
        request_id: of the request there.
        num_tokens: that are handed over.
    """
    host, _, port = (ranks[0] if ranks else ":0").rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": int(port),
        "remote_ranks": list(ranks),
        "remote_num_tokens": num_tokens,
        "tp_size": len(ranks),
    }


def transfer_id_of(params: Mapping[str, Any], request_id: str) -> str | None:
    """Return the name by which the prefill engine knows a request; None if it can be no name."""
    name = params.get("transfer_id") or params.get("remote_request_id") or request_id
    if isinstance(name, int):
        name = str(name)
    return name if _is_text(name) else None


def source_of(params: Mapping[str, Any]) -> Source | None:
    """Return the engine that ``kv_transfer_params`` name; None if they name none, or wrongly.

    ``remote_ranks`` is what a prefill engine has answered; ``remote_host`` and ``remote_port``, or
    ``remote_bootstrap_addr``, are what a proxy knows beforehand. They come from a client: whatever
    they hold, this raises nothing.
    """
    engine_id = params.get("remote_engine_id")
    ranks, host, port = (params.get(f"remote_{name}") for name in ("ranks", "host", "port"))
    if not isinstance(engine_id, str):
        engine_id = ""
    if engine_id and not _is_text(engine_id):
        return None
    if isinstance(ranks, list) and ranks:
        is_right = len(ranks) <= MAX_RANKS and all(_is_address(rank) for rank in ranks)
        return Source(engine_id, tuple(ranks)) if is_right else None
    if isinstance(address := params.get("remote_bootstrap_addr"), str):
        first = address.partition("://")[2] if "://" in address else address
        first = first.lstrip("/").partition("/")[0]
    elif isinstance(host, str) and isinstance(port, int | str):
        first = f"[{host}]:{port}" if ":" in host and host[0] != "[" else f"{host}:{port}"
    else:
        return None
    return Source(engine_id, first_rank=first) if _is_address(first) else None


def _is_text(value: object) -> bool:
    """Whether it fits in a message."""
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()


def _is_address(value: object) -> bool:
    """Whether it is "host:port", with an address of IPv6 in brackets."""
    if not isinstance(value, str) or not _is_text(value):
        return False
    host, _, port = value.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16
    is_bracketed = host.startswith("[") and host.endswith("]") and len(host) > 2
    return is_port and bool(host) and (is_bracketed or not set(host) & set("[]:/@ "))
