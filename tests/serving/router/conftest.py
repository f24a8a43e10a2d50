import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.serving.router.sglang import Rooms, SglangEngine
from tests.serving.router.support import BLOCK, Engine, RouterServer


@pytest.fixture
def start():
    """Starts engines and routers, which end with the test."""
    with contextlib.ExitStack() as stack:
        all_made = []

        def started(kind: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            made = kind(*args, **kwargs)
            stack.callback(made.close)
            all_made.append(made)
            return made

        yield started
        for made in all_made:  # at once: each takes a part of a second
            made.server.stop()


@pytest.fixture
def cluster(start):
    """Makes a router in front of engines: of their roles, by name."""

    def make(
        roles: dict[str, str],
        *,
        events: bool = False,
        engine: dict | None = None,
        serves: dict[str, list[str]] | None = None,
        **more: Any,
    ):
        engines, rooms = {}, Rooms()
        for name, role in roles.items():
            if more.get("connector") == "sglang":
                engines[name] = start(SglangEngine, role, rooms)
            else:
                kwargs = {"is_prefill": role == "prefill", "needs_params": role == "decode"}
                engines[name] = start(Engine, **kwargs, **(engine or {}))
            engines[name].serves = (serves or {}).get(name, engines[name].serves)
        entries = [
            {"name": name, "role": role, "url": engines[name].url}
            | ({"bootstrap": engines[name].url} if _needs_bootstrap(role, more) else {})
            | (
                {"events": engines[name].events.endpoint, "replay": engines[name].events.replay}
                if events
                else {}
            )
            for name, role in roles.items()
        ]
        more = {"block_size": BLOCK, "health_s": 0.05} | more
        return start(RouterServer, {"instance": entries, **more}), engines

    return make


def _needs_bootstrap(role: str, more: dict) -> bool:
    return role == "prefill" and more.get("connector") in ("mooncake", "sglang")
