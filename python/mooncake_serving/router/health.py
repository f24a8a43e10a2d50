"""Looks at all engines from time to time: which are up, and what they serve."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from mooncake_serving.http_api import ErrorAnswer

from .config import RouterConfig
from .engines import EngineFailed, Engines
from .placement import Placement

logger = logging.getLogger(__name__)

FAILURES = 2  # in a row, after which an engine that was up is down
LOOKS_BETWEEN_CARDS = 15  # adapters come and go, and an engine may restart between two looks


class HealthWatch:
    """Tells the placement which engines are up. ``await start()`` it, and ``await close()`` it.

    Args:
        config: which engines there are.
        engines: by which they are asked.
        placement: that is told.
        lost: is called with an engine that is down, and the requests that were there.
    """

    def __init__(
        self,
        config: RouterConfig,
        engines: Engines,
        placement: Placement,
        lost: Callable[[int, list[str]], None],
    ):
        self._config, self._engines, self._placement = config, engines, placement
        self._lost = lost
        count = len(config.instances)
        self._failures, self._looks = [0] * count, [0] * count
        self._cards: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self._engine_ids = [""] * count
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look at all engines once, and from now on every ``health_s`` seconds."""
        await self._look_at_all()
        self._task = asyncio.ensure_future(self._watch())

    async def close(self) -> None:
        """Stop. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def down(self, instance: int) -> None:
        """Record that an engine is down."""
        if self._placement.is_up(instance):
            logger.warning("%s is down", self._config.instances[instance].name)
            self._lost(instance, self._placement.failed(instance))

    def models(self) -> list[dict[str, Any]]:
        """Return the cards of what the engines serve, as the first that has each describes it."""
        cards: dict[str, dict[str, Any]] = {}
        for each in self._cards:
            for card in each:
                cards.setdefault(card["id"], card)
        return [*cards.values()]

    def adapter_of(self, model: str) -> str:
        """Return the LoRA adapter that a model's name means; "": the model itself.

        Raises:
            ErrorAnswer: engines have said what they serve, and it is not among that.
        """
        known = self.models()
        for card in known:
            if card["id"] == model:
                return model if card.get("parent") else ""
        if known:
            names = ", ".join(card["id"] for card in known)
            what = f"model must be one of {names}, got {model[:80]!r}"
            raise ErrorAnswer(404, what, "model_not_found", "model")
        return ""

    def lacking(self, model: str) -> set[int]:
        """Return which engines have said what they serve, and a model is not among that."""
        return {
            number
            for number, cards in enumerate(self._cards)
            if cards and all(card["id"] != model for card in cards)
        }

    def engine_id(self, instance: int) -> str:
        """Return what an engine's bootstrap server calls it; "": it has none."""
        return self._engine_ids[instance]

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._config.health_s)
            await self._look_at_all()
            self._placement.prefill_cost.refit()
            self._placement.decode_cost.refit()

    async def _look_at_all(self) -> None:
        await asyncio.gather(*map(self._look, range(len(self._config.instances))))

    async def _look(self, number: int) -> None:
        self._looks[number] += 1
        try:
            await self._ask(number)
            self._failures[number] = 0
        except EngineFailed as error:
            if error.is_ours:
                logger.warning("%s", error)
                return
            logger.debug("%s", error)
            self._failures[number] += 1
            if self._failures[number] >= FAILURES:
                self.down(number)

    async def _ask(self, number: int) -> None:
        """Ask an engine how it is; once it is up, what it serves.

        Raises:
            EngineFailed: it does not answer.
        """
        instance = self._config.instances[number]
        await self._engines.check_health(instance)
        was_up = self._placement.is_up(number)
        if not was_up or self._looks[number] % LOOKS_BETWEEN_CARDS == 0:
            self._cards[number] = await self._engines.models(instance)
            if instance.bootstrap:
                self._engine_ids[number] = await self._engines.engine_id(instance)
        if was_up:
            return
        self._placement.recovered(number, await self._engines.capacity_tokens(instance))
        logger.info("%s is up: %s", instance.name, self._cards[number][0]["id"])
