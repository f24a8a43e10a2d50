"""Looks at all engines from time to time: which are up, and what they serve."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mooncake_serving.conductor import Role
from mooncake_serving.http_api import ErrorAnswer, invalid

from .call import REUSE, SEMANTIC
from .config import RouterConfig
from .engines import EngineFailed, Engines
from .handoff import HANDOFFS
from .instances import Instances
from .placement import Placement

logger = logging.getLogger(__name__)

FAILURES = 2  # in a row, after which an engine that was up is down
MAX_LOOKS_PER_S = 100  # at all engines: with more than 200, each is looked at less often
LOOKS_BETWEEN_CARDS = 15  # adapters come and go, and an engine may restart between two looks


@dataclass(eq=False)
class _Seen:
    """What an engine has told so far."""

    failures: int = 0
    looks: int = 0
    cards: list[dict[str, Any]] = field(default_factory=list)
    engine_id: str = ""
    task: "asyncio.Task[None] | None" = None


class HealthWatch:
    """Tells the placement which engines are up, and what they do for others.

    ``await add(number)`` each engine, and ``await close()`` it.

    Args:
        config: how often to look.
        instances: the engines.
        engines: by which they are asked.
        placement: that is told.
        lost: is called with an engine that is down, and the requests that were there.
    """

    def __init__(
        self,
        config: RouterConfig,
        instances: Instances,
        engines: Engines,
        placement: Placement,
        lost: Callable[[int, list[str]], None],
    ):
        self._config, self._instances = config, instances
        self._engines, self._placement = engines, placement
        self._lost, self._handoff = lost, HANDOFFS[config.connector]
        self._seen: dict[int, _Seen] = {}

    async def add(self, number: int) -> None:
        """Look at an engine once, and from now on every ``health_s`` seconds, or less often."""
        seen = self._seen[number] = _Seen()
        await self._look(number, seen)
        if self._seen.get(number) is seen:  # it was not closed meanwhile
            seen.task = asyncio.ensure_future(self._watch(number, seen))

    async def remove(self, number: int) -> None:
        """Look at an engine no more. Idempotent."""
        seen = self._seen.pop(number, None)
        if seen is not None and seen.task is not None:
            seen.task.cancel()
            await asyncio.wait({seen.task})

    async def close(self) -> None:
        """Look at none any more. Idempotent."""
        await asyncio.gather(*map(self.remove, [*self._seen]))

    def down(self, instance: int) -> None:
        """Record that an engine is down."""
        if self._placement.is_up(instance):
            logger.warning("%s is down", self._instances[instance].name)
            self._lost(instance, self._placement.failed(instance))

    def models(self) -> list[dict[str, Any]]:
        """Return the cards of what the engines serve, as the first that has each describes it, but
        with all that engines take as ``kv_reuse``.
        """
        cards: dict[str, dict[str, Any]] = {}
        for seen in self._seen.values():
            for card in seen.cards:
                known = cards.setdefault(card["id"], card)
                if _lists(card, REUSE, SEMANTIC) and not _lists(known, REUSE, SEMANTIC):
                    cards[card["id"]] = known | {REUSE: card[REUSE]}
        return [*cards.values()]

    def adapter_of(self, model: str) -> str:
        """Return the LoRA adapter that a model's name means; "": the model itself.

        Raises:
            ErrorAnswer: engines have said what they serve, and it is not among that.
        """
        known = self.models()
        for card in known:
            if card["id"] == model:
                parent = card.get("parent")
                return model.removeprefix(f"{parent}:") if parent else ""
        if known:
            names = ", ".join(card["id"] for card in known)
            what = f"model must be one of {names}, got {model[:80]!r}"
            raise ErrorAnswer(404, what, "model_not_found", "model")
        return ""

    def lacking(self, model: str, *, is_semantic: bool = False) -> set[int]:
        """Return which engines cannot serve a request: they have said what they serve, and its
        model is not among that; or they have not said that they take what it asks for.

        Raises:
            ErrorAnswer: engines have said what they take, and none can compute its prompt so.
        """
        lacking = {
            number
            for number, seen in self._seen.items()
            if seen.cards and all(card["id"] != model for card in seen.cards)
        }
        if not is_semantic:
            return lacking
        prefill = {number for number, one in self._instances.items() if one.role & Role.PREFILL}
        for number, seen in self._seen.items():
            name = REUSE if number in prefill else f"received_{REUSE}"
            if not any(_lists(card, name, SEMANTIC) for card in seen.cards):
                lacking.add(number)
        if prefill and lacking >= prefill and any(seen.cards for seen in self._seen.values()):
            raise invalid(REUSE, "exact: no engine has --semantic-blocks, got 'semantic'")
        return lacking

    def reuse_of(self, number: int) -> list[str]:
        """Return what an engine takes as ``kv_reuse``, besides "exact"."""
        seen = self._seen.get(number, _Seen())
        return [SEMANTIC] if any(_lists(card, REUSE, SEMANTIC) for card in seen.cards) else []

    def engine_id(self, instance: int) -> str:
        """Return what an engine's bootstrap server calls it; "": it was not asked."""
        return self._seen[instance].engine_id

    def set_engine_id(self, instance: int, engine_id: str) -> None:
        """Record what an engine's bootstrap server calls it, which was asked just now."""
        self._seen[instance].engine_id = engine_id

    async def _watch(self, number: int, seen: _Seen) -> None:
        wait = 1.0 + random.random()  # intervals: engines that came together are not looked at so
        while True:
            interval_s = max(self._config.health_s, len(self._seen) / MAX_LOOKS_PER_S)
            await asyncio.sleep(wait * interval_s)
            wait = 1.0
            await self._look(number, seen)

    async def _look(self, number: int, seen: _Seen) -> None:
        seen.looks += 1
        try:
            await self._ask(number, seen)
            seen.failures = 0
        except EngineFailed as error:
            if error.is_ours:
                logger.warning("%s", error)
                return
            logger.debug("%s", error)
            self._failed(number, seen)
        except Exception:  # whatever an engine answers, it is looked at again
            logger.exception("%s cannot be looked at", self._instances[number].name)
            self._failed(number, seen)

    def _failed(self, number: int, seen: _Seen) -> None:
        seen.failures += 1
        if seen.failures >= FAILURES:
            self.down(number)

    async def _ask(self, number: int, seen: _Seen) -> None:
        """Ask an engine how it is and what it does; once it is up, what it serves.

        Raises:
            EngineFailed: it does not answer.
        """
        instance = self._instances[number]
        await self._engines.check_health(instance, self._handoff.health_timeout_s)
        was_up = self._placement.is_up(number)
        if not was_up or seen.looks % LOOKS_BETWEEN_CARDS == 0:
            seen.cards = await self._engines.models(instance)
            if instance.bootstrap and self._handoff.has_engine_ids:
                engine_id = await self._engines.engine_id(instance)
                if self._instances[number] == instance:  # nothing else was registered meanwhile
                    seen.engine_id = engine_id
        load = await self._engines.load(instance)
        if not was_up:
            self._placement.recovered(number, load.capacity_tokens if load else 0)
            logger.info("%s is up: %s", instance.name, seen.cards[0]["id"])
        self._placement.reported(number, load)


def _lists(card: dict[str, Any], name: str, value: str) -> bool:
    """Whether an entry of a card is a list with a value; engines may answer anything."""
    entry = card.get(name)
    return isinstance(entry, list) and value in entry
