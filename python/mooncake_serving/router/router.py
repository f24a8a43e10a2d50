"""The life of a request: placed, prefilled, decoded, and answered; or placed again."""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
from starlette.datastructures import Headers

from mooncake_serving.conductor import Decision, Role, Why
from mooncake_serving.http_api import (
    Bodies,
    ClientStalled,
    ErrorAnswer,
    Receive,
    Reply,
    Scope,
    invalid,
    overloaded,
)

from .call import NO_JSON, Call, read_call
from .config import InstanceConfig, RouterConfig
from .decisions import DecisionLog, header_of
from .engines import (
    OURS,
    PROBE_S,
    EngineBusy,
    EngineFailed,
    EngineRefused,
    Engines,
    refusal_of,
)
from .event_feed import EventFeed
from .handoff import HANDOFFS, Transfer
from .health import HealthWatch
from .hot_copies import HotCopies
from .instances import Instances
from .metrics import RouterMetrics
from .placement import Placed, Placement
from .stream_steps import StreamSteps

logger = logging.getLogger(__name__)

CLASS_HEADER = "x-mooncake-class"
CLIENT_LEFT = 499  # in metrics, as nginx has it
EVENTS = 16  # of a stream, whose mean interval is one sample
UNAVAILABLE = (Why.NO_PREFILL_INSTANCE, Why.NO_DECODE_INSTANCE, Why.TOO_LONG)


