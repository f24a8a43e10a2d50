"""Nodes that are open when the interpreter exits: they leave then, as if they had been closed."""

import atexit
import logging
import weakref

from mooncake_kernels.closing import Closing

logger = logging.getLogger(__name__)

_open: weakref.WeakSet[Closing] = weakref.WeakSet()


def close_at_exit(node: Closing) -> None:
    """Close a node when the interpreter exits, unless ``is_closed`` is called before.

    Its engine, its store and its directory are closed later, or by nobody.
    """
    _open.add(node)


def is_closed(node: Closing) -> None:
    """Record that a node needs no closing."""
    _open.discard(node)


@atexit.register
def _close_all() -> None:
    for node in list(_open):
        try:
            node.close()
        except Exception as error:  # noqa: BLE001 - the others are closed, too
            logger.info("a node is not closed: %s", error)
