"""A ``ClusterStore`` that owns its store, engine and directory. Needs the extra ``store``."""

from contextlib import ExitStack
from typing import Any

from mooncake_serving.store import ClusterStore, Node


class OwnedCluster(ClusterStore):
    """A ``ClusterStore`` whose ``close()`` also closes what was opened for it.

    Args:
        node: see ``ClusterStore``.
        opened: closes the node, and all it uses; its contents are taken over.
        **options: of ``ClusterStore``.
    """

    def __init__(self, node: Node, opened: ExitStack, **options: Any):
        super().__init__(node, **options)
        self._opened = opened.pop_all()

    def close(self) -> None:
        """Close the node, engine, directory and pool. Idempotent."""
        self._opened.close()
