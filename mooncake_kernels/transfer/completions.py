"""Awaiting tickets in asyncio: one file descriptor for all tickets of an event loop."""

import asyncio
import contextlib
import itertools
import weakref
from collections.abc import Iterator

from .. import _host

# Weak at both ends: a loop holds its own, by the reader, and can be freed with tickets pending.
_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, "weakref.ref[_Completions]"] = (
    weakref.WeakKeyDictionary()
)


@contextlib.contextmanager
def completion(ticket: _host.TransferTicket) -> Iterator["asyncio.Future[None]"]:
    """Yield a future of the running loop, which is done once the ticket is finished."""
    loop = asyncio.get_running_loop()
    known = _of_loop.get(loop)
    completions = None if known is None else known()
    if completions is None:
        completions = _Completions(loop)
        _of_loop[loop] = weakref.ref(completions)
    try:
        with completions.future(ticket) as future:
            yield future
    finally:
        if not completions.futures:
            loop.remove_reader(completions.queue.fd)
            _of_loop.pop(loop, None)


class _Completions:
    """The tickets that one event loop waits for. Used only in that loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.queue = _host.TransferCompletionQueue()
        self.futures: dict[int, asyncio.Future[None]] = {}
        self._loop = loop
        self._keys = itertools.count()
        loop.add_reader(self.queue.fd, self._take)

    @contextlib.contextmanager
    def future(self, ticket: _host.TransferTicket) -> Iterator["asyncio.Future[None]"]:
        key = next(self._keys)
        future = self.futures[key] = self._loop.create_future()
        try:
            ticket.push_when_finished(self.queue, key)
            yield future
        finally:
            del self.futures[key]

    def _take(self) -> None:
        for key in self.queue.take():
            future = self.futures.get(key)  # None: its waiter has given up
            if future is not None and not future.done():
                future.set_result(None)
