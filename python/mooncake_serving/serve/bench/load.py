"""Sends a load, and shows how far it is."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TextIO

import httpx

from .request import Answer, send

BAR = 30  # characters
SHOW_S = 0.2


class Progress:
    """A line about what is over, on a terminal; nothing elsewhere.

    Args:
        count: of all requests.
        output: where it is shown.
    """

    def __init__(self, count: int, output: TextIO):
        self._count, self._output, self._is_shown = count, output, output.isatty()
        self._over = self._wrong = 0
        self._began_s, self._shown_s = time.monotonic(), -math.inf

    def add(self, answer: Answer) -> None:
        """Count a request that is over."""
        self._over += 1
        self._wrong += bool(answer.error)
        now_s = time.monotonic()
        if self._is_shown and (now_s - self._shown_s > SHOW_S or self._over == self._count):
            self._shown_s = now_s
            self._show()

    def _show(self) -> None:
        filled = BAR * self._over // self._count
        bar = "#" * filled + "-" * (BAR - filled)
        wrong = f", {self._wrong} not answered" if self._wrong else ""
        seconds = time.monotonic() - self._began_s
        end = "\n" if self._over == self._count else ""
        self._output.write(
            f"\r\033[K[{bar}] {self._over}/{self._count}{wrong}, {seconds:.0f} s{end}"
        )
        self._output.flush()


class Loader:
    """Sends requests to one server.

    Args:
        url: of the server.
        headers: of each request.
        endpoint: where requests go.
        timeout_s: after which a silent answer has failed.
    """

    def __init__(self, url: str, headers: Mapping[str, str], endpoint: str, timeout_s: float):
        self._url, self._headers = url, headers
        self._endpoint, self._timeout_s = endpoint, timeout_s

    async def one_by_one(self, bodies: Sequence[dict[str, Any]]) -> None:
        """Send requests each after the answer to the one before, and keep nothing of them."""
        async with self._client() as client:
            for body in bodies:
                await send(client, self._endpoint, body, 0, 0.0)

    async def all(
        self,
        bodies: Sequence[dict[str, Any]],
        input_lens: Sequence[int],
        times_s: Sequence[float],
        *,
        max_concurrency: int | None,
        progress: Progress,
    ) -> tuple[list[Answer], float]:
        """Send requests at their times.

        Args:
            bodies: of the requests.
            input_lens: tokens of their prompts.
            times_s: when each is sent, after the beginning; ascending.
            max_concurrency: how many are under way at once; others wait, and their time runs from
                when they are sent. None: all.
            progress: told of each that is over.

        Returns:
            The answers in the order of the requests, and the seconds to the end of the last.
        """
        places = asyncio.Semaphore(max_concurrency or len(bodies))
        async with self._client() as client:
            began_s = time.perf_counter()

            async def run(body: dict[str, Any], input_len: int) -> Answer:
                try:
                    answer = await send(client, self._endpoint, body, input_len, began_s)
                finally:
                    places.release()
                progress.add(answer)
                return answer

            async with _cancelled_together() as tasks:
                for body, input_len, at_s in zip(bodies, input_lens, times_s, strict=True):
                    if (wait_s := began_s + at_s - time.perf_counter()) > 0:
                        await asyncio.sleep(wait_s)
                    await places.acquire()
                    tasks.append(asyncio.ensure_future(run(body, input_len)))
                answers = await asyncio.gather(*tasks)
            return answers, time.perf_counter() - began_s

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self._url, headers=self._headers, timeout=httpx.Timeout(self._timeout_s),
            limits=httpx.Limits(max_connections=None), trust_env=False,
        )  # fmt: skip


@contextlib.asynccontextmanager
async def _cancelled_together() -> AsyncIterator[list["asyncio.Future[Answer]"]]:
    """Collect tasks, none of which outlives the block."""
    tasks: list[asyncio.Future[Answer]] = []
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
