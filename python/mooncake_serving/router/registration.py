"""Engines that register while the router runs, change their role, and leave.

The calls are those of Mooncake's Conductor, which registers publishers of KV events; an entry may
have its name there, or that in the file.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mooncake_kernels.errors import InvalidArgument, shown
from mooncake_serving.conductor import Role
from mooncake_serving.http_api import ErrorAnswer, invalid

from .config import InstanceConfig, entries_of, parse_instance
from .engines import RoleRefused
from .handoff import HANDOFFS

if TYPE_CHECKING:
    from .router import Router

POLL_S = 0.05
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
    """

    def __init__(self, router: "Router"):
        self._router = router
        self._is_at_once = HANDOFFS[router.config.connector].is_at_once
        self._changing: set[str] = set()

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
        entries, drain_s, more = self._entries(body)
        with self._change_of(entries):
            number = self._router.fleet.number_of(entries["name"])
            try:
                if number is None:
                    number = await self._add(entries)
                else:
                    await self._change(number, entries, drain_s, more)
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
        entries, drain_s, _ = self._entries(body)
        if more := sorted(set(entries) - {"name", "events", "replay"}):
            raise invalid(more[0], f"left out, got {shown(entries[more[0]], 80)}")
        with self._change_of(entries):
            name = entries["name"]
            number = self._router.fleet.number_of(name)
            if number is None:
                what = f"unregister: there is no instance {name[:80]!r}"
                raise ErrorAnswer(404, what, "not_found", "name")
            await self._drain(number, drain_s)
            await self._router.leave(number)
        return {
            "status": "unregistered successfully",
            "removed_instances": [f"{name}|default|0"],
        }

    def _entries(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], float, dict[str, Any]]:
        """Return the entries of an instance, ``drain_s`` and ``role_switch``."""
        entries = {SAME.get(name, name): value for name, value in body.items()}
        for name, among in FIXED.items():
            if name in entries and (value := entries.pop(name)) not in among:
                wanted = " or ".join(map(repr, among))
                raise invalid(name, f"{wanted} here, got {shown(value, 80)}")
        for name in LEFT_OUT:
            entries.pop(name, None)
        if "modelname" in entries:
            self._router.health.adapter_of(str(entries.pop("modelname")))
        size = self._router.config.block_size
        own = entries.pop("block_size", size)
        if type(own) is not int or own < size or own % size:
            raise invalid("block_size", f"a multiple of the router's, {size}, got {shown(own, 80)}")
        drain_s = entries.pop("drain_s", DRAIN_S)
        if not (type(drain_s) in (int, float) and 0 <= drain_s <= MAX_DRAIN_S):
            raise invalid("drain_s", f"from 0 to {MAX_DRAIN_S:g} s, got {shown(drain_s, 80)}")
        more = entries.pop("role_switch", {})
        if not isinstance(more, dict):
            raise invalid("role_switch", f"an object, got {shown(more, 80)}")
        if not isinstance(entries.get("name"), str):
            raise invalid("name", f"a text, got {shown(entries.get('name'), 80)}")
        return entries, float(drain_s), more

    async def _add(self, entries: Mapping[str, Any]) -> int:
        router = self._router
        instance = parse_instance(entries, router.config.connector)
        for _, other in router.fleet.items():
            if other.url == instance.url:
                raise _conflict("url", f"unique, got {instance.url!r} of {other.name}, too")
        number = router.fleet.add(instance)
        if number is None:
            most = router.config.max_instances
            raise _conflict("instances", f"at most max_instances, {most}, got one more")
        try:
            await router.follow(number)
        except InvalidArgument:
            await router.leave(number)
            raise
        return number

    async def _change(
        self, number: int, entries: Mapping[str, Any], drain_s: float, more: Mapping[str, Any]
    ) -> None:
        """Have an engine be what is registered of it now."""
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
                raise _conflict(each.name, what)
        if new.role != old.role:
            await self._change_role(number, new, drain_s, more)
        router.fleet.replace(number, new)
        router.placement.resume(number)
        if new.events != old.events:
            router.feed(number)

    async def _change_role(
        self, number: int, new: InstanceConfig, drain_s: float, more: Mapping[str, Any]
    ) -> None:
        """Have an engine end its requests, and take the role of ``new``."""
        router, old = self._router, self._router.fleet[number]
        if self._is_at_once and Role.BOTH in (old.role, new.role):
            raise _conflict("role", '"prefill" or "decode" as it was started, of SGLang')
        await self._drain(number, drain_s)
        if not self._is_at_once:
            return
        try:
            await router.engines.switch_role(old, entries_of(new)["role"], more)
        except RoleRefused as refused:
            if refused.is_same:
                router.placement.resume(number)
            rest = "" if refused.is_same else "; it gets no requests until it registers again"
            raise ErrorAnswer(502, f"register: {refused}{rest}", "role_refused", "role") from None

    async def _drain(self, number: int, drain_s: float) -> None:
        """Send an engine nothing any more, and wait until it has no requests."""
        router, loop = self._router, asyncio.get_running_loop()
        router.placement.drain(number)
        until_s = loop.time() + drain_s
        while router.num_open(number):
            if loop.time() >= until_s:
                router.give_up(number)
            await asyncio.sleep(POLL_S)

    @contextlib.contextmanager
    def _change_of(self, entries: Mapping[str, Any]) -> Iterator[None]:
        """Refuse another change of an engine while the block runs."""
        name = entries["name"]
        if name in self._changing:
            raise _conflict("name", f"of an instance that is not being changed, got {name!r}")
        self._changing.add(name)
        try:
            yield
        finally:
            self._changing.discard(name)


def _conflict(param: str, wanted: str) -> ErrorAnswer:
    return ErrorAnswer(409, f"register: {param} must be {wanted}", "conflict", param)