class Router:
    """Serves requests by engines. ``await start()`` it, and ``await close()`` it.

    Args:
        config: which engines, and how.

    Attributes:
        fleet: the engines that it has now.
        placement: decides.
        log: of its decisions.
        metrics: for Prometheus.
        bodies: of requests.
        copies: of hot prefixes; None: none are made.
    """

    def __init__(self, config: RouterConfig):
        self.config = config
        self.fleet = Instances(config.instances, config.max_instances)
        self.placement = Placement(config, self.fleet)
        self.log = DecisionLog(self.fleet, config.admission)
        self.metrics = RouterMetrics(self)
        self.bodies = Bodies(config.max_body_bytes, config.max_held_bytes, config.client_s)
        self.engines = Engines(config)
        self.health = HealthWatch(config, self.fleet, self.engines, self.placement, self._lost)
        self.copies = HotCopies.of(self)
        self._handoff = HANDOFFS[config.connector]
        self._attempts: dict[str, _Attempt] = {}
        self._feeds: dict[int, EventFeed] = {}
        self._refitting: asyncio.Task[None] | None = None
        self._next_tokenizer = 0
        self._num_requests = 0

    async def start(self) -> None:
        """Look at all engines once, and follow them from now on.

        Raises:
            InvalidArgument: an endpoint of events is invalid.
        """
        await asyncio.gather(*map(self.follow, self.fleet))
        self._refitting = asyncio.ensure_future(self._refit())
        if self.copies is not None:
            self.copies.start()

    async def close(self) -> None:
        """Stop following the engines, and disconnect. Idempotent."""
        if self._refitting is not None:
            self._refitting.cancel()
            await asyncio.wait({self._refitting})
        if self.copies is not None:
            await self.copies.close()
        await self.health.close()
        await asyncio.gather(*map(self._end_feed, [*self._feeds]))
        await self.engines.close()

    async def follow(self, number: int) -> None:
        """Take in an engine of the fleet: its events, and how it is, from now on.

        Raises:
            InvalidArgument: its endpoint of events is invalid.
        """
        self.placement.add(number)
        self.feed(number, self.fleet[number])
        await self.health.add(number)

    def feed(self, number: int, instance: InstanceConfig) -> None:
        """Receive an engine's events, if it has any, as it is described.

        Raises:
            InvalidArgument: its endpoint of events is invalid.
        """
        if instance.events:
            self._feeds[number] = EventFeed(instance, self.placement.blocks[number])

    async def leave(self, number: int) -> None:
        """Forget an engine that has no requests any more."""
        await self.health.remove(number)
        await self._end_feed(number)
        self.placement.remove(number)
        self.metrics.replaced.remove(self.fleet[number].name)
        self.fleet.remove(number)

    def num_open(self, number: int) -> int:
        """Count the requests that need an engine, and were not given up."""
        return len(self._attempts_at(number))

    def give_up(self, number: int) -> None:
        """Give up the requests that need an engine: others may serve those without an answer."""
        for attempt in self._attempts_at(number):
            self._lose(attempt, number, "it leaves", has_failed=False)

    async def serve(self, path: str, scope: Scope, receive: Receive, reply: Reply) -> None:
        """Answer a request, unless its client leaves.

        Args:
            path: ``CHAT`` or ``COMPLETIONS``.
            scope: of the request.
            receive: of the request.
            reply: where it is answered.
        """
        unanswered = CLIENT_LEFT
        try:
            self._check_load()
            name = self._class_of(scope)
            async with self.bodies.read(scope, receive) as raw:
                if raw is not None:
                    await self._serve(path, raw, name, receive, reply)
        except ErrorAnswer as error:
            await reply.error(error)
        except ClientStalled as stalled:
            logger.warning("%s", stalled)
        except Exception:
            unanswered = 500
            raise
        finally:
            self.metrics.requests.labels(path, reply.status or unanswered).inc()

    def instances(self) -> list[dict[str, Any]]:
        """Describe all engines, as they are now."""
        cluster, others = self.placement.conductor.cluster, self.placement.others
        return [
            {
                "name": instance.name,
                "url": instance.url,
                "role": instance.role.name.lower() if instance.role.name else "",
                "kv_reuse": ["exact", *self.health.reuse_of(number)],
                "up": self.placement.is_up(number),
                "draining": self.placement.is_draining(number),
                "prefills": self.placement.num_prefills(number),
                "decoding": self.placement.num_decoding(number),
                "others_running": int(others.running[number]),
                "others_waiting": int(others.waiting[number]),
                "kv_tokens": int(cluster.kv_tokens[number]),
                "capacity_tokens": int(cluster.capacity_tokens[number]),
                "held_blocks": blocks.num_held,
                "event_batches": blocks.num_batches,
                "event_gaps": blocks.num_gaps,
                "unnamed_blocks": blocks.num_unnamed,
            }
            for number, instance in self.fleet.items()
            for blocks in (self.placement.blocks[number],)
        ]

    async def _serve(
        self, path: str, raw: bytes, class_name: str, receive: Receive, reply: Reply
    ) -> None:
        self._check_load()  # a request counts from its body on, for which a client may take long
        call = read_call(path, raw)
        call.class_name = class_name
        self._num_requests += 1
        client_left = asyncio.ensure_future(receive())  # nothing else can come
        try:
            await self._answer(call, client_left, reply)
        finally:
            client_left.cancel()
            self._num_requests -= 1

    def _class_of(self, scope: Scope) -> str:
        """Return the class that a request's header names; "": none.

        Raises:
            ErrorAnswer: there is no such class.
        """
        name: str = Headers(scope=scope).get(CLASS_HEADER, "")
        known = self.config.admission.classes
        if name and name not in known:
            wanted = f"one of {', '.join(known)}" if known else "left out, there are no classes"
            raise invalid(f"the header {CLASS_HEADER}", f"{wanted}, got {name[:80]!r}")
        return name

    def _check_load(self) -> None:
        if self._num_requests >= self.config.max_requests:
            most = self.config.max_requests
            raise overloaded(f"{most} requests are under way, and no more are taken")

    async def _answer(self, call: Call, client_left: "asyncio.Future[Any]", reply: Reply) -> None:
        """Place a request until it is answered, or its client has left.

        Raises:
            ErrorAnswer: it is refused, or has failed too often.
        """
        adapter = self.health.adapter_of(call.model)
        if call.tokens is None:
            call.tokens = await self._tokenize(call, client_left)
        lacking = self.health.lacking(call.model, is_semantic=call.is_semantic)
        without: set[int] = set()
        num_failed, failure = 0, ""
        busy: dict[int, EngineRefused] = {}
        while num_failed < self.config.max_attempts and not client_left.done():
            call.num_attempts += 1
            placed = self.placement.place(call, adapter=adapter, without=without, lacking=lacking)
            if isinstance(placed, Decision):
                may_hold = self.placement.may_hold(placed.request, lacking)
                raise self._refusal(call, placed, failure, may_hold=may_hold)
            if not busy.keys().isdisjoint((placed.prefill, placed.decode)):
                self.placement.ended(placed)
                break
            try:
                await self._attempt(call, placed, client_left, reply)
                return
            except _AttemptFailed as failed:
                failure = str(failed.error)
                without.add(failed.instance)
                num_failed += failed.has_failed
                self._note_failure(failed)
                if isinstance(failed.error, EngineBusy):
                    busy[failed.instance] = failed.error.refused
        if busy and not client_left.done():
            refused = [*busy.values()][-1]
            await reply.whole(refused.status, refused.headers, refused.body)
        elif not client_left.done():
            message = f"the request failed {num_failed} times: {failure}"
            raise ErrorAnswer(502, message, "engine_failed")

    async def _attempt(
        self, call: Call, placed: Placed, client_left: "asyncio.Future[Any]", reply: Reply
    ) -> None:
        """Have a request served where it was placed, unless its client leaves.

        Raises:
            _AttemptFailed: an engine has failed before the first byte.
            ErrorAnswer: it is refused after its prefill.
        """
        entry = self.log.add(call, placed.decision)
        self._count(placed)
        if self.copies is not None and call.num_attempts == 1:
            self.copies.saw(call, placed.decision.request.keys)
        if self.fleet[placed.prefill].role == Role.BOTH:
            run = self._coupled
        else:
            run = self._at_once if self._handoff.is_at_once else self._handed_over
        task = asyncio.ensure_future(run(call, placed, entry, reply))
        attempt = self._attempts[call.request_id] = _Attempt(task, reply, placed)
        try:
            await asyncio.wait({task, client_left}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                entry["outcome"] = "answered" if reply.is_whole else "the client has left"
                return
            if attempt.lost is not None:
                raise attempt.lost
            task.result()
            entry["outcome"] = "answered"
        except _AttemptFailed as failed:
            entry["outcome"] = f"failed: {failed.error}"
            if isinstance(failed.error, EngineBusy):
                failed.error.refused.headers["x-mooncake-decision"] = header_of(entry)
            if not reply.status:
                raise
            logger.warning("a stream has ended early: %s", failed.error)
            await reply.error(ErrorAnswer(502, str(failed.error), "engine_failed"))
        except ClientStalled as stalled:
            entry["outcome"] = str(stalled)
            raise
        except EngineRefused as refused:
            entry["outcome"] = f"the engine has answered {refused.status}"
            headers = {**refused.headers, "x-mooncake-decision": header_of(entry)}
            await reply.whole(refused.status, headers, refused.body)
        finally:
            del self._attempts[call.request_id]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.placement.ended(placed)
            entry["seconds"] = time.monotonic() - call.arrived_s

    async def _coupled(
        self, call: Call, placed: Placed, entry: dict[str, Any], reply: Reply
    ) -> None:
        """Have one engine do everything."""
        timer = None
        if not call.is_stream and placed.decision.prefill is not None:
            loop, ttft_s = asyncio.get_running_loop(), placed.decision.prefill.ttft_s
            timer = loop.call_later(ttft_s, self.placement.estimated_prefilled, placed)
        try:
            await self._pass_on(call, call.raw, placed, entry, reply)
        finally:
            if timer is not None:
                timer.cancel()

    async def _handed_over(
        self, call: Call, placed: Placed, entry: dict[str, Any], reply: Reply
    ) -> None:
        """Have one engine compute the prompt, and another one generate then."""
        transfer = self._transfer(call, placed)
        answer = await self._prefill(call, placed, transfer)
        body = self._handoff.decode_body(call.body, transfer, answer)
        if body is None:
            what = "it answers no kv_transfer_params: has it a connector?"
            raise _AttemptFailed(placed.prefill, EngineFailed(transfer.prefill, what))
        later = self.placement.prefilled(placed)
        entry["prefilled_s"] = time.monotonic() - call.arrived_s
        if later is not None and not later.accepted:
            entry["outcome"] = f"refused after its prefill: {later.reason}"
            error = self._error_of(call, later)
            told = header_of({**entry, "why": later.reason.why.name})
            prefilled = f"prefilled_s={entry['prefilled_s']:.4f}"
            error.headers = {**error.headers, "x-mooncake-decision": f"{told}; {prefilled}"}
            raise error
        if later is not None:
            entry["decode"] = self.log.decode_part(later)
        await self._pass_on(call, msgspec.json.encode(body), placed, entry, reply)

    async def _at_once(
        self, call: Call, placed: Placed, entry: dict[str, Any], reply: Reply
    ) -> None:
        """Have two engines serve a request together: one computes the prompt for the other."""
        transfer = self._transfer(call, placed)
        body = self._handoff.decode_body(call.body, transfer, {})
        prefill = asyncio.ensure_future(self._prefill(call, placed, transfer))
        decode = asyncio.ensure_future(
            self._pass_on(call, msgspec.json.encode(body), placed, entry, reply)
        )
        tasks = {prefill, decode}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if prefill.done():
                if (error := prefill.exception()) and not reply.status:
                    raise error
                self.placement.prefilled(placed)
                entry["prefilled_s"] = time.monotonic() - call.arrived_s
            await decode  # which has the prompt's KV once it has begun to answer
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _transfer(self, call: Call, placed: Placed) -> Transfer:
        number = placed.prefill
        return Transfer(call.attempt_id, self.fleet[number], self.health.engine_id(number))

    async def _prefill(self, call: Call, placed: Placed, transfer: Transfer) -> dict[str, Any]:
        """Have a prompt computed, and return what the engine answers."""
        body = msgspec.json.encode(self._handoff.prefill_body(call.body, transfer))
        try:
            return await self.engines.ask(transfer.prefill, call, body)
        except EngineFailed as error:
            raise _AttemptFailed(placed.prefill, error) from None

    async def _pass_on(
        self, call: Call, body: bytes, placed: Placed, entry: dict[str, Any], reply: Reply
    ) -> None:
        """Send a request to the engine that generates, and its answer to the client."""
        number = placed.decode
        try:
            async with self.engines.post(self.fleet[number], call, body) as answer:
                headers = {
                    "content-type": answer.headers.get("content-type", "application/json"),
                    "x-request-id": call.request_id,
                }
                if call.is_stream:
                    await self._pass_stream(call, answer, headers, placed, entry, reply)
                    return
                content = await answer.aread()
        except EngineFailed as error:
            raise _AttemptFailed(number, error) from None
        self.placement.estimated_prefilled(placed)  # when it was over is not told
        headers["x-mooncake-decision"] = header_of(entry)
        await reply.whole(answer.status_code, headers, content)

    async def _pass_stream(
        self,
        call: Call,
        answer: httpx.Response,
        headers: dict[str, str],
        placed: Placed,
        entry: dict[str, Any],
        reply: Reply,
    ) -> None:
        """Send parts as they come; the answer begins with the first of them."""
        steps, begun_s = StreamSteps(call), 0.0
        num_sampled, since_s = 0, 0.0
        async for part in answer.aiter_raw():
            if not reply.status:
                if part.startswith(b'data: {"error"'):
                    raise _error_in(part, self.fleet[placed.decode])
                begun_s = since_s = time.monotonic()
                self.placement.prefilled(placed)
                entry["first_byte_s"] = since_s - call.arrived_s
                self.metrics.ttft.observe(entry["first_byte_s"])
                headers["x-mooncake-decision"] = header_of(entry)
                await reply.begin(answer.status_code, headers)
                steps.begin(part)
            elif steps.add(part):
                now_s = time.monotonic()
                entry["tbt_s"] = (now_s - begun_s) / steps.num_events
                if (count := steps.num_events - num_sampled) >= EVENTS:
                    self.placement.sample(placed, (now_s - since_s) / count)
                    num_sampled, since_s = steps.num_events, now_s
                    if not steps.is_told:
                        self.placement.sampled(placed, steps.per_event)
            await reply.write(part)
        if steps.num_tokens:
            self.placement.sampled(placed, steps.per_event)
        if not reply.status:
            raise EngineFailed(self.fleet[placed.decode], "its stream is empty")
        await reply.write(b"", is_last=True)

    async def _tokenize(self, call: Call, client_left: "asyncio.Future[Any]") -> list[int] | None:
        """Ask one engine after another for the tokens of a prompt; None: they did not tell.

        Raises:
            ErrorAnswer: the prompt is wrong.
        """
        numbers, lacking = (
            [*self.fleet],
            self.health.lacking(call.model, is_semantic=call.is_semantic),
        )
        num_asked = 0
        for _ in numbers:
            self._next_tokenizer += 1
            number = numbers[self._next_tokenizer % len(numbers)]
            if number not in self.fleet or not self.placement.is_up(number) or number in lacking:
                continue
            task = asyncio.ensure_future(self.engines.tokenize(self.fleet[number], call))
            try:
                await asyncio.wait(
                    {task, client_left}, timeout=PROBE_S, return_when=asyncio.FIRST_COMPLETED
                )
                if task.done() and (tokens := task.result()) is not None:
                    return tokens
            finally:
                task.cancel()
            num_asked += 1
            if num_asked == self.config.max_attempts or client_left.done():
                break
        return None

    def _lost(self, instance: int, request_ids: list[str]) -> None:
        """Give up attempts that need an engine that is down; streams that have begun go on."""
        for request_id in request_ids:
            attempt = self._attempts.get(request_id)
            if attempt and not attempt.reply.status:
                self._lose(attempt, instance, "it is down")

    def _lose(self, attempt: "_Attempt", number: int, why: str, *, has_failed: bool = True) -> None:
        """Give up an attempt, once, since an engine does not go on with it."""
        if attempt.is_open:
            error = EngineFailed(self.fleet[number], why)
            attempt.lost = _AttemptFailed(number, error, has_failed=has_failed)
            attempt.task.cancel()

    def _attempts_at(self, number: int) -> list["_Attempt"]:
        """List the attempts that need an engine: after the first byte, only where they decode."""
        return [
            attempt
            for attempt in self._attempts.values()
            if attempt.is_open
            and (
                attempt.placed.decode == number
                or (attempt.placed.prefill == number and not attempt.reply.status)
            )
        ]

    async def _end_feed(self, number: int) -> None:
        feed = self._feeds.pop(number, None)
        if feed is not None:
            await asyncio.to_thread(feed.close)

    async def _refit(self) -> None:
        while True:
            await asyncio.sleep(self.config.health_s)
            self.placement.prefill_cost.refit()
            self.placement.decode_cost.refit()

    def _note_failure(self, failed: "_AttemptFailed") -> None:
        logger.warning("an attempt has failed: %s", failed.error)
        if not failed.has_failed or failed.instance not in self.fleet:
            return
        self.metrics.replaced.labels(self.fleet[failed.instance].name).inc()
        if failed.error.is_gone:
            self.health.down(failed.instance)

    def _count(self, placed: Placed) -> None:
        prefill = placed.decision.prefill
        assert prefill is not None
        self.metrics.prompt_tokens.inc(placed.decision.request.num_tokens)
        self.metrics.cached_tokens.inc(prefill.prefix_tokens)

    def _refusal(
        self, call: Call, decision: Decision, failure: str, *, may_hold: bool
    ) -> ErrorAnswer:
        entry = self.log.add(call, decision)
        entry["outcome"] = "refused"
        error = self._error_of(call, decision, failure, may_hold=may_hold)
        error.headers = {**error.headers, "x-mooncake-decision": header_of(entry)}
        return error

    def _error_of(
        self, call: Call, decision: Decision, failure: str = "", *, may_hold: bool = False
    ) -> ErrorAnswer:
        reason = decision.reason
        self.metrics.refusals.labels(reason.why.name, call.class_name).inc()
        if reason.why is Why.TOO_LONG and not may_hold:
            return ErrorAnswer(400, str(reason), "context_length_exceeded", "max_tokens")
        retry = {"retry-after": str(self.placement.retry_after_s(reason))}
        if reason.why in UNAVAILABLE:
            message = f"{reason}: {failure}" if failure else str(reason)
            return ErrorAnswer(503, message, "no_engine", headers=retry)
        of_class = f" for class {call.class_name}" if call.class_name else ""
        return ErrorAnswer(429, f"overloaded{of_class}: {reason}", "overloaded", headers=retry)


@dataclass(eq=False)
class _Attempt:
    """A request at the engines where it was placed.

    Attributes:
        task: that has it served.
        reply: to its client.
        placed: where that is.
        lost: why it was given up, if it was.
    """

    task: "asyncio.Task[None]"
    reply: Reply
    placed: Placed
    lost: "_AttemptFailed | None" = None

    @property
    def is_open(self) -> bool:
        """Whether it still needs its engines; its client may yet have to read an error."""
        return self.lost is None and not self.task.done()


class _AttemptFailed(Exception):
    """An engine does not serve a request.

    Attributes:
        instance: its number.
        error: why.
        has_failed: False: it leaves, as it was told to.
    """

    def __init__(self, instance: int, error: EngineFailed, *, has_failed: bool = True):
        super().__init__(str(error))
        self.instance, self.error, self.has_failed = instance, error, has_failed


def _error_in(part: bytes, instance: InstanceConfig) -> EngineFailed | EngineRefused:
    """Make the error of a stream whose first event is one; vLLM has its status in ``code``."""
    event = part.partition(b"\n")[0].removeprefix(b"data: ")
    try:
        status = msgspec.json.decode(event, type=_ErrorEvent).error.code
    except NO_JSON:
        status = None
    if isinstance(status, int) and 400 <= status < 500 and status not in OURS:
        refused = EngineRefused(status, {"content-type": "application/json"}, event)
        return refusal_of(instance, refused)
    return EngineFailed(instance, part[:500].decode(errors="replace").strip())


class _Told(msgspec.Struct):
    code: int | str | None = None


class _ErrorEvent(msgspec.Struct):
    error: _Told
