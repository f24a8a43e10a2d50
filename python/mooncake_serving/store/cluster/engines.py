"""Which engines of this process have a node: a node takes all notifications of its engine."""

import threading
import weakref

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.transfer import TransferEngine

_taken: weakref.WeakSet[TransferEngine] = weakref.WeakSet()
_lock = threading.Lock()


def take_engine(engine: TransferEngine) -> None:
    """Record that an engine has a node.

    Raises:
        InvalidArgument: it has one already.
    """
    with _lock:
        if engine in _taken:
            raise InvalidArgument(
                f"Node: engine must be without a node, got {engine.name}, which has one"
            )
        _taken.add(engine)


def return_engine(engine: TransferEngine) -> None:
    """Record that an engine no longer has a node."""
    with _lock:
        _taken.discard(engine)
