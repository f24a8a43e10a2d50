"""A node of this process, seen through the admin routes."""

import numpy as np
import pytest

from mooncake_serving.store.admin import NodeCluster
from mooncake_serving.store.directory import EmbeddedDirectory

from ..cluster.support import Hosts, replaced, value
from ..support import eventually


@pytest.mark.parametrize(
    "error, told", [(OSError(5, "disk"), "disk"), (TimeoutError(), "TimeoutError")]
)
def test_a_drain_that_fails_is_told_and_may_be_begun_again(error, told):
    hosts = Hosts(EmbeddedDirectory())
    try:
        one, two = hosts.several(2)
        one.cluster.put("a", value(1))

        def fails(original, key):
            raise error

        with NodeCluster(one.node) as cluster:
            with replaced(one.store, "remove_key", fails):
                cluster.drain(one.node.name)
                assert eventually(lambda: cluster.draining().state == "failed")
            assert told in cluster.draining().error
            words = one.cluster.keyspace.keys(["a"])
            assert one.node.pool_name in hosts.directory.holders(words)[0]
            assert np.array_equal(one.store.list_objects()[0], words)
            cluster.drain(one.node.name)
            assert eventually(lambda: cluster.draining().state == "left")
        assert two.store.get("a") == value(1)
    finally:
        hosts.close()
