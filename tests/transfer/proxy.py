"""A proxy between two engines: forwards bytes, delayed or altered, and records them."""

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from .support import WAIT_S, connect

Alter = Callable[[bytes], bytes]


@dataclass
class Flow:
    """The bytes of one direction of one connection."""

    num_taken: int = 0  # bytes that have come, those that are held included
    passed: bytearray = field(default_factory=bytearray)
    limit: int | None = None  # that many bytes may pass for now; None: all
    ended: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def hold(self, after: int) -> None:
        with self.changed:
            self.limit = len(self.passed) + after
            self.changed.notify_all()

    def release(self) -> None:
        with self.changed:
            self.limit = None
            self.changed.notify_all()

    def wait(self, condition: Callable[["Flow"], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), WAIT_S)

    def pump(self, source: socket.socket, sink: socket.socket, alter: Alter) -> None:
        try:
            while data := source.recv(1 << 16):
                with self.changed:
                    self.num_taken += len(data)
                    self.changed.notify_all()
                data = alter(data)
                while data:
                    data = data[self._pass(sink, data) :]
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        finally:
            with self.changed:
                self.ended = True
                self.changed.notify_all()

    def _pass(self, sink: socket.socket, data: bytes) -> int:
        with self.changed:
            self.changed.wait_for(lambda: self.limit is None or self.limit > len(self.passed))
            room = len(data) if self.limit is None else self.limit - len(self.passed)
            self.passed += data[:room]
            self.changed.notify_all()
        sink.sendall(data[:room])
        return min(room, len(data))


@dataclass
class Relay:
    """One connection: up is from the initiator to the target."""

    up: Flow = field(default_factory=Flow)
    down: Flow = field(default_factory=Flow)


class Proxy:
    """Listens in the place of an engine. A relay's target keeps its connection until its bytes
    have arrived, whatever the initiator does.

    Of each direction of a new connection, ``limit`` bytes may pass for now; None: all.
    """

    def __init__(
        self,
        target: str,
        alter_up: Alter = bytes,
        alter_down: Alter = bytes,
        *,
        limit: int | None = None,
    ):
        self.limit = limit
        self.target = target
        self.alters = (alter_up, alter_down)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.sockets: list[socket.socket] = []
        self.relays: list[Relay] = []
        self.name = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = connect(self.target)
            far.settimeout(None)
            self.sockets += [near, far]
            relay = Relay(Flow(limit=self.limit), Flow(limit=self.limit))
            self.relays.append(relay)
            for flow, *way in ((relay.up, near, far), (relay.down, far, near)):
                alter = self.alters[flow is relay.down]
                thread = threading.Thread(target=flow.pump, args=(*way, alter), daemon=True)
                self._threads.append(thread)
                thread.start()

    def cut(self) -> None:
        """End every present connection abruptly; new ones made meanwhile stay."""
        for end in list(self.sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *error: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        for relay in self.relays:
            relay.up.release()
            relay.down.release()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        for end in self.sockets:
            end.close()
