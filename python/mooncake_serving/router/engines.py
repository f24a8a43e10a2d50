"""Calls of engines over HTTP."""

import errno
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from mooncake_serving.http_api import ErrorAnswer

from .call import NO_JSON, Call
from .config import InstanceConfig, RouterConfig
from .others import EngineLoad, read_load

# Engines close a connection that was idle for 5 s; one that is used at that moment fails.
IDLE_S = 2.0
PROBE_S = 5.0
MAX_TOLD = 500  # characters of an engine's error
OURS = (401, 403)  # the router has another key than the engine
BUSY = 429
NOT_TAKEN = (400, 401, 403, 404, 405, 422)  # a change of role that was refused before it began
NOT_IDLE = "not idle"  # by which SGLang says that the change may be asked for again
GONE = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT}
OURS_LACK = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class EngineFailed(Exception):
    """An engine did not serve a request, which another one might.

    Attributes:
        is_gone: whether nobody accepts connections there.
        is_ours: whether the router lacked something to reach it, as file descriptors.
    """

    def __init__(self, instance: InstanceConfig, what: str, error: httpx.HTTPError | None = None):
        super().__init__(f"{instance.name}: {what}")
        numbers = set() if error is None else _errnos(error)
        self.is_ours = bool(numbers & OURS_LACK)
        is_refused = isinstance(error, httpx.ConnectError) and bool(numbers & GONE)
        self.is_gone = isinstance(error, httpx.ConnectTimeout) or (is_refused and not self.is_ours)


