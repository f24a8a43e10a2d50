"""An engine that may send a node whatever it likes, and is no member of its directory."""

import secrets
import time
from collections.abc import Sequence

import numpy as np

from mooncake_kernels.transfer import Peer, TransferEngine
from mooncake_serving.store.cluster import messages

WAIT_S = 60.0


def key_of(number: int) -> bytes:
    return np.array([[number, 0xBEEF]], np.uint64).tobytes()


def place_of(address: int, num_bytes: int) -> bytes:
    return np.array([(address, num_bytes)], messages.PLACE).tobytes()


class Stranger:
    """Asks one node. It also says that every offer stands, as who makes one does."""

    def __init__(self, name: str, secret: bytes | None = None, transport: str = "tcp"):
        self.engine = TransferEngine(transports=[transport], secret=secret)
        self.memory = np.full(4096, 7, np.uint8)
        self.place = self.engine.register(self.memory).address
        self.into = np.zeros(1 << 16, np.uint8)
        self._into = self.engine.register(self.into, "read").address
        self.peer: Peer = self.engine.open(name)
        self.life = secrets.randbits(60)

    def ask(self, kind: type[messages.Request], **fields) -> messages.Response:
        """Send a request, and return the answer to it."""
        number = secrets.randbits(60)
        request = kind(number, self.life, 30_000, **fields)
        self.engine.write(self.peer, (), notify=messages.encode(request)).wait()
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            for _, data in self.engine.receive_notifications(0.2):
                message = messages.decode(data)
                if isinstance(message, messages.Release):
                    held = messages.Released(message.number, True)
                    self.engine.write(self.peer, (), notify=messages.encode(held)).wait()
                elif message.number == number:
                    return message
        raise AssertionError("there is no answer")

    def pull(self, key: int, source: str, places: Sequence[bytes]) -> messages.Response:
        return self.ask(
            messages.Pull, keys=key_of(key), source=source, verify=False,
            places=list(places), checksums=b"", options=b"",
        )  # fmt: skip

    def pin(self, keys: np.ndarray) -> tuple[int, np.ndarray]:
        """Pin objects; return their token, and a row of ``FOUND`` for each."""
        answer = self.ask(messages.Pin, keys=messages.key_bytes(keys), verify=False)
        return answer.number, answer.rows()

    def release(self, token: int) -> bool:
        return self.ask(messages.Release, token=token, is_answered=True).held

    def read(self, address: int, num_bytes: int) -> bytes:
        self.into[:] = 0
        self.engine.read(self.peer, [(self._into, address, num_bytes)]).wait()
        return self.into[:num_bytes].tobytes()

    def close(self) -> None:
        self.engine.close()
