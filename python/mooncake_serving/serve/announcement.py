"""An engine that registers at a router while it serves."""

import argparse
import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.applications import Starlette

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.private_files import first_line

FIRST_S, MOST_S = 0.5, 30.0  # between two attempts
ANSWER_S, LEAVE_S = 30.0, 5.0  # the router looks at the engine before it answers
AGAIN = (408, 409, 429)  # besides 5xx: what another attempt may change


class Announcement:
    """Says at a router where an engine serves.

    Args:
        options: of the command; its ``register`` is the router's URL.

    Raises:
        InvalidArgument: an option is wrong.
        ValueError, OSError: the first line of the key's file is none, or cannot be read.
    """

    def __init__(self, options: argparse.Namespace):
        self._url, self._role = options.register, options.role
        self.host = options.handoff_host or options.host
        if not self._url.startswith(("http://", "https://")):
            what = f"--register must be a URL like http://10.0.0.1:8000, got {self._url!r}"
            raise InvalidArgument(f"serve engine: {what}")
        if self.host in ("0.0.0.0", "::"):
            wanted = f"the address by which the router reaches this engine, got {self.host!r}"
            raise InvalidArgument(f"serve engine: --handoff-host must be {wanted}")
        key = first_line(options.admin_key_file) if options.admin_key_file else ""
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def add_to(self, app: Starlette, address: str, **endpoints: str) -> None:
        """Have an engine's app register when it is ready, and unregister when it ends.

        It is named by its address, ``host:port``; ``endpoints`` are its ``events`` and ``replay``.
        """
        entries = {"name": address, "url": f"http://{address}", "role": self._role, **endpoints}
        serve = app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[Any]:
            options: dict[str, Any] = {"base_url": self._url, "headers": self._headers}
            async with serve(app) as state, httpx.AsyncClient(**options, trust_env=False) as client:
                registering = asyncio.ensure_future(_register(client, entries))
                try:
                    yield state
                finally:
                    registering.cancel()
                    await asyncio.gather(registering, return_exceptions=True)
                    body = {"name": address, "drain_s": 0}
                    with contextlib.suppress(httpx.HTTPError):  # the router sees that it is gone
                        await client.post("/unregister", json=body, timeout=LEAVE_S)

        app.router.lifespan_context = lifespan


async def _register(client: httpx.AsyncClient, entries: dict[str, str]) -> None:
    """Register, again until the router takes it, or says that it never will."""
    wait_s, status = FIRST_S, 0
    while status in (0, *AGAIN) or status >= 500:
        try:
            answer = await client.post("/register", json=entries, timeout=ANSWER_S)
            status, why = answer.status_code, answer.text[:500]
        except httpx.HTTPError as error:
            status, why = 0, f"{type(error).__name__}: {error}"
        if status == 200:
            return
        logging.warning("%s has not registered this engine: %s", client.base_url, why)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, MOST_S)
