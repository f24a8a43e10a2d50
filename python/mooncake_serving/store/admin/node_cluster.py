"""A node of this process, as the routes of a cluster see it."""

from collections.abc import Sequence

import numpy as np

from mooncake_kernels.pool import Key

from ..directory import Member
from ..node import Node


class NodeCluster:
    """The cluster in which a node takes part, for ``make_app``.

    Args:
        node: with the pool of the app's store; it stays the caller's.
    """

    def __init__(self, node: Node):
        self._node = node

    def members(self) -> Sequence[Member]:
        return self._node.members()

    def own_pool(self) -> str:
        return self._node.pool_name

    def withdraw(self, key: Key) -> None:
        self._node.listing.withdraw(np.array([key], np.uint64))

    def drain(self, name: str) -> None:
        if name != self._node.name:
            raise NotImplementedError(f"only {name} itself can do that: ask its admin server")
        raise NotImplementedError("objects cannot be moved to other nodes yet")
