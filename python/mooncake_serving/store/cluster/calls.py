"""Requests to other nodes, and their answers."""

import secrets
import time
from collections.abc import Container
from typing import Any, TypeVar

from mooncake_kernels.errors import FailureKind

from ... import rpc
from .messages import Request, Response, encode

A = TypeVar("A", bound=Response)
R = TypeVar("R", bound=Request)


class NodeRpc(rpc.RpcClient):
    """Requests of this node to others. Thread-safe.

    Attributes:
        life: of this node, see ``Request``.
    """

    def __init__(self, peers: rpc.Peers):
        super().__init__(peers, encode)
        self.life = secrets.randbits(62)

    def make(self, kind: type[R], valid_s: float, *, number: int | None = None, **fields: Any) -> R:
        """Make a request of this node."""
        number = self.next_number() if number is None else number
        return kind(number, self.life, int(valid_s * 1000), **fields)

    def request(
        self,
        name: str,
        kind: type[Request],
        expected: type[A],
        deadline_s: float,
        *,
        valid_s: float | None = None,
        number: int | None = None,
        **fields: Any,
    ) -> A:
        """Send a request to a node, and wait for its answer.

        Args:
            name: of its engine.
            kind: of request.
            expected: kind of answer.
            deadline_s: seconds until the answer must be here.
            valid_s: for how long the other node shall regard the request; None: ``deadline_s``.
            number: of the request; None: the next.
            **fields: of the request.

        Raises:
            TransferError: the node cannot be reached, refuses, or does not answer in time. The
                request may have been carried out.
        """
        valid_s = deadline_s if valid_s is None else valid_s
        request = self.make(kind, valid_s, number=number, **fields)
        return self.call(name, request, expected, deadline_s)

    def fail_to(self, name: str) -> None:
        """Fail requests to a node, in whose place there is another one."""
        self.fail(lambda call: call.name == name, "it was restarted", FailureKind.GONE)

    def give_up(self, living: Container[str], grace_s: float) -> None:
        """Fail requests to nodes that are not members, unless they were just sent.

        A directory that was restarted does not know its members yet.
        """
        before = time.monotonic() - grace_s
        self.fail(
            lambda call: call.name not in living and call.started_s < before,
            "it is no member any more",
            FailureKind.GONE,
        )
