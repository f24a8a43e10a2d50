"""The life of a request: placed, prefilled, decoded, and answered; or placed again."""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from mooncake_serving.conductor import Decision, Role, Why
from mooncake_serving.http_api import (
    Bodies,
    ClientStalled,
    ErrorAnswer,
    Receive,
    Reply,
    Scope,
    overloaded,
)

from .call import Call, read_call
from .config import InstanceConfig, RouterConfig
from .decisions import DecisionLog, header_of
from .engines import OURS, PROBE_S, EngineFailed, EngineRefused, Engines
from .event_feed import EventFeed
from .handoff import HANDOFFS, prefill_body
from .health import HealthWatch
from .metrics import RouterMetrics
from .placement import Placed, Placement

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499  # in metrics, as nginx has it
STEPS = 16  # tokens of a stream whose mean interval is one sample
UNAVAILABLE = (Why.NO_PREFILL_INSTANCE, Why.NO_DECODE_INSTANCE, Why.TOO_LONG)


class Router:
    """Serves requests by engines. ``await start()`` it, and ``await close()`` it.

    Args:
        config: which engines, and how.

    Attributes:
        placement: decides.
        log: of its decisions.
        metrics: for Prometheus.
        bodies: of requests.
    """

    def __init__(self, config: RouterConfig):
        self.config = config
        self.placement = Placement(config)
        self.log = DecisionLog(config.instances)
        self.metrics = RouterMetrics(self)
        self.bodies = Bodies(config.max_body_bytes, config.max_held_bytes, config.client_s)
        self.engines = Engines(config)
        self.health = HealthWatch(config, self.engines, self.placement, self._lost)
        self._handoff = HANDOFFS[config.connector]
        self._attempts: dict[str, _Attempt] = {}
        self._feeds: list[EventFeed] = []
        self._next_tokenizer = 0
        self._num_requests = 0

    async def start(self) -> None:
        """Look at all engines once, and follow them from now on.

        Raises:
            InvalidArgument: an endpoint of events is invalid.
        """
        for instance, blocks in zip(self.config.instances, self.placement.blocks, strict=True):
            if instance.events:
                self._feeds.append(EventFeed(instance, blocks))
        await self.health.start()

    async def close(self) -> None:
        """Stop following the engines, and disconnect. Idempotent."""
        await self.health.close()
        for feed in self._feeds:
            await asyncio.to_thread(feed.close)
        await self.engines.close()

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
            async with self.bodies.read(scope, receive) as raw:
                if raw is not None:
                    await self._serve(path, raw, receive, reply)
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
        cluster = self.placement.conductor.cluster
        return [
            {
                "name": instance.name,
                "url": instance.url,
                "role": instance.role.name.lower() if instance.role.name else "",
                "up": self.placement.is_up(number),
                "prefills": self.placement.num_prefills(number),
                "decoding": int(cluster.batch_size[number]),
                "kv_tokens": int(cluster.kv_tokens[number]),
                "capacity_tokens": int(cluster.capacity_tokens[number]),
                "held_blocks": blocks.num_held,
                "event_batches": blocks.num_batches,
                "event_gaps": blocks.num_gaps,
                "unnamed_blocks": blocks.num_unnamed,
            }
            for number, (instance, blocks) in enumerate(
                zip(self.config.instances, self.placement.blocks, strict=True)
            )
        ]

    async def _serve(self, path: str, raw: bytes, receive: Receive, reply: Reply) -> None:
        self._check_load()  # a request counts from its body on, for which a client may take long
        call = read_call(path, raw)
        self._num_requests += 1
        client_left = asyncio.ensure_future(receive())  # nothing else can come
        try:
            await self._answer(call, client_left, reply)
        finally:
            client_left.cancel()
            self._num_requests -= 1

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
        lacking = self.health.lacking(call.model)
        without: set[int] = set()
        failure = ""
        while call.num_attempts < self.config.max_attempts and not client_left.done():
            call.num_attempts += 1
            placed = self.placement.place(call, adapter=adapter, without=without, lacking=lacking)
            if isinstance(placed, Decision):
                may_hold = self.placement.may_hold(placed.request, lacking)
                raise self._refusal(call, placed, failure, may_hold=may_hold)
            try:
                await self._attempt(call, placed, client_left, reply)
                return
            except _AttemptFailed as failed:
                failure = str(failed.error)
                without.add(failed.instance)
                self._note_failure(failed, reply)
        if not client_left.done():
            message = f"the request failed {call.num_attempts} times: {failure}"
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
        run = self._coupled if self._is_coupled(placed) else self._handed_over
        task = asyncio.ensure_future(run(call, placed, entry, reply))
        attempt = self._attempts[call.request_id] = _Attempt(task, reply)
        try:
            await asyncio.wait({task, client_left}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                entry["outcome"] = "the client has left"
                return
            if attempt.lost_with >= 0:
                lost = self.config.instances[attempt.lost_with]
                raise _AttemptFailed(attempt.lost_with, EngineFailed(lost, "it is down"))
            task.result()
            entry["outcome"] = "answered"
        except _AttemptFailed as failed:
            entry["outcome"] = f"failed: {failed.error}"
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
            await asyncio.wait({task})
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
        """Have one engine compute the prompt, and another one generate."""
        number = placed.prefill
        prefill = self.config.instances[number]
        params = self._handoff.prefill_params(call.attempt_id)
        body = msgspec.json.encode(prefill_body(call.body, params))
        try:
            answer = await self.engines.ask(prefill, call, body)
            given = self._handoff.decode_params(
                call.attempt_id,
                prefill,
                self.health.engine_id(number),
                answer.get("kv_transfer_params"),
            )
            if given is None:
                raise EngineFailed(prefill, "it answers no kv_transfer_params: has it a connector?")
        except EngineFailed as error:
            raise _AttemptFailed(number, error) from None
        later = self.placement.prefilled(placed)
        if later is not None and not later.accepted:
            entry["outcome"] = f"refused after its prefill: {later.reason}"
            raise self._error_of(later)
        if later is not None:
            entry["decode"] = self.log.decode_part(later)
        entry["prefilled_s"] = time.monotonic() - call.arrived_s
        body = msgspec.json.encode(call.body | {"kv_transfer_params": given})
        await self._pass_on(call, body, placed, entry, reply)

    async def _pass_on(
        self, call: Call, body: bytes, placed: Placed, entry: dict[str, Any], reply: Reply
    ) -> None:
        """Send a request to the engine that generates, and its answer to the client."""
        number = placed.decode
        try:
            async with self.engines.post(self.config.instances[number], call, body) as answer:
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
        num_steps, since_s = 0, 0.0
        async for part in answer.aiter_raw():
            if not reply.status:
                if part.startswith(b'data: {"error"'):
                    raise _error_in(part, self.config.instances[placed.decode])
                since_s = time.monotonic()
                self.placement.prefilled(placed)
                entry["first_byte_s"] = since_s - call.arrived_s
                self.metrics.ttft.observe(entry["first_byte_s"])
                headers["x-mooncake-decision"] = header_of(entry)
                await reply.begin(answer.status_code, headers)
            else:
                num_steps += part.count(b"data: ")
                if num_steps >= STEPS:
                    now_s = time.monotonic()
                    self.placement.stepped(placed, (now_s - since_s) / num_steps)
                    num_steps, since_s = 0, now_s
            await reply.write(part)
        if not reply.status:
            raise EngineFailed(self.config.instances[placed.decode], "its stream is empty")
        await reply.write(b"", is_last=True)

    async def _tokenize(self, call: Call, client_left: "asyncio.Future[Any]") -> list[int] | None:
        """Ask one engine after another for the tokens of a prompt; None: they did not tell.

        Raises:
            ErrorAnswer: the prompt is wrong.
        """
        count, lacking = len(self.config.instances), self.health.lacking(call.model)
        num_asked = 0
        for _ in range(count):
            number = self._next_tokenizer = (self._next_tokenizer + 1) % count
            if not self.placement.is_up(number) or number in lacking:
                continue
            task = asyncio.ensure_future(self.engines.tokenize(self.config.instances[number], call))
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
            if attempt and not attempt.reply.status and not attempt.task.done():
                attempt.lost_with = instance
                attempt.task.cancel()

    def _note_failure(self, failed: "_AttemptFailed", reply: Reply) -> None:
        name = self.config.instances[failed.instance].name
        logger.warning("an attempt has failed: %s", failed.error)
        self.metrics.replaced.labels(name).inc()
        if failed.error.is_gone:
            self.health.down(failed.instance)

    def _is_coupled(self, placed: Placed) -> bool:
        return self.config.instances[placed.prefill].role == Role.BOTH

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
        error = self._error_of(decision, failure, may_hold=may_hold)
        error.headers = {**error.headers, "x-mooncake-decision": header_of(entry)}
        return error

    def _error_of(
        self, decision: Decision, failure: str = "", *, may_hold: bool = False
    ) -> ErrorAnswer:
        reason = decision.reason
        self.metrics.refusals.labels(reason.why.name).inc()
        if reason.why is Why.TOO_LONG and not may_hold:
            return ErrorAnswer(400, str(reason), "context_length_exceeded", "max_tokens")
        retry = {"retry-after": str(self.placement.retry_after_s(reason))}
        if reason.why in UNAVAILABLE:
            message = f"{reason}: {failure}" if failure else str(reason)
            return ErrorAnswer(503, message, "no_engine", headers=retry)
        return ErrorAnswer(429, f"overloaded: {reason}", "overloaded", headers=retry)


@dataclass(eq=False)
class _Attempt:
    """A request at the engines where it was placed.

    Attributes:
        task: that has it served.
        reply: to its client.
        lost_with: the engine by whose failure it was given up; -1: none.
    """

    task: "asyncio.Task[None]"
    reply: Reply
    lost_with: int = -1


class _AttemptFailed(Exception):
    """An engine has failed; the instance is its number."""

    def __init__(self, instance: int, error: EngineFailed):
        super().__init__(str(error))
        self.instance, self.error = instance, error


def _error_in(part: bytes, instance: InstanceConfig) -> EngineFailed | EngineRefused:
    """Make the error of a stream whose first event is one; vLLM has its status in ``code``."""
    event = part.partition(b"\n")[0].removeprefix(b"data: ")
    try:
        status = msgspec.json.decode(event, type=_ErrorEvent).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError):
        status = None
    if isinstance(status, int) and 400 <= status < 500 and status not in OURS:
        return EngineRefused(status, {"content-type": "application/json"}, event)
    return EngineFailed(instance, part[:500].decode(errors="replace").strip())


class _Told(msgspec.Struct):
    code: int | str | None = None


class _ErrorEvent(msgspec.Struct):
    error: _Told
