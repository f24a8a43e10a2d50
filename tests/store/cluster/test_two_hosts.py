"""The tests of two_hosts/ pass where a process can have its own network."""

from ...transfer.test_two_hosts import own_network, run  # noqa: F401


def test_two_hosts(own_network):  # noqa: F811
    run(own_network, "test_partition.py", folder="tests/store/cluster/two_hosts")
