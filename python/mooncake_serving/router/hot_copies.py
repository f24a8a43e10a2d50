"""Copies of hot prefixes: engines load them from their store before requests need them there."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from mooncake_serving.conductor import Heat, ReplicaPolicy, Replicate, Role

from .call import COMPLETIONS, Call
from .config import CopiesConfig
from .decisions import MAX_MODEL
from .engines import EngineFailed, EngineRefused
from .handoff import HANDOFFS

if TYPE_CHECKING:
    from .router import Router

logger = logging.getLogger(__name__)

MAX_KEPT = 100
MAX_SEEN = 4096  # prompts between two looks; the first of more are not counted
MAX_LOOKS = 64  # at the prompts that came last
LOOK_S = 0.25
PAUSE_S = 30.0  # in which an engine that has failed a copy is not asked for another one


class _Seen(NamedTuple):
    """A prompt that was placed.

    Attributes:
        model: that it asks for.
        tokens: of the prompt.
        keys: of its blocks.
        at_s: when.
    """

    model: str
    tokens: list[int]
    keys: Sequence[int]
    at_s: float


class HotCopies:
    """Has engines load prefixes that are asked for often: one at a time, in the background.

    An engine loads a prefix as it does for a client: it is sent the tokens, and is to generate one
    token. So it needs no call of its own, but a store that its connector loads from. An engine
    that has prompts to compute is left alone.

    Args:
        router: whose engines they are.
        config: which prefixes are hot, and how many copies are made.
    """

    def __init__(self, router: "Router", config: CopiesConfig):
        self._router, self._min_s = router, 1 / config.max_per_s
        self._heat = Heat()
        size = router.config.block_size
        self._policy = ReplicaPolicy(config.rate_per_holder, config.max_holders, size)
        # Of those that hand over at once, an engine that prefills takes no request by itself.
        self._only_both = HANDOFFS[router.config.connector].is_at_once
        self._seen: deque[_Seen] = deque(maxlen=MAX_SEEN)
        self._kept: deque[dict[str, Any]] = deque(maxlen=MAX_KEPT)
        self._paused: dict[str, float] = {}  # names of engines that failed, and until when
        self._looking: asyncio.Task[None] | None = None
        self._copying: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, router: "Router") -> "HotCopies | None":
        """Make those of a router whose file asks for copies; None: it does not."""
        store = router.config.store
        return None if store is None or store.copies is None else cls(router, store.copies)

    def start(self) -> None:
        """Begin to look for hot prefixes."""
        self._looking = asyncio.ensure_future(self._look())

    async def close(self) -> None:
        """Give up the copy that is made, and make no more. Idempotent."""
        tasks = {task for task in (self._looking, self._copying) if task is not None}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def saw(self, call: Call, keys: Sequence[int]) -> None:
        """Count a request that was placed; prompts whose blocks are not known do not count."""
        if call.tokens is not None and keys:
            self._seen.append(_Seen(call.model, call.tokens, keys, time.monotonic()))

    def last(self, count: int) -> list[dict[str, Any]]:
        """Return the last copies, at most ``count``, the latest first."""
        return [*self._kept][: -count - 1 : -1]

    async def _look(self) -> None:
        next_s = 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            prompts = [*self._seen]
            self._seen.clear()
            for seen in prompts:
                self._heat.touch(seen.keys, seen.at_s)
                await asyncio.sleep(0)  # others take as long as it takes to place one request
            is_copying = self._copying is not None and not self._copying.done()
            if is_copying or time.monotonic() < next_s:
                continue
            for seen in prompts[: -MAX_LOOKS - 1 : -1]:
                if (advice := self._advise(seen)) is not None:
                    next_s = time.monotonic() + self._min_s
                    self._copying = asyncio.ensure_future(self._copy(seen, advice))
                    break
                await asyncio.sleep(0)

    def _advise(self, seen: _Seen) -> Replicate | None:
        """Choose a copy that can be made now."""
        router = self._router
        lacking = router.health.lacking(seen.model)
        advice = router.placement.advise_copy(self._policy, self._heat, seen.keys, lacking)
        if advice is None or not router.placement.is_idle(advice.target):
            return None
        target = router.fleet[advice.target]
        if self._only_both and target.role != Role.BOTH:
            return None
        return None if time.monotonic() < self._paused.get(target.name, 0.0) else advice

    async def _copy(self, seen: _Seen, advice: Replicate) -> None:
        router, number = self._router, advice.target
        target, size = router.fleet[number], router.config.block_size
        end = seen.keys.index(advice.keys[-1]) + 1
        # The last token of a prompt is always computed: with one more, all blocks are loaded.
        prompt = seen.tokens[: end * size + 1]
        body = {"model": seen.model, "prompt": prompt, "max_tokens": 1}
        call = Call(COMPLETIONS, body, msgspec.json.encode(body))
        entry = self._note(seen, advice)
        held: Sequence[int] = ()
        router.placement.copying(call.request_id, number, advice.seconds)
        try:
            await router.engines.ask(target, call, call.raw)
            held, entry["outcome"] = seen.keys[:end], "made"
            router.metrics.copies.labels("made").inc()
            router.metrics.copied_tokens.inc(advice.num_tokens)
            self._paused.pop(target.name, None)
        except (EngineFailed, EngineRefused) as error:
            entry["outcome"] = f"failed: {_told(error)}"
            router.metrics.copies.labels("failed").inc()
            if target.name not in self._paused:  # told once, until it makes one
                logger.warning("%s does not load a hot prefix: %s", target.name, _told(error))
            self._paused[target.name] = time.monotonic() + PAUSE_S
        finally:
            entry["seconds"] = time.monotonic() - call.arrived_s
            is_same = number in router.fleet and router.fleet[number] is target
            router.placement.copied(call.request_id, number, held if is_same else ())

    def _note(self, seen: _Seen, advice: Replicate) -> dict[str, Any]:
        """Keep what is told of a copy; how it ends is written into what this returns."""
        fleet = self._router.fleet
        entry: dict[str, Any] = {
            "at": time.time(),
            "model": seen.model[:MAX_MODEL],
            "instance": fleet[advice.target].name,
            "holder": fleet[advice.source].name,
            "tokens": advice.num_tokens,
            "predicted_s": advice.seconds,
            "reason": str(advice.reason),
        }
        self._kept.append(entry)
        return entry


def _told(error: EngineFailed | EngineRefused) -> str:
    return f"HTTP {error.status}" if isinstance(error, EngineRefused) else str(error)
