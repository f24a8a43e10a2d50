"""How long copies stay is set for all of them, from any host."""

import pytest

from mooncake_kernels.errors import Unavailable
from mooncake_serving.store import Replicator
from mooncake_serving.store.checks import RETENTIONS

from ..replication.support import die, forget
from .support import kept_by, value


def retention_of(host, key) -> str:
    [(retention, _)] = kept_by(host.store, [key])
    return RETENTIONS[retention]


@pytest.mark.parametrize("asker", [0, 1, 2])
def test_retain_applies_to_every_copy(hosts, asker):
    one, two = hosts.several(2)
    cluster = [one, two, hosts.make("none", 0)][asker].cluster
    one.cluster.put("a", value(1))
    Replicator(one.cluster).replicate(["a"], 2)
    for retention in ("hard", "soft", "normal"):
        assert cluster.retain("a", retention) is True
        assert [retention_of(host, "a") for host in (one, two)] == [retention] * 2
    assert cluster.retain("b", "hard") is False


def test_hard_retained_object_is_not_evicted(hosts):
    one, two = hosts.several(2)
    for i in range(64):  # the pool is full
        one.cluster.put(i, value(i))
    assert two.cluster.retain(0, "hard")
    assert one.store.evict(64 * 4096).keys.shape == (63, 2)
    assert two.cluster.get(0) == value(0)


def test_retain_fails_when_a_holder_does_not_respond(hosts):
    one, two, three = hosts.several(3)
    one.cluster.put("a", value(1))
    Replicator(one.cluster).replicate(["a"], 3)
    die(two)
    with pytest.raises(Unavailable, match="^retain: it is not set everywhere: "):
        three.cluster.retain("a", "hard")
    assert retention_of(one, "a") == retention_of(three, "a") == "hard"
    forget(hosts.directory, two)
    assert three.cluster.retain("a", "soft") and retention_of(one, "a") == "soft"
