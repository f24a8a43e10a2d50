"""The life of a block: what the engines' KV events and the router's decisions tell of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_kernels.closeable import Closeable
from mooncake_serving.store.events import BlockRemoved, BlockStored, subscribe

EVENT_S = 0.05  # that one more event may take


@dataclass(frozen=True)
class Moment:
    """Something that happened to a block.

    Attributes:
        at_s: when, in seconds since 1970.
        engine: where.
        what: "stored", "hit" or "removed".
    """

    at_s: float
    engine: str
    what: str


class BlockWatch(Closeable):
    """Receives the KV events of engines.

    Args:
        endpoints: of each engine, by its name: of its events, and of those that were missed.
    """

    def __init__(self, endpoints: Mapping[str, tuple[str, str]]):
        self._subscriptions = {
            name: subscribe(events, replay_endpoint=replay)
            for name, (events, replay) in endpoints.items()
        }
        self._moments: dict[int, list[Moment]] = {}  # by the block's name

    def life_of(
        self, block: int, first_token: int, decisions: list[dict[str, Any]]
    ) -> list[Moment]:
        """Return what has happened to a block so far, in order.

        Args:
            block: its name.
            first_token: where it begins in the prompts that have it.
            decisions: about these prompts.
        """
        self._receive()
        hits = [
            Moment(one["at"], one["prefill"]["instance"], "hit")
            for one in decisions
            if one["prefill"]["cached_tokens"] > first_token
        ]
        return sorted([*self._moments.get(block, []), *hits], key=lambda moment: moment.at_s)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        for subscription in self._subscriptions.values():
            subscription.close()

    def _receive(self) -> None:
        for name, subscription in self._subscriptions.items():
            while (batch := subscription.receive(EVENT_S)) is not None:
                for event in batch.events:
                    if isinstance(event, BlockStored | BlockRemoved):
                        what = "stored" if isinstance(event, BlockStored) else "removed"
                        for block in event.block_hashes:
                            self._add(int(block), Moment(batch.timestamp, name, what))

    def _add(self, block: int, moment: Moment) -> None:
        moments = self._moments.setdefault(block, [])
        before = [one.what for one in moments if one.engine == moment.engine]
        if before[-1:] != [moment.what]:  # a block is told again with those that follow it
            moments.append(moment)
