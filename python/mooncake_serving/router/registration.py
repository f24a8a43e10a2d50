"""Engines that register while the router runs, change their role, and leave.

The calls are those of Mooncake's Conductor, which registers publishers of KV events; an entry may
have its name there, or that in the file.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from mooncake_kernels.errors import InvalidArgument, shown
from mooncake_serving.conductor import Role
from mooncake_serving.http_api import ErrorAnswer, invalid

from .config import InstanceConfig, entries_of, parse_instance
from .engines import EngineFailed, RoleRefused
from .handoff import HANDOFFS
from .shared import SharedEngines

if TYPE_CHECKING:
    from .router import Router

POLL_S = 0.05
RETRY_S, IDLE_S = 0.25, 10.0  # an engine may notice later than the router that it is idle
DRAIN_S = 300.0
MAX_DRAIN_S = 86_400.0
SAME = {"instance_id": "name", "endpoint": "events", "replay_endpoint": "replay"}
# Entries of Mooncake's that must be as they are here: blocks are named by their tokens, and one
# model's, and one rank's events are received of an engine.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "type": ("vLLM", "SGLang"),
    "lora_name": ("", None),
    "tenant_id": ("default", "", None),
    "dp_rank": (0,),
    "cache_group": (0, None),
    "additionalsalt": ("", None),
}
LEFT_OUT = ("hash_profile",)  # which would tell how an engine hashes tokens
MAY_CHANGE = {"role", "bootstrap"}
OF_EVENTS = {"events", "replay", "topic"}


class Registration:
    """Changes which engines a router has.

    Args:
        router: whose engines.

    Attributes:
        shared: with other routers; None: they are this router's alone.
    """

    def __init__(self, router: "Router"):
        self._router = router
        handoff = HANDOFFS[router.config.connector]
        self._is_at_once, self._has_engine_ids = handoff.is_at_once, handoff.has_engine_ids
        self._changing: set[str] = set()
        shared = router.config.registry
        self.shared = None if shared is None else SharedEngines(shared, router, self)

    async def register(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Add an engine, or change the role of one, when its requests are over.

        Args:
            body: an ``[[instance]]`` of the file, or Mooncake's entries with ``url`` and ``role``;
                of an engine that is there, its name and what changes. ``drain_s`` is how long its
                requests may take; ``role_switch`` has further fields of SGLang's
                ``/pd_role_switch``.

        Returns:
            What Mooncake's Conductor answers, and whether the engine is up.

        Raises:
            ErrorAnswer: an entry is wrong, or cannot be changed; or the engine does not change.
        """
        entries, drain_s = self._entries(body)
        if "modelname" in entries:
            self._router.health.adapter_of(str(entries.pop("modelname")))
        more = self._role_switch(entries)
        async with self._change_of("register", entries["name"]):
            number = self._router.fleet.number_of(entries["name"])
            try:
                if number is None:
                    number = await self.add(entries)
                else:
                    await self.change(number, entries, drain_s, more, is_told=True)
            except InvalidArgument as error:
                raise ErrorAnswer(400, str(error), "invalid_value") from None
        return {
            "status": "registered successfully",
            "instance_id": entries["name"],
            "up": self._router.placement.is_up(number),
        }

    async def unregister(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Remove an engine, when its requests are over.

        Those that are not within ``drain_s`` seconds are given up: without an answer so far they
        are placed again, streams end with an error.

        Args:
            body: its name, and perhaps ``drain_s`` and Mooncake's other entries.

        Returns:
            What Mooncake's Conductor answers.

        Raises:
            ErrorAnswer: there is no such engine, or an entry is wrong.
        """
        entries, drain_s = self._entries(body)
        if more := sorted(set(entries) - {"name", "events", "replay", "modelname"}):
            raise invalid(more[0], f"left out, got {shown(entries[more[0]], 80)}")
        name = entries["name"]
        async with self._change_of("unregister", name):
            number = self._router.fleet.number_of(name)
            if number is None:
                what = f"unregister: name must be that of an instance, got {shown(name, 80)}"
                raise ErrorAnswer(404, what, "not_found", "name")
            await self._drain_all(number, drain_s)
            await self._router.leave(number)
        return {
            "status": "unregistered successfully",
            "removed_instances": [f"{name}|default|0"],
        }

    def _entries(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
        """Return the entries of an instance by their names in the file, and ``drain_s``."""
        for other, name in SAME.items():
            if {other, name} <= body.keys():
                raise invalid(other, f"left out beside {name}, got {shown(body[other], 80)}")
        entries = {SAME.get(name, name): value for name, value in body.items()}
        for name, among in FIXED.items():
            if name in entries and (value := entries.pop(name)) not in among:
                wanted = " or ".join(map(repr, among))
                raise invalid(name, f"{wanted} here, got {shown(value, 80)}")
        for name in LEFT_OUT:
            entries.pop(name, None)
        size = self._router.config.block_size
        own = entries.pop("block_size", size)
        if type(own) is not int or own < size or own % size:
            raise invalid("block_size", f"a multiple of the router's, {size}, got {shown(own, 80)}")
        drain_s = entries.pop("drain_s", DRAIN_S)
        if not (type(drain_s) in (int, float) and 0 <= drain_s <= MAX_DRAIN_S):
            raise invalid("drain_s", f"from 0 to {MAX_DRAIN_S:g} s, got {shown(drain_s, 80)}")
        if not isinstance(entries.get("name"), str):
            raise invalid("name", f"a text, got {shown(entries.get('name'), 80)}")
        return entries, float(drain_s)

    def _role_switch(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Take ``role_switch`` from entries."""
        if "role_switch" not in entries:
            return {}
        more = entries.pop("role_switch")
        if not self._is_at_once:
            what = f"left out of engines that are not SGLang's, got {shown(more, 80)}"
            raise invalid("role_switch", what)
        try:
            msgspec.json.encode(more)  # MessagePack has more types
        except (TypeError, ValueError, msgspec.MsgspecError):
            raise invalid("role_switch", f"of JSON's types, got {shown(more, 80)}") from None
        if not isinstance(more, dict):
            raise invalid("role_switch", f"an object, got {shown(more, 80)}")
        return more

    async def add(self, entries: Mapping[str, Any], *, is_draining: bool = False) -> int:
        """Take in an engine, which gets no requests yet if another router is changing it.

        Returns:
            Its number.

        Raises:
            InvalidArgument: an entry is missing or wrong.
            ErrorAnswer: another engine has its URL, or there is no place for it.
        """
        router = self._router
        instance = parse_instance(entries, router.config.connector)
        for _, other in router.fleet.items():
            if other.url == instance.url:
                what = f"unique, got {shown(instance.url, 80)}, which is that of {other.name[:80]}"
                raise _conflict("register", "url", what)
        number = router.fleet.add(instance)
        if number is None:
            most = router.config.max_instances
            what = f"register: instances must be at most max_instances, {most}, got {most + 1}"
            raise ErrorAnswer(409, what, "conflict")
        if is_draining:
            router.placement.drain(number)
        try:
            await router.follow(number)
        except BaseException:
            await self.drain(number, 0.0)
            await router.leave(number)
            raise
        return number

    async def change(
        self,
        number: int,
        entries: Mapping[str, Any],
        drain_s: float,
        more: Mapping[str, Any] | None = None,
        *,
        is_told: bool = False,
    ) -> None:
        """Have an engine be what is registered of it now; its events first, whatever else fails.

        Args:
            number: of the engine.
            entries: what changes, or all.
            drain_s: how long its requests may take.
            more: fields of SGLang's ``/pd_role_switch``.
            is_told: whether the engine is told its new role, and the other routers that it drains,
                which one router does.

        Raises:
            InvalidArgument: an entry is missing or wrong.
            ErrorAnswer: an entry cannot be changed, or the engine does not change.
            Unavailable: other routers cannot be told.
        """
        router = self._router
        old = router.fleet[number]
        known = entries_of(old)
        if entries.get("role", "prefill") != "prefill":
            known.pop("bootstrap", None)
        new = parse_instance({**known, **entries}, router.config.connector)
        may_change = MAY_CHANGE | (set() if old.events else OF_EVENTS)
        for each in dataclasses.fields(InstanceConfig):
            before, after = getattr(old, each.name), getattr(new, each.name)
            if before != after and each.name not in may_change:
                what = f"{before!r}, unless it is unregistered first, got {shown(after, 80)}"
                raise _conflict("register", each.name, what)
        engine_id = await self._new_engine_id(number, new)
        if new.events != old.events:
            router.feed(number, new)
            of_events = {name: getattr(new, name) for name in OF_EVENTS}
            router.fleet.replace(number, dataclasses.replace(old, **of_events))
        if new.role != old.role and is_told:
            await self._change_role(number, new, drain_s, more or {})
        elif new.role != old.role:
            await self.drain(number, drain_s)
        router.fleet.replace(number, new)
        if engine_id:
            router.health.set_engine_id(number, engine_id)
        router.placement.resume(number)

    async def _new_engine_id(self, number: int, new: InstanceConfig) -> str:
        """Ask a bootstrap server that is new what it calls its engine; "": none is, or later."""
        router = self._router
        is_new = new.bootstrap not in ("", router.fleet[number].bootstrap)
        if not (is_new and self._has_engine_ids and router.placement.is_up(number)):
            return ""  # one that is down is asked when it is up again
        try:
            return await router.engines.engine_id(new)
        except EngineFailed as error:
            raise ErrorAnswer(502, f"register: {error}", "engine_failed", "bootstrap") from None

    async def _change_role(
        self, number: int, new: InstanceConfig, drain_s: float, more: Mapping[str, Any]
    ) -> None:
        """Have an engine end its requests, and take the role of ``new``."""
        router, old = self._router, self._router.fleet[number]
        if self._is_at_once and Role.BOTH in (old.role, new.role):
            what = f"prefill or decode as SGLang was started, got {entries_of(new)['role']}"
            raise _conflict("register", "role", what)
        await self._drain_all(number, drain_s)
        if not self._is_at_once:
            return
        try:
            await self._switch_role(old, entries_of(new)["role"], more)
        except RoleRefused as refused:
            if refused.is_same:
                router.placement.resume(number)
            rest = "" if refused.is_same else "; it gets no requests until it registers again"
            raise ErrorAnswer(502, f"register: {refused}{rest}", "role_refused", "role") from None
        except BaseException:
            router.placement.resume(number)
            raise

    async def _switch_role(
        self, instance: InstanceConfig, role: str, more: Mapping[str, Any]
    ) -> None:
        """Tell an SGLang engine its role, again while it is not idle yet.

        Raises:
            RoleRefused: it does not take it.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + IDLE_S
        while True:
            try:
                return await self._router.engines.switch_role(instance, role, more)
            except RoleRefused as refused:
                if not refused.is_busy or loop.time() >= until_s:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _drain_all(self, number: int, drain_s: float) -> None:
        """Do as ``drain`` at all routers that share the engine."""
        drain = self.drain if self.shared is None else self.shared.drain
        await drain(number, drain_s)

    async def drain(self, number: int, drain_s: float) -> None:
        """Send an engine nothing any more, and wait until it has no requests of this router.

        Those that are not over after ``drain_s`` seconds are given up.
        """
        router, loop = self._router, asyncio.get_running_loop()
        router.placement.drain(number)
        until_s = loop.time() + drain_s
        try:
            while router.num_open(number):
                if loop.time() >= until_s:
                    router.give_up(number)
                await asyncio.sleep(POLL_S)
        except BaseException:
            router.placement.resume(number)
            raise

    @contextlib.asynccontextmanager
    async def _change_of(self, op: str, name: str) -> AsyncIterator[None]:
        """Refuse another change of an engine while the block runs."""
        if name in self._changing:
            what = f"of an instance that is not being changed, got {shown(name, 80)}"
            raise _conflict(op, "name", what)
        self._changing.add(name)
        try:
            async with self.shared.changing(op, name) if self.shared else contextlib.nullcontext():
                yield
        finally:
            self._changing.discard(name)


def _conflict(op: str, param: str, wanted: str) -> ErrorAnswer:
    return ErrorAnswer(409, f"{op}: {param} must be {wanted}", "conflict", param)