class EngineRefused(Exception):
    """An engine's answer that the request is wrong; the client gets it as it is."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes):
        super().__init__(status)
        self.status, self.body = status, body
        names = ("content-type", "retry-after")
        self.headers = {name: headers[name] for name in names if name in headers}

    @property
    def told(self) -> str:
        """The beginning of its body."""
        return self.body[:MAX_TOLD].decode(errors="replace")


class EngineBusy(EngineFailed):
    """An engine takes no more requests now.

    Attributes:
        refused: its answer, for the client if no other engine takes the request.
    """

    def __init__(self, instance: InstanceConfig, refused: EngineRefused):
        super().__init__(instance, f"it takes no more requests: {refused.told}")
        self.refused = refused


def refusal_of(instance: InstanceConfig, refused: EngineRefused) -> EngineBusy | EngineRefused:
    """Return what a refusal is to the router: of one that is busy, others may take the request."""
    return EngineBusy(instance, refused) if refused.status == BUSY else refused


class RoleRefused(Exception):
    """An engine has not changed its role.

    Attributes:
        is_same: whether it serves in the old one.
        is_busy: whether it would change once it is idle.
    """

    def __init__(self, what: str, *, is_same: bool, is_busy: bool = False):
        super().__init__(what)
        self.is_same, self.is_busy = is_same, is_busy


class Engines:
    """A client of all engines; ``await close()`` it."""

    def __init__(self, config: RouterConfig):
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if config.engine_api_key:
            headers["Authorization"] = f"Bearer {config.engine_api_key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(config.silence_s, connect=config.connect_s, pool=None),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    @asynccontextmanager
    async def post(
        self, instance: InstanceConfig, call: Call, body: bytes
    ) -> AsyncIterator[httpx.Response]:
        """Send a call to an engine, and have its answer while the block runs.

        Raises:
            EngineFailed: it is gone or busy, or has failed, before or while it answered.
            EngineRefused: the request is wrong.
        """
        url, own = instance.url + call.path, {"X-Request-Id": call.attempt_id}
        try:
            async with self._client.stream("POST", url, content=body, headers=own) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                    if answer.status_code < 500 and answer.status_code not in OURS:
                        status, headers = answer.status_code, answer.headers
                        refused = EngineRefused(status, headers, answer.content)
                        raise refusal_of(instance, refused)
                    what = f"HTTP {answer.status_code}: {answer.text[:MAX_TOLD]}"
                    raise EngineFailed(instance, what)
                yield answer
        except httpx.HTTPError as error:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise EngineFailed(instance, what, error) from None

    async def ask(self, instance: InstanceConfig, call: Call, body: bytes) -> dict[str, Any]:
        """Send a call to an engine, and return the JSON that it answers; see ``post``."""
        async with self.post(instance, call, body) as answer:
            content = await answer.aread()
        try:
            return msgspec.json.decode(content, type=dict[str, Any])
        except NO_JSON:
            raise EngineFailed(instance, f"it answered {content[:80]!r}") from None

    async def tokenize(self, instance: InstanceConfig, call: Call) -> list[int] | None:
        """Ask an engine for the tokens of a prompt; None: it did not tell.

        Raises:
            ErrorAnswer: the prompt is wrong.
        """
        try:
            answer = await self._client.post(
                instance.url + "/tokenize", content=msgspec.json.encode(call.tokenize_body())
            )
        except httpx.HTTPError:
            return None
        if answer.status_code in (400, 422):
            told = _message(answer)
            raise ErrorAnswer(400, told, "invalid_value", call.prompt_name)
        try:
            return msgspec.json.decode(answer.content, type=_Tokens).tokens
        except NO_JSON:
            return None

    async def check_health(self, instance: InstanceConfig, timeout_s: float = PROBE_S) -> None:
        """Ask an engine whether it serves.

        Raises:
            EngineFailed: it does not.
        """
        await self._get(instance, instance.url + "/health", timeout_s)

    async def models(self, instance: InstanceConfig) -> list[dict[str, Any]]:
        """Ask an engine what it serves: the cards of its model and its adapters.

        Raises:
            EngineFailed: it does not say.
        """
        content = await self._get(instance, instance.url + "/v1/models")
        try:
            cards = msgspec.json.decode(content, type=_Models).data
        except NO_JSON:
            cards = []
        if not all(isinstance(card.get("id"), str) for card in cards) or not cards:
            raise EngineFailed(instance, f"/v1/models: it answered {content[:80]!r}")
        return [_as_asked_for(card) for card in cards]

    async def load(self, instance: InstanceConfig) -> EngineLoad | None:
        """Ask an engine what it does, and how large its cache is; None: it does not say."""
        try:
            text = (await self._get(instance, instance.url + "/metrics")).decode()
        except (EngineFailed, UnicodeDecodeError):
            return None
        return read_load(text)

    async def switch_role(
        self, instance: InstanceConfig, role: str, more: Mapping[str, Any]
    ) -> None:
        """Have an SGLang engine that is idle prefill instead of decode, or the reverse.

        Args:
            instance: the engine.
            role: "prefill" or "decode".
            more: further fields of its ``/pd_role_switch``.

        Raises:
            RoleRefused: it does not.
        """
        url, body = instance.url + "/pd_role_switch", {**more, "new_role": role}
        try:
            answer = await self._client.post(url, content=msgspec.json.encode(body))
        except httpx.HTTPError as error:
            never_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            what = f"{instance.name}: {type(error).__name__}"
            raise RoleRefused(what, is_same=never_sent) from None
        try:
            told = msgspec.json.decode(answer.content, type=_Switched)
        except NO_JSON:
            told = _Switched()
        if answer.status_code == 200 and told.success:
            return
        if told.success is None:  # what answers is not what switches
            what, is_same = f"HTTP {answer.status_code}", answer.status_code in NOT_TAKEN
        else:
            what, is_same = told.message or f"HTTP {answer.status_code}", told.safe_to_restore
        raise RoleRefused(
            f"{instance.name}: {what[:MAX_TOLD]}",
            is_same=is_same,
            is_busy=is_same and NOT_IDLE in what,
        )

    async def engine_id(self, instance: InstanceConfig) -> str:
        """Ask a bootstrap server how decode engines call its engine.

        Raises:
            EngineFailed: it does not say.
        """
        content = await self._get(instance, f"{instance.bootstrap}/query")
        try:
            ranks = msgspec.json.decode(content, type=dict[str, _Rank])
            return ranks["0"].engine_id
        except (*NO_JSON, KeyError):
            raise EngineFailed(instance, f"/query: it answered {content[:80]!r}") from None

    async def _get(self, instance: InstanceConfig, url: str, timeout_s: float = PROBE_S) -> bytes:
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, PROBE_S))
        try:
            answer = await self._client.get(url, timeout=timeout)
        except httpx.HTTPError as error:
            raise EngineFailed(instance, f"{url}: {type(error).__name__}", error) from None
        if answer.status_code != 200:
            raise EngineFailed(instance, f"{url}: HTTP {answer.status_code}")
        return answer.content


class _Switched(msgspec.Struct):
    success: bool | None = None
    message: str = ""
    safe_to_restore: bool = False


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


class _Rank(msgspec.Struct):
    engine_id: str


def _as_asked_for(card: dict[str, Any]) -> dict[str, Any]:
    """Return a card with the name by which its model is asked for: SGLang's are MODEL:ADAPTER."""
    if card.get("owned_by") == "sglang" and card.get("parent"):
        return card | {"id": f"{card['parent']}:{card['id']}"}
    return card


def _errnos(error: BaseException) -> set[int]:
    """The numbers of the system's errors by which a call failed: one for each address tried."""
    numbers, todo, seen = set[int](), [error], set[int]()
    while todo:
        each = todo.pop()
        seen.add(id(each))
        if isinstance(each, OSError) and each.errno is not None:
            numbers.add(each.errno)
        inner = (each.__cause__, each.__context__, *getattr(each, "exceptions", ()))
        todo += [one for one in inner if one is not None and id(one) not in seen]
    return numbers


def _message(answer: httpx.Response) -> str:
    """The text of an engine's error body."""
    try:
        body = msgspec.json.decode(answer.content, type=dict[str, Any])
    except NO_JSON:
        return answer.text[:MAX_TOLD]
    error = body.get("error", body)
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or answer.text)[:MAX_TOLD]
