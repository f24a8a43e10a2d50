"""Engines that only look like SGLang's, which hand prompts over in rooms."""

import threading
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.serving.router.support import ADAPTER, MODEL, Engine

Room = tuple[str, int, int]


class Rooms:
    """Where the engines of one test meet."""

    def __init__(self):
        self._lock = threading.Lock()
        self._computed: dict[Room, threading.Event] = {}
        self._joined: dict[Room, threading.Event] = {}

    def of(self, room: Room) -> tuple[threading.Event, threading.Event]:
        """When its prompt is computed, and when the decode engine is there."""
        with self._lock:
            return (
                self._computed.setdefault(room, threading.Event()),
                self._joined.setdefault(room, threading.Event()),
            )


class SglangEngine(Engine):
    """A prefill engine answers when it has computed a prompt and the decode engine is in its room.

    Attributes:
        arrived: bodies of requests, as soon as they come.
        end: while it is not set, a prefill engine does not answer what it has handed over.
        end_with: a status with which it answers then.
        role: "prefill", "decode" or "both".
        switched: bodies of ``/pd_role_switch``.
        refuses_switch: what it answers instead of switching.
        refuses_with: the status of that.
    """

    def __init__(self, role: str, rooms: Rooms):
        self.role, self._rooms = role, rooms
        self.arrived: list[dict[str, Any]] = []
        self.end, self.end_with = threading.Event(), 200
        self.end.set()
        self.switched: list[dict[str, Any]] = []
        self.refuses_switch: dict[str, Any] = {}
        self.refuses_with = 400
        super().__init__()

    def close(self) -> None:
        self.end.set()
        super().close()

    def _more_routes(self) -> list[Route]:
        return [Route("/pd_role_switch", self._switch, methods=["POST"])]

    async def _switch(self, request: Request) -> Response:
        body = await request.json()
        self.switched.append(body)
        if self.refuses_switch:
            return JSONResponse(self.refuses_switch, self.refuses_with)
        self.role = body["new_role"]
        return JSONResponse({"success": True, "message": "", "new_role": self.role})

    async def _models(self, _: Request) -> Response:
        cards = [
            {"id": MODEL, "owned_by": "sglang", "parent": None},
            {"id": ADAPTER, "owned_by": "sglang", "parent": MODEL},
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def _metrics(self, _: Request) -> Response:
        return PlainTextResponse('sglang:max_total_num_tokens{tp_rank="0"} 16000.0\n' + self.load)

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.arrived.append(body)
        room = tuple(body.get(f"bootstrap_{name}") for name in ("host", "port", "room"))
        if self.role == "both":
            assert room == (None, None, None)
            return await super()._generate(request)
        if None in room or not 0 <= room[2] < 2**63:
            error = {"object": "error", "message": f"there is no room {room}", "code": 400}
            return JSONResponse(error, 400)
        computed, joined = self._rooms.of(room)
        if self.role == "decode":
            joined.set()
            await self._until(computed, request)
            return await super()._generate(request)
        answer = await super()._generate(request)
        if answer.status_code != 200 or await request.is_disconnected():
            return answer
        computed.set()
        await self._until(joined, request)
        await self._until(self.end, request)
        if self.end_with != 200:
            return JSONResponse({"object": "error", "message": "it broke"}, self.end_with)
        return answer

    async def _until(self, event: threading.Event, request: Request) -> None:
        while not event.is_set():
            if await request.is_disconnected():
                self.num_left += 1
                return
            await anyio.sleep(0.005)
