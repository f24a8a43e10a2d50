"""Engines that other routers have registered, and what these must know of an engine's changes."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_serving.http_api import ErrorAnswer

from .config import RegistryConfig, entries_of, parse_instance
from .registry import DRAINING, GONE, SERVING, STOPPED, Record, Registry

if TYPE_CHECKING:
    from .registration import Registration
    from .router import Router

logger = logging.getLogger(__name__)

LOOK_S = 0.4  # between two looks at the list
DRAIN_S = 300.0  # of changes that were seen only when they were over
SEEN_S = 1.0  # after which the other routers have seen a change
LATE_S = 5.0  # that others may take longer to give requests up
POLL_S = 0.1


class SharedEngines:
    """Keeps a router's engines as a registry lists them, besides those of its file.

    Args:
        config: of the registry.
        router: whose engines.
        registration: by which they come, change and leave.

    Attributes:
        failure: why the registry does not answer; "": it does.

    Raises:
        Unavailable: redis-py is not installed.
    """

    def __init__(self, config: RegistryConfig, router: "Router", registration: "Registration"):
        self.failure = ""
        self._router, self._registration = router, registration
        self._registry = Registry(config)
        self._one_call = asyncio.Lock()
        self._own = {instance.name for instance in router.config.instances}
        self._list: dict[str, Record] = {}
        self._done: dict[str, Record | None] = {}
        self._unsaved: dict[str, Record | None] = {}
        self._refused: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._draining: set[str] = set()  # those of the tasks that wait for requests
        self._changing: set[str] = set()  # by this router
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take in what is listed now, if the registry answers, and follow the list from now on."""
        await self._look()
        if self._tasks:
            await asyncio.wait({*self._tasks.values()})
        self._looking = asyncio.ensure_future(self._follow())

    async def close(self) -> None:
        """Follow the list no more. Idempotent."""
        tasks = {*self._tasks.values(), *filter(None, [self._looking])}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._registry.close()

    @contextlib.asynccontextmanager
    async def changing(self, op: str, name: str) -> AsyncIterator[None]:
        """Be the one router that changes an engine, as it is listed, while the block runs.

        Afterwards it is listed as this router has it then.

        Raises:
            ErrorAnswer: another router is changing it, or the registry does not answer.
        """
        if name in self._own:
            yield
            if self._number_of(name) is None:  # of the file no more, if it registers again
                self._own.discard(name)
            return
        try:
            claim = await asyncio.to_thread(self._registry.claim, name)
            if claim is None:
                what = "of an instance that no other router is changing"
                message = f"{op}: name must be {what}, got {name[:80]!r}"
                raise ErrorAnswer(409, message, "conflict", "name")
            self._changing.add(name)
            try:
                await self._read()
                await self._catch_up(name)
                had = self._number_of(name) is not None
                try:
                    yield
                finally:
                    if had or self._number_of(name) is not None:
                        self._unsaved[name] = self._done[name] = self._record(name)
                        await self._look()
            finally:
                self._changing.discard(name)
                await asyncio.to_thread(claim.close)
        except Unavailable as error:
            raise self._away(op, "did not answer, nothing has changed", error) from None
        if name in self._unsaved:
            what = "went away, other routers are told of this change when it is back"
            raise self._away(op, what, self.failure)

    async def drain(self, number: int, drain_s: float) -> None:
        """Have no router send an engine anything, and wait until none has requests there.

        Raises:
            Unavailable: the registry does not answer.
        """
        instance, loop = self._router.fleet[number], asyncio.get_running_loop()
        if instance.name in self._own:
            await self._registration.drain(number, drain_s)
            return
        seen_s = loop.time() + SEEN_S
        until_s = seen_s + drain_s + LATE_S
        self._unsaved[instance.name] = Record(entries_of(instance), DRAINING, drain_s)
        try:
            await self._read()
        except BaseException:
            self._unsaved.pop(instance.name, None)
            raise
        await self._registration.drain(number, drain_s)
        while loop.time() < seen_s or (self._is_busy(instance.name) and loop.time() < until_s):
            await asyncio.sleep(POLL_S)

    @staticmethod
    def _away(op: str, what: str, error: object) -> ErrorAnswer:
        return ErrorAnswer(503, f"{op}: the registry {what}: {error}", "registry_away")

    def _number_of(self, name: str) -> int | None:
        return self._router.fleet.number_of(name)

    def _is_busy(self, name: str) -> bool:
        """Whether another router had requests at an engine when the list was looked at."""
        return name in self._list and bool(self._list[name].busy)

    def _record(self, name: str) -> Record | None:
        """Describe an engine as this router has it; None: it has left."""
        number = self._number_of(name)
        if number is None:
            return None
        is_stopped = self._router.placement.is_draining(number)
        return Record(entries_of(self._router.fleet[number]), STOPPED if is_stopped else SERVING)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except Exception:  # whatever is listed, it is looked at again
                logger.exception("the list of engines cannot be followed")

    async def _look(self) -> None:
        """Exchange with the registry what is new, and carry it out."""
        try:
            await self._read()
        except Unavailable as error:
            if not self.failure:
                logger.warning("the registry is away, engines stay as they are: %s", error)
            self.failure = str(error)
            return
        if self.failure:
            logger.warning("the registry is back")
        self.failure = ""
        self._carry_out()

    async def _read(self) -> None:
        """Write what this router has to say, and read the list.

        Raises:
            Unavailable: the registry does not answer.
        """
        async with self._one_call:
            unsaved, me = dict(self._unsaved), self._registry.router
            busy = {
                instance.name
                for number, instance in self._router.fleet.items()
                if self._router.num_open(number)
            }

            def edit(engines: dict[str, Record]) -> None:
                for name, mine in unsaved.items():
                    engines.pop(name, None)
                    engines[name] = mine or Record({}, GONE)
                for name, record in engines.items():
                    if record.state != DRAINING or name in self._changing:
                        continue
                    others = [one for one in record.busy if one != me]
                    record.busy = [*others, me] if name in busy else others
                    if not self._registry.is_claimed(name):  # who changed it is gone
                        engines[name] = Record(record.instance)

            engines = await asyncio.to_thread(self._registry.change, edit)
            self._list = {name: each for name, each in engines.items() if each.state != GONE}
            for name, record in unsaved.items():
                if self._unsaved.get(name) is record:
                    del self._unsaved[name]

    def _carry_out(self) -> None:
        """Begin to have each engine be as it is listed."""
        for name in {*self._list, *self._done}:
            record = self._list.get(name)
            if name in self._own or name in self._unsaved or name in self._changing:
                continue
            if name in self._tasks:
                self._stop_draining(name, record)
            elif _what(self._done.get(name)) != _what(record):
                task = self._tasks[name] = asyncio.ensure_future(self._take(name, record))
                task.add_done_callback(partial(self._ended, name))

    def _ended(self, name: str, _: "asyncio.Task[None]") -> None:
        del self._tasks[name]

    def _stop_draining(self, name: str, record: Record | None) -> None:
        """End a wait for the requests of an engine that serves on, after all."""
        if name in self._draining and record is not None and record.state != DRAINING:
            self._tasks[name].cancel()

    async def _catch_up(self, name: str) -> None:
        """Have an engine be as it is listed before this router changes it."""
        record = self._list.get(name)
        if record is not None and record.state == DRAINING:  # by a router that is gone
            record = Record(record.instance)
        if task := self._tasks.get(name):
            self._stop_draining(name, record)
            await asyncio.wait({task})
        if _what(self._done.get(name)) != _what(record):
            await self._take(name, record)

    async def _take(self, name: str, record: Record | None) -> None:
        """Have an engine be as it is listed, or log why it is not; it is tried again."""
        try:
            await self._apply(name, record)
        except (InvalidArgument, ErrorAnswer) as error:
            if self._refused.get(name) != str(error):
                logger.warning("%r is listed, and cannot be taken: %s", name, error)
            self._refused[name] = str(error)
            return
        self._refused.pop(name, None)
        if record is None:
            self._done.pop(name, None)
        else:
            self._done[name] = record

    async def _apply(self, name: str, record: Record | None) -> None:
        number, registration = self._number_of(name), self._registration
        if record is None:
            if number is not None:
                await self._leave(number)
            return
        instance = parse_instance(record.instance, self._router.config.connector)
        if instance.name != name:
            raise InvalidArgument(f"register: name must be {name}, got {instance.name}")
        is_serving = record.state == SERVING
        if number is not None and is_serving:
            try:
                await registration.change(number, record.instance, DRAIN_S)
            except ErrorAnswer as error:
                if error.status != 409:
                    raise
                await self._leave(number)  # it was unregistered, and is another one by now
                number = None
        if number is None:
            number = await registration.add(record.instance, is_draining=not is_serving)
        if record.state == STOPPED:
            self._router.placement.drain(number)
        elif record.state == DRAINING:
            self._draining.add(name)
            try:
                await registration.drain(number, record.drain_s)
            finally:
                self._draining.discard(name)

    async def _leave(self, number: int) -> None:
        await self._registration.drain(number, DRAIN_S)
        await self._router.leave(number)


def _what(record: Record | None) -> object:
    """What a record asks of a router."""
    return None if record is None else (record.instance, record.state)
